"""When every action of a step would run: what the stages of a layout as it is cut take (`estimate`), put into its
schedule by the simulator.

    times = step_times(job, world_size, machine)
    times.timeline, times.seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..models.config import hidden_size
from ..models.layer_chain import find_units
from ..pipeline.batch.microbatch import batch_size, microbatch_sizes
from ..pipeline.cut.plan import CutPlan
from ..pipeline.planning.actions import Action, Kind
from ..pipeline.planning.simulate import Costs, simulate
from ..pipeline.planning.sliced_schedule import get_sliced
from ..pipeline.schedules import Schedule
from ..pipeline.timeline import MeasuredSpan, Timeline
from ..plugins import HybridParallelPlugin
from ..utils.device import planning_for
from .candidate import Layout, Task
from .estimate import Estimator
from .machines import Machine
from .profile import Source, profile
from .rates import rates
from .replay import Job, joined
from .shorter import NotShorterError
from .states import optimizer_costs

_COMPUTED = ("computing", "pipeline")  # parts of a step that its actions are


class Message(NamedTuple):
    """What is on its way between two pipeline ranks; `action` made it."""

    rank: int
    action: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTimes:
    """timeline  of all pipeline ranks
    messages     between them
    behind       what follows when all have computed, in seconds
    relative     empty, or why times are multiples of a forward's, and not seconds
    processor    seconds of a processor that a rank takes, where it computes; else 0
    """

    timeline: Timeline
    messages: tuple[Message, ...]
    behind: Mapping[str, float]
    relative: str = ""
    processor: float = 0.0

    @property
    def computed(self) -> float:
        """Until all ranks have computed."""
        return self.timeline.makespan

    @property
    def seconds(self) -> float:
        return self.computed + sum(self.behind.values())


def step_times(job: Job, world_size: int, machine: Machine) -> StepTimes:
    """This process must be in no process group."""
    shape = shape_of(job, world_size)
    try:
        estimator = Profiled(job, shape, machine.device).estimator(world_size, machine)
        costs, relative = estimator.costs, ""
        found = estimator.estimate(simulated=True)
        processor = found.processor
        behind = {what: seconds for what, seconds in found.parts.items() if what not in _COMPUTED}
    except (NotShorterError, ValueError) as error:
        cut = shape.plan.costs
        costs = cut.actions(shape.plan.stages) if cut is not None else Costs(1.0, 1.0, 1.0)
        relative, behind, processor = str(error), {}, 0.0
        # drawn in thousandths
        costs = _times(costs, 1e-3, shape.plan.placement.num_stages)
    schedule = shape.schedule()
    costs = _times(costs, 1 / shape.slices, schedule.placement.num_stages)
    run = simulate(schedule, costs)
    spans = [[MeasuredSpan(action, start, start, end) for action, start, end in rank] for rank in run.spans]
    timeline = Timeline(schedule.placement, spans)
    return StepTimes(timeline, tuple(_messages(timeline, costs)), behind, relative, processor)


@dataclass(frozen=True)
class Shape:
    """How a layout cuts the model and the batch.

    samples  of the largest microbatch
    count    microbatches
    """

    plugin: HybridParallelPlugin
    plan: CutPlan
    layers: int
    samples: int
    count: int
    slices: int

    def schedule(self) -> Schedule:
        placement = self.plan.placement
        if placement.num_ranks == 1:
            own = [Action(kind, 0, index) for index in range(self.count * self.slices) for kind in (Kind.F, Kind.B)]
            return Schedule(placement, [own])
        pairs = self.plugin.mesh.size("tp") > 1
        return get_sliced(
            self.plan.pp_style, placement.num_ranks, self.count, self.slices, placement.num_chunks, pairs=pairs
        )

    def layout(self) -> Layout:
        plugin, placement = self.plugin, self.plan.placement
        again = [self.plan.checkpointed[placement.rank_of(stage)].of(stage) for stage in range(placement.num_stages)]
        return Layout(
            plugin.tp_size,
            placement.num_ranks,
            plugin.sp_size,
            plugin.dp_size,
            plugin.settings.zero.stage,
            self.plan.pp_style,
            placement.num_chunks,
            self.samples,
            self.count,
            *(sum(numbers) / max(self.layers, 1) for numbers in zip(*again, strict=True)),
        )


def shape_of(job: Job, world_size: int) -> Shape:
    with joined(0, world_size):
        plugin, model = job.plugin(), job.model()
        _, (plan, _, _) = plugin.check(model, job.optimizer(model))
        options = plugin.settings.pipeline
        sizes = microbatch_sizes(batch_size(job.batch), options.num_microbatches, options.microbatch_size)
        return Shape(plugin, plan, len(find_units(model)), max(sizes), len(sizes), options.num_sequence_slices)


class Profiled:
    """A job whose layers have been replayed as its layout cuts them; ValueError or NotShorterError for models of which
    too little is known.

    device   type of the devices that it is for
    """

    def __init__(self, job: Job, shape: Shape, device: str) -> None:
        self._job, self._shape, self._layout = job, shape, shape.layout()
        along = shape.plugin.settings.sequence_mode in ("split_gather", "ring")
        source = Source(job.model, job.optimizer, job.batch, self._precision, (self._layout.samples,))
        with planning_for(device):
            self._found = profile(source, self._layout.tp, along)

    @property
    def _precision(self) -> str:
        return self._shape.plugin.settings.precision.precision

    def estimator(self, world_size: int, machine: Machine) -> Estimator:
        job, layout = self._job, self._layout
        own = rates(self._found, None, machine, layout.tp, layout.samples / layout.sp)
        model = job.model()
        half = self._precision != "fp32"
        flops = 3 * layout.tp * (own.layers * own.layer.flops + own.rest.flops) / own.samples
        hidden = (hidden_size(model) or 0) * _length(job.batch) * (2 if half else 4)
        states, step = optimizer_costs(job.optimizer(model))
        clips = self._shape.plugin.settings.zero.max_norm > 0
        task = Task(machine, hidden, half, states, flops, world_size, step, clips=clips)
        return Estimator(task, own, layout, self._shape.plan.stages)


def _length(batch: Mapping[str, Any]) -> int:
    """Tokens of a sample; 0 where it holds no text."""
    texts = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() == 2]
    return max((value.shape[1] for value in texts if not value.is_floating_point()), default=0)


def _times(costs: Costs, factor: float, stages: int) -> Costs:
    kinds = costs.of_kind(stages)
    return Costs(
        [factor * each for each in kinds[Kind.F]],
        [factor * each for each in kinds[Kind.I]],
        [factor * each for each in kinds[Kind.W]],
        (factor * costs.transfers(stages)[0]).tolist(),
        costs.overlap,
        costs.hidden,
    )


def _messages(timeline: Timeline, costs: Costs) -> list[Message]:
    """Each leaves when what made it is done, also where it would wait for others in its channel."""
    placement = timeline.placement
    last = placement.num_stages - 1
    down, up = costs.transfers(placement.num_stages).tolist()
    found = []
    for rank, spans in enumerate(timeline.ranks):
        for action, _, _, end in spans:
            forward = action.kind in (Kind.F, Kind.FB)
            if action.kind is Kind.W or action.stage == (last if forward else 0):
                continue
            other = placement.rank_of(action.stage + (1 if forward else -1))
            time = (down if forward else up)[action.stage]
            if other != rank and time > 0:
                found.append(Message(rank, str(action), end, end + time))
    return found
