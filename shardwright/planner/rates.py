"""What a microbatch of one sample costs on a machine, for any number of tensor-parallel ranks: part of it is shared by
them and part is not, and two profiles tell how much of each.

    amount(t) = a + b / t
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .machines import COMPUTED, Machine
from .operators import Operator
from .profile import Calls, Part, Profile

_HEAD_PASSES = 10  # over its weights, in which a loss on a device keeps what it computes chunk by chunk


@dataclass(frozen=True)
class PartCost:
    """kept, forward_top, backward_top   bytes of a sample
    parameters         elements
    forward, backward  seconds of a sample
    cheap              of a forward without products and attention
    start, start_back  seconds beside those, of a microbatch
    sent, sent_back    bytes of a sample that each rank sends the others of its tensor-parallel group, and
    calls, calls_back  in how many collectives
    flops              of a forward
    tensors            that the parameters are in
    """

    kept: float
    forward_top: float
    backward_top: float
    parameters: float
    forward: float
    backward: float
    cheap: float
    start: float
    start_back: float
    sent: float
    sent_back: float
    calls: float
    calls_back: float
    flops: float
    tensors: float


@dataclass(frozen=True)
class Rates:
    layer: PartCost
    rest: PartCost
    layers: int
    along: bool


def rates(few: Profile, many: Profile | None, machine: Machine, ranks: int, samples: float = 1.0) -> Rates:
    """For `ranks` tensor-parallel ranks, from the profiles of few and of many; a sample as one of so many at a time."""
    return Rates(
        _part(few, many, machine, ranks, samples, lambda profile: profile.layer, capped=False),
        _part(few, many, machine, ranks, samples, lambda profile: profile.rest, capped=True),
        few.layers,
        few.along and ranks > 1,
    )


def _part(
    few: Profile,
    many: Profile | None,
    machine: Machine,
    ranks: int,
    samples: float,
    of: Callable[[Profile], Part],
    capped: bool,
) -> PartCost:
    one, other = of(few), of(many or few)

    def between(amount: Callable[[Part], float]) -> float:
        low, high = amount(one), amount(other)
        if many is None or few.tensor_ranks == many.tensor_ranks:
            return low
        shared = (low - high) / (1 / few.tensor_ranks - 1 / many.tensor_ranks)
        return max(low + shared * (1 / ranks - 1 / few.tensor_ranks), 0.0)

    def seconds(calls: Callable[[Part], Calls]) -> float:
        def of_part(part: Part) -> float:
            found = calls(part)
            whole = machine.computing(scaled(found, samples)) / samples
            if not capped:
                return whole
            others = machine.computing(scaled(_others(found), samples)) / samples
            most = _HEAD_PASSES * part.parameters * 4 / (machine.bandwidth * machine.moving)
            return whole - others + min(others, most)

        return between(of_part)

    wire = [_wire(calls(other), (many or few).tensor_ranks) for calls in (_forward, _backward)]
    share = (ranks - 1) / ranks
    count = [sum(n for call, n in calls(other).items() if call.kind not in COMPUTED) for calls in (_forward, _backward)]
    return PartCost(
        between(lambda part: part.kept),
        between(lambda part: part.forward_top),
        between(lambda part: part.backward_top),
        between(lambda part: part.parameters),
        seconds(_forward),
        seconds(_backward),
        0.0 if capped else between(lambda part: machine.computing(_others(part.forward))),
        machine.around / 2 if capped else machine.starting(one.forward, samples),
        machine.around / 2 if capped else machine.starting(one.backward, samples, backward=True),
        share * wire[0],
        share * wire[1],
        count[0] if ranks > 1 else 0.0,
        count[1] if ranks > 1 else 0.0,
        between(lambda part: part.flops),
        one.tensors,
    )


def _forward(part: Part) -> Calls:
    return part.forward


def _backward(part: Part) -> Calls:
    return part.backward


def _others(calls: Calls) -> Calls:
    return {call: count for call, count in calls.items() if call.kind == "other"}


def scaled(calls: Calls, samples: float) -> Calls:
    """The same operators on so many samples."""
    if samples == 1.0:
        return calls
    found: dict[Operator, float] = {}
    for (kind, flops, moved), count in calls.items():
        call = Operator(kind, round(flops * samples), round(moved * samples))
        found[call] = found.get(call, 0.0) + count
    return found


def _wire(calls: Calls, ranks: int) -> float:
    """Bytes in all of what collectives put together."""
    total = 0.0
    for call, count in calls.items():
        total += count * _times(call, ranks) * call.moved
    return total


def _times(call: Operator, ranks: int) -> int:
    """What a collective puts together over what it is counted with."""
    if call.kind in COMPUTED:
        return 0
    return ranks if "reduce_scatter" in call.kind else 2 if "allreduce" in call.kind else 1
