"""How the shapes of messages between stages follow from those of a microbatch, found out by running the model without
data.

A header tells what the message of one microbatch looks like. Whether a 16 in it is the length, the number of samples or
a number of the model's is seen when the model's copy without data (that of `LossCheck`) runs for other sizes. They are
chosen so that they also show what holds for some sizes only: odd ones (a model that pads to a multiple), smaller and
larger ones (a model that cuts off). All ranks have the same copy, so they find the same.

No rule is found where the copy does not run, or does not return what the message had; then every new shape has a
header.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...comm.payload import Header
from ...comm.shape_rules import MessageKey, ShapeRule, Shapes, Sizes, find_divisors, find_rule
from ...models.layer_chain import are_shared
from ...utils import pytree
from ..batch.microbatch import OTHER_ROWS, Batch, batch_size, find_batch_dim, items_of, like
from ..cut.entry import ENTRY
from ..loss.check import LossCheck
from ..stage import StagedModel

_SMALL = 3
_MOST_RUNS = 64  # remembered


class _Run(NamedTuple):
    """Shapes of the tensors that the units of a model return, of the logits of its routers where these are collected,
    and of what the first unit receives."""

    units: list[list[tuple[int, ...]] | None]
    routers: list[tuple[int, ...]]
    entry: list[tuple[int, ...]]


class MessageShapes:
    def __init__(self, check: LossCheck, staged: StagedModel) -> None:
        self._check = check
        self._staged = staged
        self._runs: dict[Hashable, _Run | None] = {}  # by what the microbatch looked like

    def find_rule(self, stage: int, microbatch: Batch, key: MessageKey, header: Header) -> ShapeRule | None:
        """The rule for messages into `stage`. `microbatch`: one whose messages are of this kind, of any sizes."""
        self._check.follow_mode(self._staged.model.training)
        base, look = key.sizes, key.kind[1:]  # but for the stage, see `PipelineRuntime`

        def run(sizes: Sizes) -> Shapes | None:
            return self._shapes(stage, _resized(microbatch, sizes), (look, sizes))

        with self._staged.handover.whole_shapes():
            return self._from_whole(run, microbatch, base, header)

    def _from_whole(
        self, run: Callable[[Sizes], Shapes | None], microbatch: Batch, base: Sizes, header: Header
    ) -> ShapeRule | None:
        """As `find_rule`; `run` tells the shapes of a rank that shares nothing."""
        whole = run(base)
        if whole is None:
            return None
        divisors = find_divisors(header, whole, self._staged.handover.ranks)
        if divisors is None:
            return None
        groups = _groups(_resized(microbatch, base))
        if run(_varied(base, groups, _near)) is None:  # some sizes are fixed by the model
            groups = [group for group in groups if run(_varied(base, [group], _near)) is not None]
        seen, most = [], None
        for other in (_near, _half, _larger):
            sizes = _varied(base, groups, other)
            found = run(sizes)
            if found is not None:
                seen.append((sizes, found))
            elif other is _larger:  # more than the model can take, perhaps
                most = tuple(map(max, base, *(smaller for smaller, _ in seen)))
            else:
                return None
        return find_rule(base, header, seen, most, divisors)

    def _shapes(self, stage: int, microbatch: Batch, name: Hashable) -> Shapes | None:
        """Of the tensors of a message into `stage`, as `StagedModel` packs them; None where the model cannot be run."""
        staged = self._staged
        survey, start = staged.survey, staged.stages[stage].start
        assert survey is not None
        if name not in self._runs:
            if len(self._runs) >= _MOST_RUNS:
                self._runs.clear()
            self._runs[name] = self._run(microbatch)
        run = self._runs[name]
        if run is None:
            return None
        units = survey.boundary(start)
        passed = staged.routers.num_before(start) if staged.routers is not None else 0
        returned = [run.entry if unit == ENTRY else run.units[unit] for unit in units]
        if None in returned or (ENTRY in units and not run.entry):
            return None
        shapes = [*run.routers[:passed], *(shape for one in returned for shape in one or ())]
        numbers = sum(len(survey.template(unit).told) for unit in survey.numbered(start))
        return (*shapes, (numbers, 2)) if numbers else tuple(shapes)

    def _run(self, microbatch: Batch) -> _Run | None:
        staged = self._staged
        if are_shared(staged.units):  # what each application returns is not noted
            return None
        gates = [unit.gate for unit in staged.units]
        wanted = staged.routers is not None and staged.routers.are_wanted(microbatch)
        taps = staged.routers.taps if staged.routers is not None and wanted else ()
        entry = staged.survey.entry if staged.survey is not None else None
        entered: list[tuple[int, ...]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if entry is not None and not entered:
                entered.append(tuple(entry.taken(args, kwargs).shape))

        try:
            seen = self._check.returns_of(
                [*gates, *(tap.router for tap in taps)], gates[-1], microbatch, (staged.units[0].layer, enter)
            )
        except Exception:  # the model's own code, on sizes that it was not made for
            return None
        # of layers that these sizes do not reach nothing is known (images are left out)
        units = [_shapes_in(seen[gate]) if gate in seen else None for gate in gates]
        routers: list[tuple[int, ...]] = []
        for tap in taps:  # in a layer that is like one before it no router runs
            output = seen.get(tap.router)
            routers.append(
                routers[-1] if output is None else tuple((output if tap.place is None else output[tap.place]).shape)
            )
        return _Run(units, routers, entered)


def _shapes_in(output: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _resized(microbatch: Batch, sizes: Sizes) -> Batch:
    """A microbatch without data that is like this one, but for its sizes: those of all its tensors, in their order."""
    entries, start = {}, 0
    for key, value in items_of(microbatch):
        if isinstance(value, torch.Tensor):
            shape = sizes[start : start + value.dim()]
            start += value.dim()
            value = torch.empty(shape, dtype=value.dtype, device="meta")
        entries[key] = value
    assert start == len(sizes), (start, sizes)
    return like(microbatch, entries)


def _groups(microbatch: Batch) -> list[list[int]]:
    """Places of sizes that belong together, so that only all of them can be changed: numbers of samples, and others
    that are equal.
    """
    samples = batch_size(microbatch)
    groups: dict[Hashable, list[int]] = {}
    place = 0
    for key, value in items_of(microbatch):
        if isinstance(value, torch.Tensor):
            batch_dim = find_batch_dim(key, value, samples)
            for dim, size in enumerate(value.shape):
                if dim == batch_dim:
                    groups.setdefault("samples", []).append(place)
                elif size > 1 or batch_dim == OTHER_ROWS:
                    groups.setdefault(size, []).append(place)
                place += 1
    return list(groups.values())


def _varied(base: Sizes, groups: Sequence[Sequence[int]], other: Callable[[int], int]) -> Sizes:
    """`base` with another size for each of the groups, no two of them alike."""
    sizes, taken = list(base), set[int]()
    for group in groups:
        size = other(base[group[0]])
        while size in taken or size == base[group[0]]:
            size += 1
        taken.add(size)
        for place in group:
            sizes[place] = size
    return tuple(sizes)


def _near(size: int) -> int:
    return size - 1 if size > _SMALL else size + 1


def _half(size: int) -> int:
    return (size // 2) | 1 if size > _SMALL else size + 2


def _larger(size: int) -> int:
    return 2 * size + 1
