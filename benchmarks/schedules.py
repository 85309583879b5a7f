"""Pipeline schedules on HuggingFace models, trained through the Booster.

    python benchmarks/schedules.py                                   a Llama on 2 ranks, 4 microbatches
    python benchmarks/schedules.py --model qwen3-moe-causal-lm --ranks 4 --microbatches 8
    python benchmarks/schedules.py --checkpointing --only 1f1b zb
    python benchmarks/schedules.py --microbatches 2 --rows 1 --length 1024 --only 1f1b 1f1b/4     in 4 slices of the
    sequence

Every round trains one step with every schedule, in turn forwards and backwards, so that a busy machine disturbs all
alike. Reported are medians over rounds of the wall time of a step (the slowest rank's, from the first action to the
last) and of the CPU time (summed over ranks), their ratios to 1F1B, and the ratio of makespans that the simulator gives
for F = I = W. Losses are compared.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwright import Booster
from shardwright.pipeline.planning.simulate import simulate
from shardwright.pipeline.planning.sliced_schedule import get_sliced
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, run_ranks, zoo

APART = "dualpipev apart"  # the same schedule without pairs
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2, "dualpipev": 2, APART: 2}


def parsed(style: str) -> tuple[str, int]:
    """Name and number of slices of a schedule as it is asked for: 1f1b, or 1f1b/4."""
    name, _, slices = style.partition("/")
    if name not in CHUNKS:
        raise argparse.ArgumentTypeError(f"{style!r} is none of {', '.join(CHUNKS)}, or one of them with /SLICES")
    return name, int(slices or 1)


def as_schedule(style: str) -> str:
    parsed(style)
    return style


def train(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of every schedule: (wall, CPU) seconds of every round on this rank, and the losses that it saw."""
    torch.set_num_threads(1)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
    }
    batch = zoo.inputs(options.model, batch_size=options.microbatches * options.rows, seq_len=options.length, **sizes)
    jobs = {}
    for style in options.only:
        name, slices = parsed(style)
        model = zoo.build(options.model, dtype=torch.float32, max_position_embeddings=options.length, **sizes)
        if options.checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        plugin = HybridParallelPlugin(
            pp_size=world // options.tp,
            tp_size=options.tp,
            precision="fp32",
            num_microbatches=options.microbatches,
            pp_style=name.split()[0],
            num_model_chunks=CHUNKS[name],
            num_sequence_slices=slices,
            deferred_bytes=options.deferred_bytes if style.startswith("zb") else None,
        )
        booster = Booster(plugin=plugin)
        jobs[style] = (booster, *booster.boost(model, adamw(model))[:2])
        if name == APART:
            jobs[style][1].executor._pairs = False
    times: dict[str, list[tuple[float, float]]] = {style: [] for style in jobs}
    losses: dict[str, list[float]] = {style: [] for style in jobs}
    for round_index in range(options.rounds + 2):  # the first ones warm up
        for style in list(jobs)[:: 1 if round_index % 2 else -1]:
            booster, model, optimizer = jobs[style]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            result = booster.execute_pipeline(iter([batch]), model, None, optimizer, return_loss=True)
            elapsed = (time.perf_counter() - wall, time.process_time() - cpu)
            optimizer.step()
            optimizer.zero_grad()
            if round_index > 1:
                times[style].append(elapsed)
            if result["loss"] is not None:
                losses[style].append(result["loss"].item())
    peaks = {style: getattr(model.executor.runtime.weight_grads, "peak", 0) for style, (_, model, _) in jobs.items()}
    return {"times": times, "losses": losses, "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-causal-lm", help="a name of shardwright.testing.zoo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2, help="samples per microbatch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deferred-bytes", type=int, default=None)
    parser.add_argument("--only", nargs="+", type=as_schedule, default=["1f1b", "zb", "zbv"])
    options = parser.parse_args()
    results = run_ranks(train, options.ranks, options, timeout=1800, debug="OFF")
    stages = options.ranks // options.tp
    print(
        f"{options.model}, {options.layers} layers of {options.hidden}, {options.ranks} ranks, {options.microbatches} "
        "microbatches of ",
        end="",
    )
    print(
        f"{options.rows} x {options.length}, {options.rounds} "
        f"rounds{', checkpointing' if options.checkpointing else ''}"
    )
    print("| schedule | wall ms | CPU ms | wall / first | CPU / first | simulated | most bytes waiting | last loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    first: tuple[list[float], list[float], float] | None = None
    for style in options.only:
        rounds = list(zip(*(result["times"][style] for result in results), strict=True))
        walls, cpus = [max(w for w, _ in ranks) for ranks in rounds], [sum(c for _, c in ranks) for ranks in rounds]
        # A rank of 1F1B holds one stage; stages of other schedules are smaller by the number of chunks.
        name, slices = parsed(style)
        pairs = options.tp > 1 and name != APART
        schedule = get_sliced(name.split()[0], stages, options.microbatches, slices, CHUNKS[name], pairs=pairs)
        ideal = simulate(schedule).makespan / CHUNKS[name] / slices
        first = first or (walls, cpus, ideal)
        wall_ratio, cpu_ratio = (
            median(a / b for a, b in zip(mine, base, strict=True))
            for mine, base in ((walls, first[0]), (cpus, first[1]))
        )
        losses = next(result["losses"][style] for result in results if result["losses"][style])
        waiting = max(result["peaks"][style] for result in results)
        row = (
            f"{1000 * median(walls):.1f}",
            f"{1000 * median(cpus):.1f}",
            f"{wall_ratio:.3f}",
            f"{cpu_ratio:.3f}",
            f"{ideal / first[2]:.3f}",
        )
        print(f"| {style} | {' | '.join(row)} | {waiting} | {losses[-1]:.6f} |")


if __name__ == "__main__":
    main()
