"""Rules for values of single samples (`rules`): what a loop over the samples of a microbatch computes.

    each = [F.cross_entropy(row, target) for row, target in zip(logits, labels)]
    loss = torch.stack(each).mean()        or    sum(each) / len(each)

Whatever a function makes of one sample, and of what is the same everywhere, belongs to that sample. Values of all
samples that were made in the same way are rows again when they are stacked in order, and a sum over samples when they
are added up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from .facts import CONST, SUM, Axis, Fact, Kind, first_unknown, unknown
from .rules import HALVES, TOGETHER, Call, elementwise, is_elementwise


class Samples(NamedTuple):
    """The `order` of a value that holds, or adds up, some samples of a microbatch of `size`.

    path  how they were made, the same way for each
    """

    members: frozenset[int]
    size: int
    path: Hashable = ()

    @property
    def is_all(self) -> bool:
        return len(self.members) == self.size


def sample_of(fact: Fact, index: int, size: int) -> Fact:
    """Sample `index` of rows with the fact `fact`."""
    if fact.axis != Axis() or fact.order != ():
        return unknown(HALVES.format(name="an index"), coupled=True)
    return _made(Samples(frozenset({index % size}), size))


def holds_samples(order: Hashable) -> bool:
    return isinstance(order, Samples)


def is_whole(fact: Fact) -> bool:
    """Whether a scalar adds up all samples of its microbatch: the one that there is, or many."""
    return isinstance(fact.order, Samples) and fact.order.is_all


def single_samples(call: Call) -> Fact:
    """Any function of values of single samples."""
    if blame := first_unknown(call.facts):
        return blame
    orders = [fact.order for fact in call.facts if fact.kind is Kind.ROWS]
    if not all(isinstance(order, Samples) and order.members == orders[0].members for order in orders):  # type: ignore[attr-defined]
        if call.name in ("stack", "cat", "concat", "concatenate"):
            return _gathered(call, orders)
        if call.name == "add" and len(orders) == 2 == len(call.facts):
            return _added(*orders)
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if call.name in ("stack", "cat", "concat", "concatenate") and orders[0].size == 1:  # type: ignore[attr-defined]
        return _gathered(call, orders)
    if call.numbers or any(fact.kind not in (Kind.ROWS, Kind.CONST) for fact in call.facts):
        # Numbers and counts of the whole batch, put in by the rule for rows.
        made = (
            elementwise(call)
            if is_elementwise(call.name)
            else unknown(f"{call.name} of a single sample with values of the whole batch")
        )
        if made.kind is not Kind.ROWS:
            return made
    first = orders[0]
    assert isinstance(first, Samples)
    if call.name in ("add", "sub", "rsub") and not any(tensor.dim() for tensor in call.tensors):
        plain = [value for value in call.args if isinstance(value, int | float)]
        if len(call.facts) == 1 and plain == [0]:
            return _made(first)  # how sum() begins
        if first.size == 1 and (plain or CONST in call.facts):
            return unknown(
                f"{call.name} adds something in a microbatch of one sample, and that it does so for every sample, or "
                "once for all of them, looks the same there; choose microbatches of two samples at least"
            )
    paths = tuple(fact.order.path if isinstance(fact.order, Samples) else fact.kind for fact in call.facts)
    return _made(first._replace(path=hash((call.name, paths, _plain((call.args, tuple(call.kwargs.items())))))))


def _made(samples: Samples) -> Fact:
    return Fact(Kind.ROWS, None, None, samples)


def _plain(value: Any) -> Hashable:
    """What stands beside tensors."""
    if isinstance(value, tuple | list):
        return tuple(_plain(one) for one in value)
    if isinstance(value, slice):
        return tuple(_plain(one) for one in (value.start, value.stop, value.step))
    return value if isinstance(value, bool | int | float | str) else None


def _added(one: Hashable, other: Hashable) -> Fact:
    if (
        not isinstance(one, Samples)
        or not isinstance(other, Samples)
        or one.members & other.members
        or one.path != other.path
    ):
        return unknown(
            "add joins single samples that were not treated alike; begin such a sum with 0, or stack them "
            "and take the mean"
        )
    joined = one._replace(members=one.members | other.members)
    return SUM if joined.is_all else _made(joined)


def _gathered(call: Call, orders: list[Hashable]) -> Fact:
    """stack and cat of values of all samples, in their order."""
    size, first = len(orders), orders[0]
    path = first.path if isinstance(first, Samples) else None
    if size != len(call.facts) or orders != [Samples(frozenset({index}), size, path) for index in range(size)]:
        return unknown(
            f"{call.name} joins single samples that are not all those of the batch, in their order, treated alike"
        )
    dim = call.argument(1, "dim", "axis", default=0) % max(call.result.dim(), 1)
    if call.name == "stack" or all(tensor.shape[dim] == 1 for tensor in call.tensors):
        return Fact(Kind.ROWS, dim, Axis())
    return Fact(Kind.ROWS, dim, None, "rows of samples")
