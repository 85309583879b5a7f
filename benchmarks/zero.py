"""ZeRO against DDP and FSDP2: milliseconds per step, wall and CPU, one alternating run, medians.

    python benchmarks/zero.py                 # 2 ranks, a small Llama-like model, fp32
    python benchmarks/zero.py --ranks 4
    python benchmarks/zero.py --step          # one process: norm + clip + step against one fused AdamW step

CPU milliseconds are summed over ranks; on a machine with fewer idle cores than ranks they are the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwright.cluster.mesh import ParallelMesh
from shardwright.precision.grad_state import GradState
from shardwright.precision.policy import PrecisionPolicy
from shardwright.testing import run_ranks
from shardwright.utils import get_current_device
from shardwright.zero.optimizer import ZeroOptimizer
from shardwright.zero.settings import ZeroSettings

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def model_of(hidden: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden) for _ in range(layers)])


def ddp(hidden: int, layers: int, x: torch.Tensor) -> Step:
    model = DistributedDataParallel(model_of(hidden, layers), gradient_as_bucket_view=True)
    optim = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

    return step


def fsdp2(hidden: int, layers: int, x: torch.Tensor) -> Step:
    model = model_of(hidden, layers)
    mesh = ParallelMesh().device_mesh("zero")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

    return step


def zero(stage: int, **options: object) -> Callable[[int, int, torch.Tensor], Step]:
    def build(hidden: int, layers: int, x: torch.Tensor) -> Step:
        model = model_of(hidden, layers)
        optim = ZeroOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True),
            model,
            ParallelMesh(),
            ZeroSettings(stage=stage, max_norm=1.0, bucket_size_in_m=2, **options),
        )

        def step() -> None:
            optim.backward(model(x).square().mean())
            optim.step()
            optim.zero_grad()

        return step

    return build


CONTENDERS: dict[str, Callable[[int, int, torch.Tensor], Step]] = {
    "DDP + AdamW": ddp,
    "FSDP2 + AdamW": fsdp2,
    "ZeRO 0": zero(0),
    "ZeRO 1": zero(1),
    "ZeRO 1, gather in forward": zero(1, overlap_allgather=True),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3),
}


def measure(
    rank: int, world_size: int, hidden: int, layers: int, rows: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    x = torch.randn(rows // world_size, hidden, generator=torch.Generator().manual_seed(rank))
    steps = {name: build(hidden, layers, x) for name, build in CONTENDERS.items()}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[name][0].append((time.perf_counter() - wall) * 1e3)
            times[name][1].append((time.process_time() - cpu) * 1e3)
    return times


def compare(ranks: int, hidden: int, layers: int, rows: int, repeats: int) -> dict[str, dict[str, float]]:
    # DETAIL, the default of run_ranks, checks collectives for longer than they take.
    per_rank = run_ranks(measure, ranks, hidden, layers, rows, repeats, timeout=600, debug="OFF")
    result = {}
    for name in CONTENDERS:
        wall = [max(times[name][0][i] for times in per_rank) for i in range(repeats)]
        cpu = [sum(times[name][1][i] for times in per_rank) for i in range(repeats)]
        result[name] = {"wall_ms": round(statistics.median(wall), 1), "cpu_ms": round(statistics.median(cpu), 1)}
    return result


def optimizer_steps(millions: int) -> dict[str, Callable[[], Step]]:
    """What makes a step of norm + clip + AdamW on `millions` M parameters (fp32, and bf16 with masters), and of one
    fused AdamW alone on as many; on the device of this process. Every step finds gradients and updates every element.
    """
    device = get_current_device()

    def plain() -> Step:
        param = nn.Parameter(torch.randn(millions * 1_000_000, device=device))
        param.grad = torch.randn_like(param)
        optim = torch.optim.AdamW([param], fused=True)
        return lambda: (optim.step(), None)[1]

    def ours(precision: str, **options: object) -> Step:
        model = nn.ParameterList([torch.randn(1000, 1000, device=device) for _ in range(millions)])
        optim = ZeroOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True),
            model,
            ParallelMesh(),
            ZeroSettings(stage=1, max_norm=1.0, **options),
            precision=PrecisionPolicy(precision),
        )
        # A parameter that no backward has reached is not stepped on.
        optim.backward(torch.stack([param.float().mean() for param in model]).sum())
        optim._finish_gradients()
        assert len(optim.segments.grads()) == len(optim.segments.items) > 0
        for bucket in optim.buckets:
            bucket.step_grad.normal_()

        def step() -> None:
            for bucket in optim.buckets:  # the gradients stay; only the step is timed
                bucket.state = GradState.FINAL
            optim.grad_state, optim._clip, optim._raw_norm = GradState.FINAL, None, None
            optim._norm_parts.clear()
            optim.step()

        return step

    found = {"fused AdamW": plain, "ZeRO fp32": lambda: ours("fp32"), "ZeRO bf16": lambda: ours("bf16")}
    if device.type == "cpu":
        found["ZeRO fp32, compiled"] = lambda: ours("fp32", compiles=True)
        found["ZeRO bf16, compiled"] = lambda: ours("bf16", compiles=True)
    return found


def step_alone(rank: int, world_size: int, millions: int, repeats: int) -> dict[str, dict[str, float]]:
    """CPU milliseconds, medians of turns, and what they are of the first's."""
    torch.set_num_threads(1)
    steps = {name: build() for name, build in optimizer_steps(millions).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn >= 2:
                times[name].append((time.process_time() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    least = medians["fused AdamW"]
    return {name: {"cpu_ms": round(taken, 1), "ratio": round(taken / least, 3)} for name, taken in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=512, help="rows of the global batch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--step", action="store_true", help="time norm + clip + step alone, in one process")
    parser.add_argument("--millions", type=int, default=100, help="parameters for --step")
    options = parser.parse_args()
    if options.step:
        result: object = run_ranks(step_alone, 1, options.millions, options.repeats, timeout=600, debug="OFF")[0]
    else:
        result = compare(options.ranks, options.hidden, options.layers, options.rows, options.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
