"""Compiled layers against layers that run as they are, through the Booster.

    python benchmarks/compiled.py [--hidden 384] [--layers 4] [--batch 4] [--length 128] [--turns 5] [--steps 5]
                                  [--ranks 1] [--precision fp32] [--threads 1]

A Llama of real proportions (heads of 64, a quarter of them for keys, an MLP of 8/3), trained with AdamW. Both models
take turns in one process, `--steps` steps each; printed are medians of wall and CPU time per step, the median of the
ratios of a turn with its range, and what the first step took, which is when the layers are compiled. With `--ranks 2`
layers are shared by two ranks. Losses of both are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Turns, boosted

from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

WARM_UP = 2


def build(options: argparse.Namespace, compiled: bool) -> Callable[[], torch.Tensor]:
    torch.manual_seed(1)
    heads = options.hidden // 64
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, options.ranks),
        vocab_size=options.vocabulary,
    )
    plugin = HybridParallelPlugin(
        tp_size=options.ranks, precision=options.precision, enable_jit_fused=compiled, parallel_output=True
    )
    step = boosted(LlamaForCausalLM(config), plugin)
    tokens = torch.randint(
        options.vocabulary, (options.batch, options.length), generator=torch.Generator().manual_seed(2)
    )
    return lambda: step({"input_ids": tokens, "labels": tokens})


def measure(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    steps, first, losses = {}, {}, {}
    for name in ("plain", "compiled"):
        steps[name] = build(options, name == "compiled")
        begin = time.perf_counter()
        losses[name] = [float(steps[name]())]
        first[name] = time.perf_counter() - begin
        for _ in range(WARM_UP):
            losses[name].append(float(steps[name]()))

    def train(name: str) -> None:
        for _ in range(options.steps):
            losses[name].append(float(steps[name]()))

    turns = Turns.take({name: lambda turn, name=name: train(name) for name in steps}, options.turns)
    apart = max(abs(a - b) for a, b in zip(losses["plain"], losses["compiled"], strict=True))
    found: dict[str, Any] = {"losses apart": apart, "first step, s": {name: round(first[name], 1) for name in first}}
    for kind, times in (("wall", turns.wall), ("cpu", turns.cpu)):
        ratios = turns.ratios(kind, "compiled", "plain")
        found[f"{kind}, ms"] = {name: round(median(times[name]) * 1e3 / options.steps, 1) for name in times}
        found[f"{kind}, ratio"] = [round(value, 3) for value in (median(ratios), min(ratios), max(ratios))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in {
        "hidden": 384,
        "layers": 4,
        "batch": 4,
        "length": 128,
        "vocabulary": 1024,
        "turns": 5,
        "steps": 5,
        "ranks": 1,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    [found, *_] = run_ranks(measure, options.ranks, options, timeout=480)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **vars(options), **found}))


if __name__ == "__main__":
    main()
