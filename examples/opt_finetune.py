"""Fine-tune OPT by data parallelism, with gradients of several batches added up before each step.

    python examples/opt_finetune.py --tiny
    torchrun --nproc-per-node 2 examples/opt_finetune.py --tiny --plugin low_level_zero
    torchrun --nproc-per-node 8 examples/opt_finetune.py --model facebook/opt-1.3b --plugin torch_fsdp

Without tensor parallelism and pipelines the loop is the one that you have: call the model, call `booster.backward` in
place of `loss.backward()`. All plugins but pipelines work like this.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import torch.distributed as dist
from _shared import (
    byte_tokenizer,
    count,
    endless,
    options,
    refused_in_a_line,
    sentences,
    text_blocks,
    vocabulary,
    wikitext,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = ("torch_ddp", "torch_fsdp", "low_level_zero", "hybrid_parallel")


def make_plugin(args: argparse.Namespace) -> Plugin:
    if args.pp > 1:
        raise ValueError(f"--pp {args.pp}: this loop has no pipeline; gpt2_finetune.py has one")
    if args.tp > 1 and args.plugin != "hybrid_parallel":
        raise ValueError(f"--tp {args.tp} is an option of --plugin hybrid_parallel, and this is {args.plugin}")
    match args.plugin:
        case "torch_ddp":
            return TorchDDPPlugin()
        case "torch_fsdp":
            return TorchFSDPPlugin()
        case "low_level_zero":
            return LowLevelZeroPlugin(stage=args.zero, precision=args.precision, max_norm=1.0)
    return HybridParallelPlugin(tp_size=args.tp, zero_stage=args.zero, precision=args.precision, max_norm=1.0)


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--plugin", choices=PLUGINS, default="low_level_zero")
    extra.add_argument("--accumulate", type=count, default=2, help="batches of one step")
    args = options(__doc__, argv, extra, model="facebook/opt-350m")
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_attention_heads": 4}
        model = OPTForCausalLM(OPTConfig(num_hidden_layers=4, dropout=0.0, **sizes, **vocabulary(tokenizer)))
        dataset = text_blocks(tokenizer, sentences(100), args.length)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        dataset = text_blocks(tokenizer, wikitext(), args.length)

    with refused_in_a_line():
        plugin = make_plugin(args)
    own_precision = args.plugin in ("low_level_zero", "hybrid_parallel") or args.precision == "fp32"
    booster = Booster(plugin=plugin, mixed_precision=None if own_precision else args.precision)

    optimizer = HybridAdam(model.parameters(), lr=args.lr)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    model.train()

    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        total = 0.0
        for turn in range(args.accumulate):
            # Ranks exchange gradients with the last batch alone.
            last = turn == args.accumulate - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                batch = {name: tensor.to(model.device) for name, tensor in next(batches).items()}
                loss = model(**batch).loss / args.accumulate
                booster.backward(loss, optimizer)
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # each rank has the loss of its own samples
        coordinator.print_on_master(f"step {step}: loss {total.item() / coordinator.world_size:.4f}")

    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
