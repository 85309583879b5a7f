"""Every kind of layout against the best of others on a CPU, in one alternating run: one table, and JSON beside it.

    python benchmarks/run.py                                  all cells, two sizes
    python benchmarks/run.py --cells tp2 zbv --sizes small --rounds 5
    python benchmarks/run.py --out figures.json --without-deepspeed

A cell is a layout and its peers, which take turns step by step in the same processes: forward, backward, clipping by
norm and AdamW of one Llama on one global batch, in fp32. A figure is the median over rounds of CPU milliseconds summed
over ranks; a ratio is the median of ratios within a round. The target is 1.00 of the best peer in every cell. Losses of
a first step are compared before anything is timed; who fails, or computes another loss, is named and left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from peers import MAX_NORM, Job, Step, adamw
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Turns

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

Build = Callable[[Job], Step]
PIPE = {"pp_size": 2}
OURS = "shardwright"


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    samples: int
    length: int
    microbatches: int = 4


SIZES = {
    "tiny": Size(32, 4, 4, 16, 4),  # to see that everything runs
    "small": Size(128, 8, 8, 64),
    "large": Size(512, 8, 16, 128),
}


@dataclass(frozen=True)
class Cell:
    """A layout: arguments of HybridParallelPlugin, and who else can do it."""

    world: int
    plugin: dict[str, Any]
    others: dict[str, Build]


def _deepspeed(stage: int) -> dict[str, Build]:
    return {f"DeepSpeed {stage}": peers.deepspeed(stage)} if peers.has_deepspeed() else {}


CELLS = {
    "dp2": Cell(2, {}, {"DDP": peers.ddp, "FSDP2": peers.fsdp2, **_deepspeed(0)}),
    "zero1": Cell(
        2,
        {"zero_stage": 1, "overlap_allgather": True},
        {"DDP, ZeroRedundancyOptimizer": peers.zero_redundancy, "FSDP2, kept": peers.fsdp2_kept, **_deepspeed(1)},
    ),
    "zero2": Cell(2, {"zero_stage": 2}, {"FSDP2, kept": peers.fsdp2_kept, **_deepspeed(2)}),
    "zero3": Cell(2, {"zero_stage": 3}, {"FSDP2": peers.fsdp2, **_deepspeed(3)}),
    "tp2": Cell(2, {"tp_size": 2}, {"DTensor": peers.dtensor, "transformers": peers.transformers_tp}),
    "pp2": Cell(2, PIPE, {"torch 1F1B": peers.torch_pipeline("Schedule1F1B", 1)}),
    "interleaved": Cell(
        2,
        {**PIPE, "pp_style": "interleaved", "num_model_chunks": 2},
        {"torch interleaved": peers.torch_pipeline("ScheduleInterleaved1F1B", 2)},
    ),
    "zbv": Cell(
        2,
        {**PIPE, "pp_style": "zbv", "num_model_chunks": 2},
        {"torch ZBV": peers.torch_pipeline("ScheduleZBVZeroBubble", 2)},
    ),
    "tp2xpp2": Cell(4, {**PIPE, "tp_size": 2}, {"DTensor, torch 1F1B": peers.torch_pipeline("Schedule1F1B", 1, tp=2)}),
}


def ours(settings: dict[str, Any]) -> Build:
    def build(job: Job) -> Step:
        microbatches = {"num_microbatches": job.microbatches} if "pp_size" in settings else {}
        plugin = HybridParallelPlugin(precision="fp32", max_norm=MAX_NORM, **settings, **microbatches)
        model = LlamaForCausalLM(job.model.config)
        model.load_state_dict(job.model.state_dict())
        booster = Booster(plugin=plugin)
        boosted: Any
        boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
        ranks, rank = plugin.data_parallel
        ids = job.ids.chunk(ranks)[rank].contiguous()
        batch = {"input_ids": ids, "labels": ids}
        assert optimizer is not None

        def step() -> torch.Tensor | None:
            result = booster.execute_pipeline(
                iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer, return_loss=True
            )
            optimizer.step()
            optimizer.zero_grad()
            return result["loss"]  # type: ignore[no-any-return]

        return step

    return build


def model_of(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048 if size.hidden > 32 else 128,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_everywhere(loss: torch.Tensor | None) -> float:
    """From the rank that knows it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if loss is None else float(loss))
    return next(value for value in found if value is not None)


def measure(
    rank: int, world: int, name: str, size: Size, rounds: int, folder: str, without: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Figures by contender, and why some have none."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # which DeepSpeed asks for
    os.environ.setdefault("MASTER_PORT", "29500")
    cell, model = CELLS[name], model_of(size)
    directory = Path(folder) / "model"
    if rank == 0:
        copy.deepcopy(model).save_pretrained(directory)  # which writes into the config
    dist.barrier()
    ids = torch.randint(
        0, model.config.vocab_size, (size.samples, size.length), generator=torch.Generator().manual_seed(1)
    )
    job = Job(model, ids, size.microbatches, directory)
    steps: dict[str, Step] = {}
    left_out: dict[str, str] = {}
    expected: float | None = None
    for who, build in {OURS: ours(cell.plugin), **cell.others}.items():
        if any(word in who.lower() for word in without):
            continue
        failure, step = "", None
        try:
            step = build(job)
            loss = loss_everywhere(step())
        except Exception as error:  # somebody who cannot do it on this machine is a result, too
            failure = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        failures: list[Any] = [None] * world
        dist.all_gather_object(failures, failure)
        if any(failures):
            left_out[who] = next(filter(None, failures))
            continue
        expected = loss if expected is None else expected
        if abs(loss - expected) > 1e-4 * abs(expected):
            left_out[who] = f"its first loss is {loss:.6f}, and not {expected:.6f}"
            continue
        assert step is not None
        steps[who] = step
    if OURS not in steps:
        return {}, left_out
    turns = Turns.take({who: (lambda _, step=step: step()) for who, step in steps.items()}, rounds, warm_up=2)
    return turns.summary(OURS), left_out


def facts() -> dict[str, Any]:
    packages = ("torch", "transformers", "deepspeed", "numpy")
    processor = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    return {
        "begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "threads_per_rank": 1,
        "packages": {name: importlib.metadata.version(name) for name in packages if _has(name)},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _has(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def best_of(figures: dict[str, dict[str, float]]) -> tuple[str, float] | None:
    """The peer with the least CPU time, and ours over it, from ratios within rounds."""
    others = {who: row["CPU ratio"] for who, row in figures.items() if who != OURS}
    if not others:
        return None
    best = min(others, key=lambda who: others[who])
    return best, 1 / others[best]


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| size | cell | ours, CPU ms | wall ms | best other | its CPU ms | ours / best | others |",
        "|---" * 8 + "|",
    ]
    for key, cell in found.items():
        size, name = key.split(" ")
        figures, best = cell["figures"], best_of(cell["figures"])
        own = figures.get(OURS)
        rest = [
            f"{who} {row['CPU ms']:.1f}"
            for who, row in figures.items()
            if who != OURS and (best is None or who != best[0])
        ]
        rest += [f"{who}: {why}" for who, why in cell["left out"].items()]
        shown = [f"{own['CPU ms']:.1f}", f"{own['wall ms']:.1f}"] if own else ["failed", ""]
        shown += [best[0], f"{figures[best[0]]['CPU ms']:.1f}", f"{best[1]:.3f}"] if best else ["none", "", ""]
        lines.append(f"| {size} | {name} | {' | '.join(shown)} | {'; '.join(rest).replace('|', '/')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"], metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-deepspeed", action="store_true", help="whose first run compiles for minutes")
    parser.add_argument("--out", type=Path, help="file for everything, as JSON")
    options = parser.parse_args()
    without = ["deepspeed"] if options.without_deepspeed else []
    found: dict[str, dict[str, Any]] = {}
    machine = facts()
    for size in options.sizes:
        for name in options.cells:
            with tempfile.TemporaryDirectory(prefix="shardwright-run-") as folder:
                arguments = (name, SIZES[size], options.rounds, folder, without)
                results = run_ranks(measure, CELLS[name].world, *arguments, timeout=1800, debug="OFF")
            found[f"{size} {name}"] = {"figures": results[0][0], "left out": results[0][1]}
            print(f"{size} {name}: {json.dumps(found[f'{size} {name}'])}", flush=True)
            if options.out:
                options.out.write_text(json.dumps({"machine": machine, "cells": found}, indent=1) + "\n")
    print(f"\n{table(found)}\n\nload {machine['load'][0]:.1f} at the start and {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
