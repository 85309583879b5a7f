"""Fine-tune GPT-2 on WikiText-2 at any layout.

    python examples/gpt2_finetune.py --tiny
    torchrun --nproc-per-node 4 examples/gpt2_finetune.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/gpt2_finetune.py --model gpt2-xl --pp 2 --output trained

The loop is the same for every layout: `execute_pipeline` takes a batch of the loader, splits it into microbatches where
there is a pipeline, and leaves gradients as `loss.backward()` would.
"""

from __future__ import annotations

from collections.abc import Sequence

from _shared import byte_tokenizer, endless, hybrid_plugin, options, sentences, text_blocks, vocabulary, wikitext
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv, model="gpt2")
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # so that all layouts print equal losses
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, **dropout, **vocabulary(tokenizer)))
        dataset = text_blocks(tokenizer, sentences(100), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    plugin = hybrid_plugin(args)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():  # it holds the last layers, and so the loss of the whole batch
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
