"""How much of the weight-gradient work of a model zero-bubble schedules can postpone, and what that leaves of their
bubble.

Schedules 'zb', 'zbv' and, at the ends of a step, 'dualpipev' split a backward into I (input gradients) and W (weight
gradients), which may run later: those of linears, experts, routers and heads (`shardformer.deferring`). Convolutions
and what nobody knows compute theirs in I. With a share d of the matrix elements of a stage postponed, and a backward
that costs twice a forward F = 1:

    I = 1 + (1 - d)     W = d

so d = 1 gives the bubble that these schedules are known for, and d = 0 that of the same order of stages without
postponing anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ...models.config import visited_share
from ...pipeline.cut.partition import lookup_tables
from ...pipeline.cut.plan import CutPlan
from ...pipeline.planning.simulate import Costs
from ...shardformer.deferring import can_wait
from ...spec import ParamSpec

_CANNOT = "convolutions cannot wait"
_WITHOUT_ROOM = (
    "from zero_stage=2 on gradients of recomputed layers do not wait, nor at stage 3 those of the head, nor any with "
    "deferred_bytes=0 (above 0 it is room in which those of layers wait)"
)


class WeightWork(NamedTuple):
    """Elements of one rank's matrices that need a weight gradient, experts by how often a token visits them; W takes
    `postponed`.
    """

    postponed: float
    all: float

    @property
    def share(self) -> float:
        return self.postponed / self.all if self.all else 0.0


def weight_work(
    model: nn.Module,
    plan: CutPlan,
    specs: Mapping[int, ParamSpec],
    prompt: Sequence[Collection[nn.Parameter]],
) -> list[WeightWork]:
    """The work of every stage. `prompt` are by pipeline rank the parameters whose gradients do not wait."""
    assert plan.survey is not None
    waiting = [module for module in model.modules() if can_wait(module)]
    deferring = {id(param) for module in waiting for param in module.parameters(recurse=False)}
    params = dict(model.named_parameters(remove_duplicate=False))
    tables, visited = lookup_tables(model), visited_share(model)
    # what several stages use waits all the same, and its weights are there all the time
    users = Counter(name for stage in range(len(plan.stages)) for name in plan.survey.parameters(plan.stages, stage))
    found = []
    for stage in range(len(plan.stages)):
        is_last = stage == len(plan.stages) - 1
        at_once = prompt[plan.placement.rank_of(stage)]
        together = postponed = 0.0
        for name in plan.survey.parameters(plan.stages, stage):
            param, aliases = params[name], plan.survey.names[name]
            looked_up = name in tables and not (is_last and any(alias not in tables for alias in aliases))
            if param.ndim < 2 or looked_up or not param.requires_grad:
                continue
            spec = specs.get(id(param))
            elements = math.prod(spec.local_shape(0)) if spec is not None else param.numel()
            amount = elements * (visited if any(".experts" in alias for alias in aliases) else 1.0)
            together += amount
            waits = id(param) in deferring and (param not in at_once or users[name] > 1)
            postponed += amount if waits else 0.0
        found.append(WeightWork(postponed, together))
    return found


def costs_with(work: Sequence[WeightWork]) -> Costs:
    """Costs of the stages' actions, see the head of this file."""
    return Costs(input_grad=[2.0 - stage.share for stage in work], weight_grad=[stage.share for stage in work])


def deferral_warning(
    pp_style: str, share: float, bubble: float | None, possible: float | None, prompt: bool
) -> str | None:
    """What to know about a zero-bubble schedule that cannot postpone most of what it should; None where it can.

    prompt  some gradients are not to wait because nothing has room for whole ones
    """
    if share >= 0.9:
        return None
    leaves = (
        (f"; its bubble is {bubble:.1%} where {possible:.1%} would be possible")
        if bubble is not None and possible is not None
        else ""
    )
    return (
        f"pp_style={pp_style!r} postpones {share:.0%} of the weight-gradient work here: "
        f"{_WITHOUT_ROOM if prompt else _CANNOT}{leaves}"
    )
