"""What running a forward together with a backward costs and hides, on stages that sleep instead of computing.

    python benchmarks/pairs.py                            what changing turns costs; then 2 ranks, 8 microbatches
    python benchmarks/pairs.py --ranks 4 --microbatches 12 --share 0.4

A forward is two pieces of sleep, an input gradient two more and a weight gradient one as long as both. Behind each
piece but the last is a collective that takes `share` of a piece without the rank's doing. So no core is needed, and
what is measured is what the schedule does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm import turns
from shardwright.comm.p2p import PipeComm
from shardwright.ops.weight_grad import active_store
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import Costs, simulate
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.pipeline.timeline import Recorder
from shardwright.pipeline.two_at_once import TwoAtOnce
from shardwright.testing import run_ranks

CONTENDERS = (("1f1b", 1, True), ("zbv", 2, True), ("dualpipev", 2, False), ("dualpipev", 2, True))


class Arriving:
    """A collective that is done at some moment, whatever the rank does until then."""

    def __init__(self, seconds: float) -> None:
        self._at = time.perf_counter() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))


class Done(Arriving):
    def wait(self) -> None:
        return


DONE = Done(0.0)


def reduce(tensor: Tensor, seconds: float, async_op: bool = False) -> Arriving | None:
    work = Arriving(seconds)
    return work if async_op else work.wait()


def nothing(tensor: Tensor, async_op: bool = False) -> Arriving | None:
    return DONE if async_op else None


def pieces(x: Tensor, unit: float, share: float) -> None:
    for _ in range(2):
        time.sleep(unit / 2)
        turns.run(reduce, x, share * unit / 2)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, unit: float, share: float) -> Tensor:
        ctx.weight, ctx.unit, ctx.share = weight, unit, share
        pieces(x, unit, share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        def weight_grad(into: Tensor | None) -> Tensor:
            time.sleep(ctx.unit)
            return torch.zeros_like(ctx.weight)

        pieces(dy, ctx.unit, ctx.share)
        store = active_store()
        if store is None:
            return dy, weight_grad(None), None, None
        store.put(ctx.weight, weight_grad)
        return dy, None, None, None


class SleepingStage:
    def __init__(self, is_last: bool, unit: float, share: float) -> None:
        self.is_last, self.unit, self.share = is_last, unit, share
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, received: Tensor | None, microbatch: int) -> Tensor:
        x = Sleep.apply(torch.ones(2, 8) if received is None else received, self.weight, self.unit, self.share)
        return x.mean() if self.is_last else x


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """By contender: seconds of a step, those simulated with nothing hidden, and with what its own timeline says is
    hidden.
    """
    assert dist.group.WORLD is not None
    results = {}
    for style, chunks, pairs in CONTENDERS:
        comm, placement = PipeComm(dist.group.WORLD), schedules.get_placement(style, world_size, chunks)
        unit = options.unit * 2 / chunks  # a rank has the same work in every schedule
        stages = [SleepingStage(placement.is_last(stage), unit, options.share) for stage in placement.stages_of(rank)]
        runtime = PipelineRuntime(comm, placement, stages)
        compute = schedules.get(style, world_size, options.microbatches, chunks, pairs=pairs)
        costs = Costs(unit * (1 + options.share), unit * (1 + options.share), unit)
        schedule, keys = lower(compute, costs=costs), list[Hashable]([0] * options.microbatches)
        runtime.run(schedule, keys)
        runtime.recorder = Recorder()
        steps, hidden = [], []
        for _ in range(options.rounds):
            dist.barrier()
            runtime.run(schedule, keys)
            timeline = runtime.recorder.gather(comm, placement)
            steps.append(timeline.makespan)
            hidden.append(timeline.mean_costs().hidden)
        plain = simulate(compute, costs).makespan
        known = simulate(
            compute, Costs(costs.forward, costs.input_grad, costs.weight_grad, hidden=median(hidden))
        ).makespan
        results[f"{style}{' in pairs' if pairs and style == 'dualpipev' else ''}"] = (median(steps), plain, known)
    return results


def turn_cost() -> tuple[float, float]:
    """Microseconds of a change of turns, and of a pair in which nothing is launched."""
    x, pair = torch.zeros(1), TwoAtOnce()

    def half(launches: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(launches):
                turns.run(nothing, x)

        return run

    def best(launches: int) -> float:
        seconds = []
        for _ in range(50):
            start = time.perf_counter()
            pair.run(half(launches), half(launches))
            seconds.append(time.perf_counter() - start)
        return 1e6 * min(seconds)

    return best(500) / 1000, best(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--share", type=float, default=0.4, help="time of a collective over that of the piece of work before it"
    )
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a forward of one of a rank's two chunks")
    options = parser.parse_args()
    change, empty = turn_cost()
    print(f"a change of turns: {change:.1f} us; a pair in which nothing is launched: {empty:.1f} us\n")
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches, collectives of {options.share} of the work "
        "before them"
    )
    print(
        "| schedule | step, ms | over zbv | simulated, nothing hidden | with what pairs hide | step / that "
        "|\n|---|---|---|---|---|---|"
    )
    results = run_ranks(measure, options.ranks, options, timeout=600, debug="OFF")[0]
    base = results["zbv"][0]
    for name, (step, plain, known) in results.items():
        print(
            f"| {name} | {1000 * step:.1f} | {step / base:.3f} | {1000 * plain:.1f} | {1000 * known:.1f} | "
            f"{step / known:.3f} |"
        )


if __name__ == "__main__":
    main()
