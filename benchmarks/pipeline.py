"""Pipeline schedules against torch.distributed.pipelining on the same model, and the cost of the runtime itself.

    python benchmarks/pipeline.py                        2 ranks, everything
    python benchmarks/pipeline.py --ranks 4 --rounds 9
    python benchmarks/pipeline.py overhead               host time per action, no other process
    python benchmarks/pipeline.py slots --ranks 4        stages that sleep: does a step take as long as the schedule
                                                         says?

Every round runs one step of every contender, in turn forwards and backwards, so that a busy machine disturbs all alike.
Reported are medians over rounds of the wall time of a step (the slowest rank's) and of the CPU time (summed over
ranks), which is the steadier figure where ranks share cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.comm.p2p import PipeComm
from shardwright.comm.payload import Header, take_apart
from shardwright.ops.linear import linear
from shardwright.ops.weight_grad import active_store
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import simulate
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.pipeline.timeline import Recorder
from shardwright.testing import run_ranks

HEADS = 4
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2), ("dualpipev", 2))


class Block(nn.Module):
    """A decoder layer of Llama's shape. `postpone` uses the linear whose weight gradient a zero-bubble schedule can
    postpone.
    """

    def __init__(self, hidden: int, postpone: bool, checkpointing: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)
        self.checkpointing = checkpointing
        self.apply_linear: Callable[[nn.Linear, Tensor], Tensor] = _postponable if postpone else _plain

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointing else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]"""
        run = self.apply_linear
        b, s, h = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            run(module, normed).view(b, s, HEADS, h // HEADS).transpose(1, 2) for module in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + run(self.o, attended)
        normed = self.norms[1](x)
        return x + run(self.down, F.silu(run(self.gate, normed)) * run(self.up, normed))


def _plain(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def _postponable(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def make_stage(
    stage: int, num_stages: int, options: argparse.Namespace, postpone: bool, checkpointing: bool
) -> nn.Sequential:
    """The layers of one stage, the same weights whoever makes them."""
    per_stage = options.layers // num_stages
    blocks = []
    for index in range(stage * per_stage, (stage + 1) * per_stage):
        torch.manual_seed(index)
        blocks.append(Block(options.hidden, postpone, checkpointing))
    return nn.Sequential(*blocks)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


class Stage:
    """A `StageProgram` around a module."""

    def __init__(self, module: nn.Module, is_last: bool, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.module, self.is_last, self.inputs, self.targets = module, is_last, inputs, targets

    def forward(self, received: Tensor | None, microbatch: int) -> Tensor:
        output = self.module(self.inputs[microbatch] if received is None else received)
        return loss_of(output, self.targets[microbatch]) / len(self.targets) if self.is_last else output


class Contender:
    """One schedule of one implementation: `step` runs it, `modules` are the stages it trains, by stage index."""

    def __init__(
        self, name: str, step: Callable[[], Any], modules: dict[int, nn.Module], runtime: PipelineRuntime | None = None
    ) -> None:
        self.name, self.step, self.modules, self.runtime = name, step, modules, runtime


def pipe_group() -> dist.ProcessGroup:
    """All ranks; not the world group, whose barriers TORCH_DISTRIBUTED_DEBUG=DETAIL would take for out of step with
    its messages.
    """
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def ours(
    style: str, chunks: int, checkpointing: bool, options: argparse.Namespace, batch: Sequence[Tensor]
) -> Contender:
    comm = PipeComm(pipe_group())
    placement = schedules.get_placement(style, comm.size, chunks)
    inputs, targets = batch[0].chunk(options.microbatches), batch[1].chunk(options.microbatches)
    modules = {
        s: make_stage(s, placement.num_stages, options, style.startswith("zb"), checkpointing)
        for s in placement.stages_of(comm.rank)
    }
    stages = [Stage(module, placement.is_last(s), inputs, targets) for s, module in modules.items()]
    runtime = PipelineRuntime(comm, placement, stages)
    schedule = lower(schedules.get(style, comm.size, options.microbatches, chunks))
    keys: list[Hashable] = [tuple(part.shape) for part in inputs]
    name = f"{style}{f' x{chunks}' if style == 'interleaved' else ''}"
    return Contender(f"shardwright {name}", lambda: runtime.run(schedule, keys), dict(modules), runtime)


def torchs(
    name: str, chunks: int, checkpointing: bool, options: argparse.Namespace, batch: Sequence[Tensor]
) -> Contender:
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = size * chunks
    indices = (
        [rank, 2 * size - 1 - rank]
        if name == "ScheduleZBVZeroBubble"
        else [rank + chunk * size for chunk in range(chunks)]
    )
    modules: dict[int, nn.Module] = {s: make_stage(s, num_stages, options, False, checkpointing) for s in indices}
    device = torch.device("cpu")
    group = pipe_group()
    stages = [pipelining.PipelineStage(module, s, num_stages, device, group=group) for s, module in modules.items()]
    made = getattr(pipelining, name)(
        stages[0] if name == "Schedule1F1B" else stages, options.microbatches, loss_fn=loss_of
    )

    def step() -> None:
        arguments = (batch[0],) if 0 in indices else ()
        if num_stages - 1 in indices:
            made.step(*arguments, target=batch[1], losses=[])
        else:
            made.step(*arguments)

    return Contender(f"torch {name}", step, modules)


def compare(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every step of every contender on this rank, wall and CPU, and the worst difference of gradients."""
    torch.manual_seed(1)
    rows = options.microbatches * options.rows
    batch = [torch.randn(rows, options.length, options.hidden) for _ in range(2)]
    contenders: list[Contender] = []
    for checkpointing in (False, True):
        suffix = ", checkpointing" if checkpointing else ""
        made = [
            ours("1f1b", 1, checkpointing, options, batch),
            torchs("Schedule1F1B", 1, checkpointing, options, batch),
            ours("interleaved", 2, checkpointing, options, batch),
            torchs("ScheduleInterleaved1F1B", 2, checkpointing, options, batch),
            ours("zbv", 2, checkpointing, options, batch),
            torchs("ScheduleZBVZeroBubble", 2, checkpointing, options, batch),
            ours("zb", 1, checkpointing, options, batch),
            ours("gpipe", 1, checkpointing, options, batch),
        ]
        for contender in made:
            contender.name += suffix
        contenders += [contender for contender in made if options.only in contender.name.lower()]
    gradients: dict[int, dict[str, Tensor]] = {}
    worst = 0.0
    times: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    bubbles: dict[str, list[tuple[float, float, float, float]]] = {}
    for round_index in range(options.rounds + 1):  # the first one warms up
        for contender in contenders[:: 1 if round_index % 2 else -1]:
            for module in contender.modules.values():
                module.zero_grad()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            contender.step()
            elapsed = (time.perf_counter() - wall, time.process_time() - cpu)
            if round_index == 0:
                for name, grad in layer_gradients(contender, options):
                    reference = gradients.setdefault(0, {}).setdefault(name, grad.clone())
                    worst = max(worst, ((grad - reference).abs().max() / reference.abs().max()).item())
            else:
                times[contender.name].append(elapsed)
    for contender in contenders:
        if contender.runtime is None:
            continue
        contender.runtime.recorder = Recorder()
        for _ in range(options.rounds):
            dist.barrier()
            contender.step()
            timeline = contender.runtime.recorder.gather(contender.runtime.comm, contender.runtime.placement)
            ideal = timeline.ideal()
            bubbles.setdefault(contender.name, []).append(
                (timeline.bubble, ideal.bubble, timeline.makespan, ideal.makespan)
            )
    return {"times": times, "worst": worst, "bubbles": bubbles}


def layer_gradients(contender: Contender, options: argparse.Namespace) -> list[tuple[str, Tensor]]:
    """Gradients of this rank by the number of the layer in the whole model."""
    found = []
    for stage, module in contender.modules.items():
        per_stage = len(list(module.children()))
        for name, param in module.named_parameters():
            index, _, rest = name.partition(".")
            assert param.grad is not None
            found.append((f"{stage * per_stage + int(index)}.{rest}", param.grad))
    return found


class Sleep(torch.autograd.Function):
    """Takes `unit` seconds in forward, `unit` for the gradient of the input and `unit` for that of the weight, which
    can be postponed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, unit: float) -> Tensor:
        ctx.weight, ctx.unit = weight, unit
        time.sleep(unit)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        def weight_grad(into: Tensor | None) -> Tensor:
            time.sleep(ctx.unit)
            return torch.zeros_like(ctx.weight)

        time.sleep(ctx.unit)
        store = active_store()
        if store is None:
            return dy, weight_grad(None), None
        store.put(ctx.weight, weight_grad)
        return dy, None, None


class SleepingStage:
    """A `StageProgram` that needs time but no core, so that more ranks than cores can run at once."""

    def __init__(self, is_last: bool, unit: float) -> None:
        self.is_last, self.unit = is_last, unit
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, received: Tensor | None, microbatch: int) -> Tensor:
        x = Sleep.apply(torch.ones(2, 64, 128) if received is None else received, self.weight, self.unit)
        return x.mean() if self.is_last else x


def slots(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """By schedule: a step in units of a forward, as measured and as simulated; and measured over simulated with
    measured costs.
    """
    group = pipe_group()
    unit = 0.03
    results = {}
    for style, chunks in SCHEDULES:
        comm = PipeComm(group)
        placement = schedules.get_placement(style, world_size, chunks)
        stages = [SleepingStage(placement.is_last(s), unit) for s in placement.stages_of(rank)]
        runtime = PipelineRuntime(comm, placement, stages)
        compute = schedules.get(style, world_size, options.microbatches, chunks)
        schedule = lower(compute)
        keys: list[Hashable] = [0] * options.microbatches
        runtime.run(schedule, keys)
        runtime.recorder = Recorder()
        steps = []
        for _ in range(max(3, options.rounds // 3)):
            dist.barrier()
            runtime.run(schedule, keys)
            timeline = runtime.recorder.gather(comm, placement)
            steps.append((timeline.makespan / unit, timeline.makespan / timeline.ideal().makespan))
        results[style] = (
            median(step for step, _ in steps),
            simulate(compute).makespan,
            median(ratio for _, ratio in steps),
        )
    return results


class FakeComm(PipeComm):
    """Over the fake backend, whose receives leave buffers as they are: the header is made here instead."""

    header: Header

    def _receive_header(self, source: int, key: Hashable) -> Header:
        return self.header


def overhead(options: argparse.Namespace) -> dict[str, float]:
    """Microseconds of host time per action of a middle rank whose stages compute nothing to speak of."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, microbatches = 4, 32
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    x = torch.ones(1, requires_grad=True)

    class Nothing:
        def forward(self, received: Tensor | None, microbatch: int) -> Tensor:
            return received if received is not None else x

    results = {}
    for style, chunks in SCHEDULES:
        assert dist.group.WORLD is not None
        comm = FakeComm(dist.group.WORLD)
        comm.header = take_apart(x)[0]
        placement = schedules.get_placement(style, ranks, chunks)
        runtime = PipelineRuntime(comm, placement, [Nothing()] * chunks)
        schedule = lower(schedules.get(style, ranks, microbatches, chunks))
        keys: list[Hashable] = [(1,)] * microbatches
        seconds = []
        for _ in range(options.rounds + 3):
            start = time.perf_counter()
            runtime.run(schedule, keys)
            seconds.append(time.perf_counter() - start)
        results[style] = 1e6 * median(seconds[3:]) / len(schedule.actions[1])
    dist.destroy_process_group()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "overhead", "slots", "compare"], default="all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="divisible by twice the ranks")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--only", default="", help="only contenders with this in their name, such as 1f1b")
    parser.add_argument("--rows", type=int, default=2, help="samples per microbatch")
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    if options.what in ("all", "overhead"):
        print("| schedule | host time per action |\n| --- | --- |")
        for style, microseconds in overhead(options).items():
            print(f"| {style} | {microseconds:.1f} us |")
    if options.what in ("all", "slots"):
        print(f"\n{options.ranks} ranks, {options.microbatches} microbatches, stages that sleep")
        print(
            "| schedule | slots of a step | by formula | step / simulated with measured costs |\n| --- | --- | --- | "
            "--- |"
        )
        for style, (step, expected, ratio) in run_ranks(slots, options.ranks, options, timeout=600, debug="OFF")[
            0
        ].items():
            print(f"| {style} | {step:.1f} | {expected:.0f} | {ratio:.3f} |")
    if options.what in ("overhead", "slots"):
        return
    results = run_ranks(compare, options.ranks, options, timeout=1200, debug="OFF")
    print(
        f"\n{options.ranks} ranks, {options.layers} layers of width {options.hidden}, {options.microbatches} "
        "microbatches of ",
        end="",
    )
    print(
        f"{options.rows} x {options.length}, {options.rounds} rounds; gradients agree to "
        f"{max(r['worst'] for r in results):.1e}"
    )
    print("| | wall ms | CPU ms | bubble measured | ideal | step / ideal |\n| --- | --- | --- | --- | --- | --- |")
    for name in results[0]["times"]:
        rounds = list(zip(*(result["times"][name] for result in results), strict=True))
        wall = median(max(seconds for seconds, _ in ranks) for ranks in rounds)
        cpu = median(sum(seconds for _, seconds in ranks) for ranks in rounds)
        row = f"| {name} | {1000 * wall:.1f} | {1000 * cpu:.1f} |"
        bubbles = results[0]["bubbles"].get(name)
        if bubbles:
            measured, ideal = median(b[0] for b in bubbles), median(b[1] for b in bubbles)
            row += f" {100 * measured:.1f} % | {100 * ideal:.1f} % | {median(b[2] / b[3] for b in bubbles):.3f} |"
        else:
            row += " | | |"
        print(row)


if __name__ == "__main__":
    main()
