"""Train on sequences that are too long for one rank: every rank holds a part of each.

    torchrun --nproc-per-node 2 examples/long_context.py --tiny
    torchrun --nproc-per-node 4 examples/long_context.py --tiny --mode all_to_all --sp 2
    torchrun --nproc-per-node 8 examples/long_context.py --length 131072                     # rings over all ranks
    torchrun --nproc-per-node 8 examples/long_context.py --length 131072 --ulysses 4         # rings of 2 x Ulysses of 4

`ring_attn` sends keys and values around while blocks of attention are computed; `all_to_all` (Ulysses) trades the parts
of a sequence for heads. Either way the batch that goes in is whole and the loss that comes out is that of the whole
sequence, the same as on one rank. Activations take 1 / sp of their memory on each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _shared import byte_tokenizer, count, endless, hybrid_plugin, options, sentences, text_blocks, vocabulary, wikitext
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.accelerator import get_accelerator
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.shardformer import PipelineGradientCheckpointConfig


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--mode", choices=("ring_attn", "all_to_all"), default="ring_attn")
    extra.add_argument("--sp", type=count, help="ranks that share a sequence; left out: all that --tp and --pp leave")
    extra.add_argument("--ulysses", type=count, help="of them, neighbours that trade heads inside of the ring")
    args = options(
        __doc__,
        argv,
        extra,
        model="Qwen/Qwen3-0.6B",
        batch_size=1,
        length=32768,
        lr=1e-5,
        tiny={"batch_size": 2, "length": 250},
    )
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes, **vocabulary(tokenizer)))
        dataset = text_blocks(tokenizer, sentences(400), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    sp_size = args.sp or coordinator.world_size // (args.tp * args.pp)
    sharing = {
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": args.mode,
        "sp_size": sp_size,
        "ulysses_size": args.ulysses,
    }
    plugin = hybrid_plugin(
        args,
        # Beside what a layer starts from, activations are made again in backward.
        gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0),
        **(sharing if sp_size > 1 else {}),
    )
    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    coordinator.print_on_master(f"{sp_size} ranks share {args.length} tokens of each sequence")

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")
    coordinator.print_on_master(f"peak memory {get_accelerator().max_memory_allocated() / 2**30:.2f} GiB")

    if args.output:
        booster.save_model(model, args.output, shard=True)


if __name__ == "__main__":
    main()
