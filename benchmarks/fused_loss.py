"""What a loss without logits costs and saves, through the Booster: time and peak memory of a step, fused and plain.

    python benchmarks/fused_loss.py [--steps 10] [--vocab 32000] [--hidden 256] [--layers 2] [--batch 4] [--length 512]
                                    [--precision fp32] [--tp 1] [--threads 1]

Two models with the same weights, `enable_fused_cross_entropy` True and False, take turns step by step on the same
batches, in one process or on --tp ranks. Printed are medians of wall and CPU time (of all ranks together) per step, and
the median of the ratios of a turn. Memory is counted in a step of each that is not timed: bytes of all tensors that are
alive at once, beyond those that stay between steps. Losses are compared first.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Step, Turns, boosted

from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.testing.live_bytes import LiveBytes


def build(options: argparse.Namespace, fused: bool) -> Step:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    plugin = HybridParallelPlugin(precision=options.precision, tp_size=options.tp, enable_fused_cross_entropy=fused)
    return boosted(LlamaForCausalLM(config), plugin)


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, options.vocab, (options.batch, options.length), generator=generator) for _ in range(3)]
    batches = [{"input_ids": each, "labels": each} for each in ids]
    steps = {name: build(options, name == "fused") for name in ("plain", "fused")}
    losses = {name: [float(step(batch)) for batch in batches] for name, step in steps.items()}
    apart = max(abs(one - other) / one for one, other in zip(losses["plain"], losses["fused"], strict=True))
    peaks = {}
    for name, step in steps.items():
        gc.collect()
        with LiveBytes(given=False) as peak:
            step(batches[0])
        peaks[name] = peak.most
    loops = {name: lambda turn, step=step: step(batches[turn % 3]) for name, step in steps.items()}
    return {"apart": apart, "peaks": peaks, "times": Turns.take(loops, options.steps).summary("plain")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "steps": 10, "vocab": 32000, "hidden": 256, "layers": 2, "batch": 4, "length": 512, "tp": 1, "threads": 1
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    found = run_ranks(run, options.tp, options, timeout=3600)
    report: dict[str, Any] = {**vars(options), "torch": torch.__version__, "losses apart": found[0]["apart"]}
    for name, times in found[0]["times"].items():
        report[name] = {**times, "peak MB": round(max(each["peaks"][name] for each in found) / 1e6, 1)}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
