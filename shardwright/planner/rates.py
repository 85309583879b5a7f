"""What a microbatch costs on a machine, for any number of samples and of tensor-parallel ranks: part of it is shared by
these and part is not, and two profiles tell how much of each.

    amount(t) = a + b / t
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

from .machines import COMPUTED, Machine
from .operators import Operator
from .profile import Calls, Part, Profile


@dataclass(frozen=True)
class PartCost:
    """Of a microbatch.

    kept, forward_top, backward_top   bytes
    parameters         elements
    forward, backward  seconds
    cheap              of a forward without products and attention
    start, start_back  seconds beside those
    sent, sent_back    bytes that each rank sends the others of its tensor-parallel group, and
    calls, calls_back  in how many collectives
    flops              of a forward
    made               bytes that products and attention give in a forward
    tensors            that the parameters are in
    early_top          bytes of a backward before any weight gradient
    end_top            bytes that the end of a backward needs; 0: not seen
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
    made: float
    tensors: float
    early_top: float
    end_top: float


@dataclass(frozen=True)
class Rates:
    """Of microbatches of `samples`.

    kinds   of layers, and
    order   which of them every layer of the model is
    rest    all else
    along   whether tensor-parallel ranks split sequences
    shares  by kind, what each tensor of a layer has of its parameters, in the model's order
    """

    kinds: tuple[PartCost, ...]
    rest: PartCost
    order: tuple[int, ...]
    along: bool
    samples: float
    shares: tuple[tuple[float, ...], ...]

    @property
    def layers(self) -> int:
        return len(self.order)

    @cached_property
    def layer(self) -> PartCost:
        """The mean over all."""
        if len(self.kinds) == 1:
            return self.kinds[0]
        every = range(self.layers)
        return PartCost(*(self.total(each.name, every) / self.layers for each in fields(PartCost)))

    @cached_property
    def _before(self) -> list[list[int]]:
        """Of each kind, how many there are before every layer, and in all."""
        return [list(accumulate((own == kind for own in self.order), initial=0)) for kind in range(len(self.kinds))]

    def numbers(self, layers: range) -> list[int]:
        """Of each kind, of these layers."""
        if len(self.kinds) == 1:
            return [len(layers)]
        return [before[layers.stop] - before[layers.start] for before in self._before]

    def total(self, name: str, layers: range) -> float:
        """Of the field of that name."""
        return sum(
            number * float(getattr(kind, name)) for kind, number in zip(self.kinds, self.numbers(layers), strict=True)
        )

    def present(self, layers: Iterable[range]) -> list[PartCost]:
        """Kinds of which these have a layer; all, where they have none."""
        there = [any(numbers) for numbers in zip(*map(self.numbers, layers), strict=True)]
        return [kind for kind, is_there in zip(self.kinds, there, strict=True) if is_there] or list(self.kinds)


def rates(few: Profile, many: Profile | None, machine: Machine, ranks: int, samples: float = 1.0) -> Rates:
    """For `ranks` tensor-parallel ranks, from the profiles of few and of many."""
    parts = next(iter(few.parts.values()))
    kinds = range(len(parts.layers))
    *layers, rest = (_part(few, many, machine, ranks, samples, index) for index in (*kinds, None))
    shares = tuple(layer.shares for layer in parts.layers)
    return Rates(tuple(layers), rest, few.kinds, few.along and ranks > 1, samples, shares)


def _part(
    few: Profile, many: Profile | None, machine: Machine, ranks: int, samples: float, index: int | None
) -> PartCost:
    """Of a size that was not replayed: on the line through the two sizes that were and are nearest; through nothing
    where there is but one. `index` is the kind of layer, None all else.
    """
    both, sizes = (few, many or few), list(few.parts)

    def replayed(size: int) -> list[Part]:
        every = [each.parts[size] for each in both]
        return [each.rest if index is None else each.layers[index] for each in every]

    if samples in sizes:
        return _replayed(few, many, machine, ranks, index is not None, replayed(int(samples)))
    if len(sizes) == 1:
        parts = [_grown(each, samples / sizes[0]) for each in replayed(sizes[0])]
        return _replayed(few, many, machine, ranks, index is not None, parts)
    above = min(max(bisect(sizes, samples), 1), len(sizes) - 1)
    low, high = sizes[above - 1 : above + 1]
    first, second = (_part(few, many, machine, ranks, size, index) for size in (low, high))
    share = (samples - low) / (high - low)

    def between(name: str) -> float:
        return max((1 - share) * getattr(first, name) + share * getattr(second, name), 0.0)

    return PartCost(*(between(each.name) for each in fields(PartCost)))


def _replayed(
    few: Profile, many: Profile | None, machine: Machine, ranks: int, of_layer: bool, parts: Sequence[Part]
) -> PartCost:
    one, other = parts

    def between(amount: Callable[[Part], float]) -> float:
        low, high = amount(one), amount(other)
        if many is None or few.tensor_ranks == many.tensor_ranks:
            return low
        shared = (low - high) / (1 / few.tensor_ranks - 1 / many.tensor_ranks)
        return max(low + shared * (1 / ranks - 1 / few.tensor_ranks), 0.0)

    wire = [_wire(calls(other), (many or few).tensor_ranks) for calls in (_forward, _backward)]
    share = (ranks - 1) / ranks
    count = [sum(n for call, n in calls(other).items() if call.kind not in COMPUTED) for calls in (_forward, _backward)]
    return PartCost(
        between(lambda part: part.kept),
        between(lambda part: part.forward_top),
        between(lambda part: part.backward_top),
        between(lambda part: part.parameters),
        between(lambda part: machine.computing(part.forward)),
        between(lambda part: machine.computing(part.backward)),
        between(lambda part: machine.computing(_others(part.forward))) if of_layer else 0.0,
        machine.starting(one.forward) if of_layer else machine.around / 2,
        machine.starting(one.backward, backward=True) if of_layer else machine.around / 2,
        share * wire[0],
        share * wire[1],
        count[0] if ranks > 1 else 0.0,
        count[1] if ranks > 1 else 0.0,
        between(lambda part: part.flops),
        between(lambda part: sum(call.made * number for call, number in part.forward.items())),
        one.tensors,
        between(lambda part: part.early_top),
        between(lambda part: part.end_top),
    )


def _forward(part: Part) -> Calls:
    return part.forward


def _backward(part: Part) -> Calls:
    return part.backward


def _others(calls: Calls) -> Calls:
    return {call: count for call, count in calls.items() if call.kind == "other"}


def _grown(part: Part, factor: float) -> Part:
    """Of so many times the samples, as if all of it grew with them."""
    return replace(
        part,
        kept=factor * part.kept,
        forward_top=factor * part.forward_top,
        backward_top=factor * part.backward_top,
        forward=_scaled(part.forward, factor),
        backward=_scaled(part.backward, factor),
    )


def _scaled(calls: Calls, samples: float) -> Calls:
    found: dict[Operator, float] = {}
    for (kind, *sizes), count in calls.items():
        call = Operator(kind, *(round(size * samples) for size in sizes))
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
