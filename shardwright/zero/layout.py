"""How parameters map into flat buckets and buckets into shards. Pure arithmetic: no tensor is touched here.

    parameters  ->  slots        a parameter's place in its bucket
    slots       ->  buckets      about `bucket_numel` elements, one collective each (larger ones go in pieces)
    bucket      ->  shards       `shards` equal parts, one per rank of the ZeRO sub-group
    shard       ->  segments     runs of one param group: what the inner optimizer steps on

A bucket holds parameters of one *family*: those whose gradients take the same way. Buckets are in the order in which
backward completes them (reverse model order); those that need more than data-parallel reduction come last, because
every rank of the other axes must reach them in the same order.

Two partitions: *flat*, where a shard may cut a parameter anywhere (element-wise optimizers), and *whole*, where every
parameter lies in one shard (optimizers that look at matrices).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ..spec import ParamSpec

# Elements. Parameters and shards that begin at multiples of it are sums of the same blocks of the gradient norm in
# every layout, and vectorised kernels and TMA get the borders they want.
ALIGN = 256
# on the wire: NCCL reaches its bandwidth with messages of so many bytes, also between nodes
CUDA_BUCKET_BYTES = 200_000_000
FROZEN = -1  # the param group of parameters that nobody trains
SHARED = -1  # the section of parameters that several parts use


class SizeByDevice(int):
    """Millions of elements per bucket where nobody has said a size: so many, but on CUDA as many as have
    `CUDA_BUCKET_BYTES`.
    """


BUCKET_SIZE_IN_M = SizeByDevice(12)


def bucket_numel(size_in_m: float, device_type: str, wire: torch.dtype) -> int:
    """Elements of a bucket, of gradients that travel as `wire`."""
    if isinstance(size_in_m, SizeByDevice) and device_type == "cuda":
        return CUDA_BUCKET_BYTES // wire.itemsize
    return max(1, int(size_in_m * 1_000_000))


class Family(NamedTuple):
    """What parameters must agree on to share a bucket.

    section  the part of the model (pipeline chunk) they belong to: parts are reduced at different times. `SHARED` when
             all are through
    dtype    working dtype
    partial  axes over which the gradient must be summed beyond data parallelism
    tied     name of the group of copies on other pipeline stages
    shared   axis over which several ranks hold the same rows, or None
    experts  data-parallel ranks hold different experts: reduced over those that hold the same
    """

    section: int
    dtype: torch.dtype
    partial: tuple[str, ...] = ()
    tied: str | None = None
    shared: str | None = None
    experts: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.partial or self.tied or self.shared)


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter: its number in model order, its full name, and the optimizer's param group that holds it, or
    `FROZEN`.
    """

    index: int
    name: str
    param: nn.Parameter
    spec: ParamSpec
    group: int
    family: Family

    @property
    def numel(self) -> int:
        return self.param.numel()


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of `entry` in its bucket: elements [start, stop) of the flat buffer."""

    entry: Entry
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.entry.numel

    def part_in(self, start: int, stop: int) -> tuple[int, int] | None:
        """The part of the parameter (flat range, row-major) inside [start, stop) of the bucket, or None."""
        low, high = max(self.start, start), min(self.stop, stop)
        return (low - self.start, high - self.start) if low < high else None


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """One bucket: `numel` elements in `shards` equal parts; `slots` ascending by start. `unit`: which unit it
    belongs to, at stage 3.
    """

    family: Family
    slots: tuple[Slot, ...]
    shard_numel: int
    shards: int
    whole: bool
    unit: int = 0
    _gaps: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict, repr=False)

    @property
    def numel(self) -> int:
        return self.shard_numel * self.shards

    @cached_property
    def turn(self) -> tuple[bool, int]:
        """Ascending in the order in which backward fills buckets, those that are not plain last."""
        return not self.family.is_plain, -min(slot.entry.index for slot in self.slots)

    def gaps(self, rows: torch.Tensor, start: int) -> list[torch.Tensor]:
        """What no parameter lies in of `rows`, which are elements of every shard from its `start` on."""
        piece = start, rows.shape[1]
        if piece not in self._gaps:  # they are asked for in every step
            self._gaps[piece] = list(self._gaps_of(*piece))
        return [rows[shard, low:high] for shard, low, high in self._gaps[piece]]

    def _gaps_of(self, start: int, width: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first and last element from its `start` on)"""
        ends, starts = (0, *(slot.stop for slot in self.slots)), (*(slot.start for slot in self.slots), self.numel)
        for low, high in zip(ends, starts, strict=True):
            for shard in range(low // self.shard_numel, -(-high // self.shard_numel)) if low < high else ():
                first = shard * self.shard_numel + start
                begin, end = max(low - first, 0), min(high - first, width)
                if begin < end:
                    yield shard, begin, end

    def parts_of(
        self, slot: Slot, values: torch.Tensor, rows: torch.Tensor, start: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(place in `rows`, elements of `values`) of one parameter; `rows` hold elements from `start` on of every
        shard.
        """
        flat = values.reshape(-1)
        for shard, row in enumerate(rows):
            low = shard * self.shard_numel + start
            part = slot.part_in(low, low + row.numel())
            if part is not None:
                first = slot.start + part[0] - low
                yield row[first : first + part[1] - part[0]], flat[part[0] : part[1]]

    def shard_range(self, shard: int) -> tuple[int, int]:
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def slots_in(self, shard: int) -> list[Slot]:
        low, high = self.shard_range(shard)
        return [slot for slot in self.slots if slot.part_in(low, high)]


class Shards(NamedTuple):
    """How many ranks share the optimizer of the layers that all have, and that of experts."""

    usual: int
    experts: int

    def of(self, family: Family) -> int:
        return self.experts if family.experts else self.usual


class Run(NamedTuple):
    """Elements [start, stop) of a shard that belong to one param group, and the slots they touch."""

    start: int
    stop: int
    group: int
    slots: tuple[Slot, ...]


def aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def plan_buckets(entries: Sequence[Entry], shards: int | Shards, bucket_numel: int, whole: bool) -> list[BucketPlan]:
    """Buckets of at least `bucket_numel` elements (the last of a family may be smaller), in launch order.

    In the whole partition a bucket also grows to `shards` times its largest parameter, so that dealing whole parameters
    to the shards wastes little; where the last parameters do not suffice, the buckets before are joined to theirs.
    """
    filling: dict[Family, list[Entry]] = {}
    sizes: dict[Family, tuple[int, int]] = {}  # of what is filling: elements, and those of its largest parameter
    closed: list[list[Entry]] = []
    shares = _shares(shards)

    def is_full(family: Family, numel: int, largest: int) -> bool:
        return numel >= (max(bucket_numel, shares.of(family) * largest) if whole else bucket_numel)

    for entry in reversed(entries):
        family = entry.family
        filling.setdefault(family, []).append(entry)
        numel, largest = sizes.get(family, (0, 0))
        sizes[family] = numel + aligned(entry.numel), max(largest, entry.numel)
        if is_full(family, *sizes[family]):
            closed.append(filling.pop(family))
            del sizes[family]
    for family, members in filling.items():
        while (
            whole
            and not is_full(family, *_sizes(members))
            and (before := [other for other in closed if other[0].family == family])
        ):
            closed = [other for other in closed if other is not before[-1]]
            members = before[-1] + members
        closed.append(members)
    plan = _plan_whole if whole else _plan_flat
    # Sorting is stable: within a section, plain buckets keep the order in which backward fills them.
    closed.sort(key=lambda members: (members[0].family.section, not members[0].family.is_plain))
    return [plan(members[0].family, members, shares.of(members[0].family)) for members in closed]


def _sizes(members: Sequence[Entry]) -> tuple[int, int]:
    """Elements of all, each from an aligned place on, and elements of the largest."""
    return sum(aligned(member.numel) for member in members), max(member.numel for member in members)


def _shares(shards: int | Shards) -> Shards:
    return shards if isinstance(shards, Shards) else Shards(shards, shards)


def plan_unit_buckets(units: Sequence[Sequence[Entry]], shards: int | Shards, whole: bool) -> list[BucketPlan]:
    """One bucket per unit and family, in launch order: within a section plain ones first, and the units that
    backward ends with last.
    """
    plan = _plan_whole if whole else _plan_flat
    plans: list[BucketPlan] = []
    first = [min((entry.index for entry in entries), default=0) for entries in units]
    for unit in sorted(range(len(units)), key=lambda unit: -first[unit]):
        families: dict[Family, list[Entry]] = {}
        for entry in units[unit]:
            families.setdefault(entry.family, []).append(entry)
        plans += [
            replace(plan(family, members, _shares(shards).of(family)), unit=unit)
            for family, members in families.items()
        ]
    plans.sort(key=lambda plan: (plan.family.section, not plan.family.is_plain))
    return plans


def _plan_flat(family: Family, members: Iterable[Entry], shards: int) -> BucketPlan:
    """Parameters side by side, those of one param group together, so that a shard has few segments."""
    slots, offset = [], 0
    for entry in sorted(members, key=lambda entry: entry.group):
        slots.append(Slot(entry, offset))
        offset += aligned(entry.numel)
    return BucketPlan(family, tuple(slots), aligned(-(-offset // shards)), shards, whole=False)


def _plan_whole(family: Family, members: Iterable[Entry], shards: int) -> BucketPlan:
    """Each parameter to the shard with the least so far, largest first; shards are as long as the fullest."""
    parts: list[list[Entry]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for entry in sorted(members, key=lambda entry: (-entry.numel, entry.index)):
        lightest = loads.index(min(loads))
        parts[lightest].append(entry)
        loads[lightest] += aligned(entry.numel)
    slots = []
    for shard, part in enumerate(parts):
        offset = shard * max(loads)
        for entry in part:
            slots.append(Slot(entry, offset))
            offset += aligned(entry.numel)
    return BucketPlan(family, tuple(slots), max(loads), shards, whole=True)


def plan_runs(plan: BucketPlan, shard: int, cut: Iterable[Slot] = ()) -> list[Run]:
    """The segments of one shard.

    Flat: maximal runs of one param group, padding included (its gradient is zero and stays so); a slot in `cut` gets a
    run of its own. Whole: one run per parameter.
    """
    alone = set(cut)
    low, _ = plan.shard_range(shard)
    runs: list[Run] = []
    for slot in plan.slots_in(shard):
        start = max(slot.start, low) - low
        if plan.whole:
            runs.append(Run(start, start + slot.entry.numel, slot.entry.group, (slot,)))
            continue
        joins = runs and runs[-1].group == slot.entry.group and slot not in alone and runs[-1].slots[-1] not in alone
        if joins:
            runs[-1] = runs[-1]._replace(slots=(*runs[-1].slots, slot))
        else:
            runs.append(Run(start, start, slot.entry.group, (slot,)))
    if plan.whole or not runs:
        return runs
    # Every run reaches up to the next one; the last takes the padding at the end.
    stops = [run.start for run in runs[1:]] + [plan.shard_numel]
    return [run._replace(stop=stop) for run, stop in zip(runs, stops, strict=True)]


def family_of(spec: ParamSpec, dtype: torch.dtype, section: int) -> Family:
    """The family of a parameter laid out by `spec`."""
    shared = spec.axis if spec.shared_runs else None
    return Family(section, dtype, spec.partial, spec.tied, shared, spec.is_of_experts)


def closed_form_bytes(
    plans: Iterable[BucketPlan], replicas: int, gradient_itemsize: float, weight_itemsize: float | None = None
) -> dict[str, float]:
    """Bytes that one rank sends per step in each collective, by the ring formulas.

    weight_itemsize  bytes of a weight on the wire; None for those of its dtype

    reduce_scatter  (k-1)/k of the gradients, inside the sub-group of k
    all_gather      (k-1)/k of the parameters, inside the sub-group
    all_reduce      2 (r-1)/r of the shard's gradients, across the r sub-groups
    """
    result = {"reduce_scatter": 0.0, "all_gather": 0.0, "all_reduce": 0.0}
    for plan in plans:
        others = plan.numel - plan.shard_numel
        result["reduce_scatter"] += others * gradient_itemsize
        result["all_gather"] += others * (weight_itemsize or plan.family.dtype.itemsize)
        result["all_reduce"] += 2 * (replicas - 1) / replicas * plan.shard_numel * gradient_itemsize
    return result
