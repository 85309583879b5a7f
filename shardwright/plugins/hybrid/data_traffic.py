"""What data-parallel ranks send one another in a step: gradients, and weights.

gradients   a reduce-scatter of every bucket, once a step at stages 0 and 1, of every microbatch from stage 2 on
weights     stages 1 and 2: an all-gather of every bucket, once a step
            stage 3: for the forward and for the backward of every microbatch, recomputed or not; but for the unit
            that ends the forward, what is left beside the units, and units that are called several times, which
            stay from the one to the other. In a pipeline as often as the schedule frees a chunk
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from ...cluster.mesh import ParallelMesh
from ...pipeline.planning.actions import Kind
from ...pipeline.planning.lowering import with_gathers
from ...pipeline.planning.placement import Placement
from ...pipeline.schedules import Schedule
from ...zero.layout import SHARED, BucketPlan, closed_form_bytes
from ...zero.settings import ZeroSettings
from ...zero.units import ParamUnit
from .chunks import chunk_of, chunks_gathered
from .resolved import Traffic
from .traffic import sizes_on_wire


def data_traffic(
    plans: Sequence[BucketPlan],
    frozen: Sequence[BucketPlan],
    mesh: ParallelMesh,
    options: ZeroSettings,
    microbatches: int | None,
    gathers: Mapping[BucketPlan, int] | None,
) -> list[Traffic]:
    """Of the rank that holds `plans`; `frozen` are those of weights that nobody trains, which stage 3 gathers too.

    gathers   stage 3: how often each is gathered in a step; None while the batch is not known
    """
    reduced, gathered, shared = _Sum(), _Sum(), _Sum()
    rounds = microbatches if options.stage >= 2 else 1
    for plan in plans:
        everyone = "expert_dp" if plan.family.experts else "dp_sp"
        replicas = mesh.size("zero_replica" if options.stage else everyone)
        sent = closed_form_bytes([plan], replicas, *sizes_on_wire(plan, options))
        times = 1 if options.stage < 3 else None if gathers is None else gathers[plan]
        reduced.add(sent["reduce_scatter"], rounds)
        gathered.add(sent["all_gather"], times)
        shared.add(sent["all_reduce"], 1)
    for plan in frozen if options.stage == 3 else ():
        sent = closed_form_bytes([plan], 1, *sizes_on_wire(plan, options))
        gathered.add(sent["all_gather"], None if gathers is None else gathers[plan])
    before_use = "updated weights, all-gather" if options.stage < 3 else "weights, all-gather before use"
    of_shards = " of shards over sub-groups" if options.stage else ""
    named = (
        ("gradients, reduce-scatter", reduced),
        (before_use, gathered),
        (f"gradients, all-reduce{of_shards}", shared),
    )
    return [Traffic("dp", what, each.calls, each.bytes) for what, each in named if each.any]


class _Sum:
    """Over buckets; unknown as soon as it is unknown how often one of them travels."""

    def __init__(self) -> None:
        self.any = False
        self.calls: int | None = 0
        self.bytes: int | None = 0

    def add(self, size: float, times: int | None) -> None:
        if not size:
            return
        self.any = True
        if times is None or self.calls is None or self.bytes is None:
            self.calls = self.bytes = None
        else:
            self.calls += times
            self.bytes += times * int(size)


def gathers_of_units(
    plans: Sequence[BucketPlan], units: Sequence[ParamUnit], model: nn.Module, microbatches: int
) -> dict[BucketPlan, int]:
    """Without a pipeline."""
    stays = _staying(units, model)
    return {plan: microbatches * (1 if plan.unit in stays else 2) for plan in plans}


def _staying(units: Sequence[ParamUnit], model: nn.Module) -> Collection[int]:
    """Numbers of the units that stay gathered from forward to backward."""
    called = [number for number, unit in enumerate(units) if model not in unit.modules]
    several = [number for number, unit in enumerate(units) if len(unit.modules) > 1 or model in unit.modules]
    return {*several, *called[-1:]}


def gathers_of_chunks(
    plans: Sequence[BucketPlan], schedule: Schedule, placement: Placement, rank: int, ahead: int | None
) -> dict[BucketPlan, int]:
    """In a pipeline: chunks as the schedule of the rank says, what several of them use once."""
    actions = with_gathers(schedule.actions[rank], chunks_gathered(ahead))
    counts = Counter(placement.chunk_of(action.stage) for action in actions if action.kind is Kind.GATHER)
    return {plan: 1 if plan.family.section == SHARED else counts[chunk_of(plan.family.section)] for plan in plans}
