"""ZeRO stage 3 against FSDP2 on a HuggingFace model through the Booster: milliseconds per step, wall and CPU, one
alternating run, medians.

    python benchmarks/stage3.py                       # 2 ranks, a small Llama, fp32
    python benchmarks/stage3.py --precision bf16 --ranks 4 --accumulate 2

CPU milliseconds are summed over ranks; on a machine with fewer idle cores than ranks they are the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import LowLevelZeroPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks


def model_of(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def stepper(kind: str, rank: int, options: argparse.Namespace) -> Callable[[], None]:
    if kind == "FSDP2":
        mixed = None if options.precision == "fp32" else options.precision
        booster = Booster(plugin=TorchFSDPPlugin(mixed_precision=mixed) if mixed else TorchFSDPPlugin())
    else:
        booster = Booster(plugin=LowLevelZeroPlugin(stage=int(kind[-1]), precision=options.precision))
    model = model_of(options.hidden, options.layers)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    ids = torch.randint(0, 2048, (options.samples, options.length), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        for number in range(options.accumulate):
            with booster.no_sync(model, optimizer) if number < options.accumulate - 1 else nullcontext():
                booster.backward(model(input_ids=ids, labels=ids, use_cache=False).loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    steps = {kind: stepper(kind, rank, options) for kind in options.kinds}
    times: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(options.repeats):
        for kind, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[kind][0].append((time.perf_counter() - wall) * 1e3)
            times[kind][1].append((time.process_time() - cpu) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=["FSDP2", "ZeRO 3", "ZeRO 2"])
    options = parser.parse_args()
    # DETAIL, the default of run_ranks, checks collectives for longer than they take.
    per_rank = run_ranks(measure, options.ranks, options, timeout=600, debug="OFF")
    result = {}
    for kind in options.kinds:
        wall = [max(times[kind][0][i] for times in per_rank) for i in range(options.repeats)]
        cpu = [sum(times[kind][1][i] for times in per_rank) for i in range(options.repeats)]
        result[kind] = {"wall_ms": round(statistics.median(wall), 1), "cpu_ms": round(statistics.median(cpu), 1)}
    base = result[options.kinds[0]]
    for figures in result.values():
        figures["of_first"] = round(figures["cpu_ms"] / base["cpu_ms"], 3)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
