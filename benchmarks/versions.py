"""Step time of two checkouts of the project, so that a change is seen not to have made anything slower.

    python benchmarks/versions.py ../before [--rounds 5] [--steps 12] [--only tp2]

A real model (Llama, through the Booster, with clipping and AdamW) is trained in layouts of one to four CPU ranks. The
checkouts take turns, each turn in processes of its own; printed are the medians over turns of the CPU milliseconds per
step, summed over ranks, and the median and range of the ratios of one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
PIPE = {"pp_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "pipeline": (1, {}),
    "pipeline, 4 microbatches": (1, {"num_microbatches": 4}),
    "bf16": (1, {"precision": "bf16"}),
    "dp2": (2, {}),
    "dp2, zero 1": (2, {"zero_stage": 1}),
    "dp2, zero 1, overlap_allgather": (2, {"zero_stage": 1, "overlap_allgather": True}),
    "dp2, zero 2": (2, {"zero_stage": 2}),
    "dp2, zero 3": (2, {"zero_stage": 3}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, PIPE),
    "pp2, zbv": (2, {**PIPE, "pp_style": "zbv", "num_model_chunks": 2}),
    "tp2 x pp2, zero 1": (4, {**PIPE, "tp_size": 2, "zero_stage": 1}),
    "dp2 x pp2, zero 1": (4, {**PIPE, "zero_stage": 1}),
    "dp2 x pp2, zbv, zero 1": (4, {**PIPE, "pp_style": "zbv", "num_model_chunks": 2, "zero_stage": 1}),
}
WARM_UP = 4


def train(rank: int, world: int, name: str, layout: dict[str, Any], steps: int) -> float:
    """CPU seconds of one step on this rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwright import Booster
    from shardwright.plugins import HybridParallelPlugin

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    plain = LlamaForCausalLM(config)
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", "max_norm": 1.0, **layout}))
    model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert optimizer is not None
    generator = torch.Generator().manual_seed(rank // (layout.get("tp_size", 1) * layout.get("pp_size", 1)))
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.process_time()
        ids = torch.randint(0, 1024, (8, 64), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if name == "plain":
            booster.backward(model(**batch).loss, optimizer)
        else:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - started) / steps


def one_turn(args: argparse.Namespace) -> None:
    """In a process that imports the checkout under test: milliseconds of every layout, as JSON on the last line."""
    from shardwright.testing import run_ranks

    found = {
        name: 1000 * sum(run_ranks(train, world, name, layout, args.steps, timeout=600, debug="OFF"))
        for name, (world, layout) in LAYOUTS.items()
        if args.only in name
    }
    print(json.dumps(found))


def turn(checkout: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--turn", "--steps", str(args.steps), "--only", args.only]
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="only layouts with this in their name")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        one_turn(args)
        return
    if args.before is None or not (args.before / "shardwright").is_dir():
        parser.error(
            f"before={args.before}: give the path of another checkout, for example one that `git worktree add` made"
        )
    pairs = []
    for number in range(args.rounds):
        order = (args.before.resolve(), HERE) if number % 2 == 0 else (HERE, args.before.resolve())
        found = {checkout: turn(checkout, args) for checkout in order}
        pairs.append((found[args.before.resolve()], found[HERE]))
        print(f"turn {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    print(f"{'layout':32} {'before':>8} {'now':>8} {'ratio':>7}  range    (CPU ms per step, summed over ranks)")
    for name in pairs[0][0]:
        ratios = sorted(now[name] / before[name] for before, now in pairs)
        columns = median(before[name] for before, _ in pairs), median(now[name] for _, now in pairs), median(ratios)
        print(f"{name:32} {columns[0]:8.1f} {columns[1]:8.1f} {columns[2]:7.3f}  {ratios[0]:.3f}..{ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
