"""Step times that the planner predicts from a calibration of this machine, beside those of real CPU ranks.

    shardwright calibrate --device cpu -o calibration.json
    python benchmarks/planner_time.py calibration.json [--rounds 5] [--out figures.json]

A Llama is trained on one global batch in twenty layouts of one and two ranks and seven of four; those of as many ranks
take turns, some steps at a time, as a job's weights lie in the caches from step to step. So do the steps of other
models by which `shardwright calibrate` tells how fast the machine is at the time, which need not be what it was when
that ran. Printed are the medians of the wall time of a step (the slowest rank's) and of its processor time (summed over
ranks), beside what is predicted of both, and how alike the orders are (Kendall's tau: 1 is the same, 0 none). On a busy
machine look at the processor times, since ranks that share cores with others take longer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Turns

from shardwright import Booster
from shardwright.cli.calibrate import wide_llama
from shardwright.lazy import LazyInitContext
from shardwright.models.example_inputs import loss_of
from shardwright.planner.calibration import Calibration, calibrated, read
from shardwright.planner.measure_steps import REFERENCES, WORDS, Steps, shares
from shardwright.planner.replay import Job
from shardwright.planner.step_times import step_times
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import run_ranks

SAMPLES, LENGTH = 8, 64  # of a step, on all ranks
IN_A_ROW = 5  # steps of a turn
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
PIPE = {"pp_size": 2}
AGAIN = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, 8 microbatches": (1, {"num_microbatches": 8}),
    "1 rank, 1 microbatch": (1, {"num_microbatches": 1}),
    "dp 2, ZeRO-1": (2, {"zero_stage": 1, "num_microbatches": 1}),
    "dp 2, ZeRO-3": (2, {"zero_stage": 3, "num_microbatches": 1}),
    "dp 2, ZeRO-1, 4 microbatches": (2, {"zero_stage": 1, "num_microbatches": 4}),
    "tp 2": (2, {"tp_size": 2, "num_microbatches": 2}),
    "pp 2, 1F1B, 2 microbatches": (2, {**PIPE, "num_microbatches": 2}),
    "pp 2, 1F1B, 8 microbatches": (2, {**PIPE, "num_microbatches": 8}),
    "pp 2, zb, 4 microbatches": (2, {**PIPE, "pp_style": "zb", "num_microbatches": 4}),
    "1 rank, 4 microbatches, recomputed": (1, {"num_microbatches": 4, "gradient_checkpoint_config": AGAIN}),
    "dp 2, ZeRO-2, 4 microbatches": (2, {"zero_stage": 2, "num_microbatches": 4}),
    "pp 2, interleaved, 4 microbatches": (
        2,
        {**PIPE, "pp_style": "interleaved", "num_model_chunks": 2, "num_microbatches": 4},
    ),
    "pp 2, zbv, 4 microbatches": (2, {**PIPE, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 4}),
    "dp 2, ZeRO-3, 4 microbatches": (2, {"zero_stage": 3, "num_microbatches": 4}),
    "dp 2, ZeRO-1, recomputed": (2, {"zero_stage": 1, "num_microbatches": 1, "gradient_checkpoint_config": AGAIN}),
    "tp 2, 1 microbatch": (2, {"tp_size": 2, "num_microbatches": 1}),
    "tp 2, split_gather": (2, {"tp_size": 2, "enable_sequence_parallelism": True, "num_microbatches": 2}),
    "pp 2, 1F1B, recomputed": (2, {**PIPE, "num_microbatches": 4, "gradient_checkpoint_config": AGAIN}),
    "pp 2, zbv, 8 microbatches": (2, {**PIPE, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 8}),
    "pp 2, dualpipev": (2, {**PIPE, "pp_style": "dualpipev", "num_model_chunks": 2, "num_microbatches": 4}),
    "dp 4, ZeRO-1": (4, {"zero_stage": 1, "num_microbatches": 1}),
    "dp 4, ZeRO-3": (4, {"zero_stage": 3, "num_microbatches": 1}),
    "tp 4": (4, {"tp_size": 4, "num_microbatches": 1}),
    "dp 2 x tp 2, ZeRO-1": (4, {"tp_size": 2, "zero_stage": 1, "num_microbatches": 1}),
    "dp 2 x pp 2, ZeRO-1": (4, {**PIPE, "zero_stage": 1, "num_microbatches": 4}),
    "tp 2 x pp 2": (4, {**PIPE, "tp_size": 2, "num_microbatches": 4}),
    "pp 4, 1F1B, 8 microbatches": (4, {"pp_size": 4, "num_microbatches": 8}),
}


def plugin(options: dict[str, Any], **changes: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", "max_norm": 1.0, **options, **changes})


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, CONFIG.vocab_size, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def lazy() -> torch.nn.Module:
    with LazyInitContext():
        return LlamaForCausalLM(CONFIG)


def replicas(world: int, options: dict[str, Any]) -> int:
    return world // (options.get("tp_size", 1) * options.get("pp_size", 1))


def steps_of(
    bare: torch.nn.Module, plugin: HybridParallelPlugin, own: dict[str, torch.Tensor]
) -> Callable[[int], None]:
    booster = Booster(plugin=plugin)
    model: Any
    optim: Any
    model, optim, *_ = booster.boost(bare, optimizer(bare))

    def steps(number: int) -> None:
        for _ in range(IN_A_ROW):
            booster.execute_pipeline(iter([own]), model, lambda outputs, _: loss_of(outputs), optim)
            optim.step()
            optim.zero_grad()

    return steps


def measure(rank: int, world: int, layouts: dict[str, dict[str, Any]], rounds: int) -> Turns:
    torch.set_num_threads(1)  # as torchrun has it
    steps = {
        name: steps_of(LlamaForCausalLM(CONFIG), plugin(options), batch(SAMPLES // replicas(world, options)))
        for name, options in layouts.items()
    }
    for number, known in enumerate(REFERENCES):
        own = HybridParallelPlugin(precision="fp32", **known.options)
        steps[f"reference {number}"] = steps_of(wide_llama(known.width, WORDS), own, known.batch(rank))
    return Turns.take(steps, rounds, warm_up=1)


def predict(world: int, options: dict[str, Any], found: Calibration) -> tuple[float, float]:
    """Seconds of a step, and of the processor, over all ranks."""
    job = Job(partial(plugin, options), lazy, optimizer, batch(SAMPLES // replicas(world, options)))
    times = step_times(job, world, calibrated(found, "fp32", world))
    assert not times.relative, times.relative
    return times.seconds, world * times.processor


def tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's: pairs in the same order minus pairs in the other one, of all."""
    pairs = list(combinations(zip(one, other, strict=True), 2))
    return sum(1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", help="file of shardwright calibrate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="figures as JSON")
    given = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    found = read(given.calibration)
    for world in sorted({world for world, _ in LAYOUTS.values()}):
        layouts = {name: options for name, (ranks, options) in LAYOUTS.items() if ranks == world}
        taken = run_ranks(measure, world, layouts, given.rounds, timeout=1800, debug="OFF")[0]
        names = [f"reference {number}" for number in range(len(REFERENCES))]
        own = Steps(
            [median(taken.cpu[name]) / IN_A_ROW / world for name in names],
            [median(taken.wall[name]) / IN_A_ROW for name in names],
        )
        found = replace(found, whole={**found.whole, **shares(wide_llama, found, {world: own})})
        print(f"{world} ranks: operators, host and waits, in those of the file: {found.whole[str(world)]}")
        for name, options in layouts.items():
            wall, cpu = predict(world, options, found)
            rows[name] = {
                "wall": median(taken.wall[name]) / IN_A_ROW,
                "least wall": min(taken.wall[name]) / IN_A_ROW,
                "predicted wall": wall,
                "cpu": median(taken.cpu[name]) / IN_A_ROW,
                "predicted cpu": cpu,
            }
    print(f"{'ms of a step':32}{'wall':>9}{'least':>9}{'predicted':>11}{'off':>8}{'CPU':>9}{'predicted':>11}{'off':>8}")
    for name, row in rows.items():
        off = [row[f"predicted {kind}"] / row[kind] - 1 for kind in ("wall", "cpu")]
        wall, least, other, cpu, processor = (1000 * row[key] for key in row)
        print(f"{name:32}{wall:9.0f}{least:9.0f}{other:11.0f}{off[0]:8.0%}{cpu:9.0f}{processor:11.0f}{off[1]:8.0%}")
    for ranks in ((1, 2), (1, 2, 4)):
        own = [row for name, row in rows.items() if LAYOUTS[name][0] in ranks]
        for kind in ("wall", "cpu"):
            off = [abs(row[f"predicted {kind}"] / row[kind] - 1) for row in own]
            order = tau([row[kind] for row in own], [row[f"predicted {kind}"] for row in own])
            words = f"{median(off):.0%} off in the median, {max(off):.0%} at worst, Kendall's tau {order:.2f}"
            print(f"{kind} times of {len(own)} layouts of up to {ranks[-1]} ranks: {words}")
    columns = {key: [row[key] for row in rows.values()] for key in next(iter(rows.values()))}
    taus = {kind: tau(columns[kind], columns[f"predicted {kind}"]) for kind in ("wall", "cpu")}
    if given.out is not None:
        given.out.write_text(json.dumps({"layouts": rows, "tau": taus}, indent=1))


if __name__ == "__main__":
    main()
