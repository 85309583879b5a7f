"""Train LoRA adapters of a large model, save them as peft does, and load them back.

    python examples/lora.py --tiny --output adapters
    torchrun --nproc-per-node 4 examples/lora.py --tiny --tp 2 --pp 2 --output adapters
    torchrun --nproc-per-node 8 examples/lora.py --model Qwen/Qwen3-8B --pp 2 --output adapters

Adapters go on before boosting. Frozen weights have no gradients and no optimizer state, and what is saved is whole,
whatever the layout was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import peft
from _shared import byte_tokenizer, count, endless, hybrid_plugin, options, sentences, text_blocks, vocabulary, wikitext
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--rank", type=count, default=8, help="of the adapters")
    args = options(__doc__, argv, extra, model="Qwen/Qwen3-0.6B", lr=2e-4, tiny={"lr": 1e-2})
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
        config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **sizes, **vocabulary(tokenizer))
        base: Any = Qwen3ForCausalLM(config)
        dataset = text_blocks(tokenizer, sentences(100), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        base = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    plugin = hybrid_plugin(args)
    booster = Booster(plugin=plugin)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets, task_type="CAUSAL_LM")
    model = booster.enable_lora(base, lora_config=adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    coordinator.print_on_master(
        f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained"
    )

    optimizer = HybridAdam(trained, lr=args.lr)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")

    if args.output:
        booster.save_lora_as_pretrained(model, args.output)
        coordinator.block_all()
        if args.tiny and coordinator.is_master():  # as anyone loads them, on one device and without shardwright
            again = peft.PeftModel.from_pretrained(Qwen3ForCausalLM(config), args.output)
            prompt = tokenizer("the fox ", return_tensors="pt")["input_ids"]
            written = again.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
            print(f"adapters loaded from {args.output}: {tokenizer.decode(written[0])!r}")


if __name__ == "__main__":
    main()
