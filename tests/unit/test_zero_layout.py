"""Buckets, shards and segments as arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.spec import ParamSpec, Piece, even_pieces
from shardwright.utils.overlap import overlapping
from shardwright.zero.layout import (
    ALIGN,
    BUCKET_SIZE_IN_M,
    Entry,
    bucket_numel,
    closed_form_bytes,
    family_of,
    plan_buckets,
    plan_runs,
)
from shardwright.zero.settings import ZeroSettings, check_bucket_size


def entries_of(shapes: list[tuple[tuple[int, ...], int]], dtype: torch.dtype = torch.float32) -> list[Entry]:
    result = []
    for index, (shape, group) in enumerate(shapes):
        spec = ParamSpec(f"p{index}", shape)
        param = nn.Parameter(torch.zeros(shape, device="meta"))
        result.append(Entry(index, spec.name, param, spec, group, family_of(spec, dtype, 0)))
    return result


shapes = st.lists(
    st.tuples(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(0, 2)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(1, 5000), st.booleans())
def test_every_element_has_one_place_and_one_owner(shapes: list, shards: int, bucket: int, whole: bool) -> None:
    entries = entries_of(shapes)
    plans = plan_buckets(entries, shards, bucket, whole)
    assert sorted(slot.entry.index for plan in plans for slot in plan.slots) == list(range(len(entries)))
    for plan in plans:
        ordered = sorted(plan.slots, key=lambda slot: slot.start)
        assert all(one.stop <= two.start for one, two in itertools.pairwise(ordered))
        assert ordered[-1].stop <= plan.numel
        assert all(slot.start % ALIGN == 0 for slot in plan.slots)
        assert whole or plan.shard_numel % ALIGN == 0
        covered = 0
        for shard in range(shards):
            runs = plan_runs(plan, shard)
            low, _ = plan.shard_range(shard)
            for run in runs:
                assert {slot.entry.group for slot in run.slots} == {run.group}
                for slot in run.slots:
                    part = slot.part_in(low + run.start, low + run.stop)
                    assert part is not None
                    covered += part[1] - part[0]
                    assert not whole or part == (0, slot.entry.numel)
            assert all(one.stop <= two.start for one, two in itertools.pairwise(runs))
        assert covered == sum(slot.entry.numel for slot in plan.slots)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 4), st.tuples(st.integers(0, 500), st.integers(1, 500)))
def test_gaps_are_what_no_parameter_lies_in(shapes: list, shards: int, piece: tuple[int, int]) -> None:
    for plan in plan_buckets(entries_of(shapes), shards, 10**6, True):
        start, stop = min(piece[0], plan.shard_numel - 1), min(sum(piece), plan.shard_numel)
        filled = torch.zeros(plan.numel)
        for slot in plan.slots:
            filled[slot.start : slot.stop] = 1
        rows = torch.ones(shards, stop - start)
        for gap in plan.gaps(rows, start):
            gap.zero_()
        assert torch.equal(rows, filled.view(shards, -1)[:, start:stop])


def test_shards_have_few_segments() -> None:
    """Decay and no-decay parameters alternate in a model; in a shard they lie together."""
    plans = plan_buckets(entries_of([((64, 64), 0), ((64,), 1)] * 20), 4, 10**9, whole=False)
    assert len(plans) == 1
    assert sum(len(plan_runs(plans[0], shard)) for shard in range(4)) == 5


def test_cut_slots_get_runs_of_their_own() -> None:
    (plan,) = plan_buckets(entries_of([((20, 20), 0)] * 4), 2, 10**9, whole=False)
    middle = plan.slots[1]
    runs = [run for shard in range(2) for run in plan_runs(plan, shard, {middle})]
    assert [run.slots for run in runs if middle in run.slots] == [(middle,)] * sum(
        middle in plan.slots_in(s) for s in range(2)
    )
    assert sum(run.stop - run.start for run in runs) == plan.numel


def test_whole_partition_is_balanced() -> None:
    """A bucket grows until its largest parameter fits the others, so padding stays small."""
    plans = plan_buckets(entries_of([((512, 64), 0)] + [((64, 64), 0)] * 40), 4, 1000, whole=True)
    used = sum(slot.entry.numel for plan in plans for slot in plan.slots)
    assert sum(plan.numel for plan in plans) < 1.35 * used


def test_families_do_not_share_buckets_and_plain_ones_come_first() -> None:
    shared = ParamSpec("kv", (4, 4), 0, ((Piece(0, 4),), (Piece(0, 4),)))
    specs = [
        ParamSpec("tied", (4, 4), tied="word"),
        ParamSpec("plain", (4, 4)),
        ParamSpec("norm", (4,), partial=("tp",)),
        shared,
    ]
    entries = [
        Entry(i, spec.name, nn.Parameter(torch.zeros(spec.local_shape(0))), spec, 0, family_of(spec, torch.float32, 0))
        for i, spec in enumerate(specs)
    ]
    plans = plan_buckets(entries, 2, 10**6, whole=False)
    assert [len(plan.slots) for plan in plans] == [1, 1, 1, 1]
    assert plans[0].family.is_plain
    assert {plan.family.shared for plan in plans} == {None, "tp"}


def test_closed_form() -> None:
    plans = plan_buckets(entries_of([((256, 256), 0)], torch.bfloat16), 4, 1, whole=False)
    numel = plans[0].numel
    assert closed_form_bytes(plans, 2, 4) == {
        "reduce_scatter": 0.75 * numel * 4,
        "all_gather": 0.75 * numel * 2,
        "all_reduce": numel / 4 * 4,
    }


def test_owned_ranges_cover_a_sharded_parameter_once() -> None:
    from shardwright.precision.grad_norm import owned_ranges

    for dim in (0, 1):
        pieces = tuple((Piece(0, 4), *own) for own in even_pieces(5, 3, start=4))
        spec = ParamSpec("kv", (9, 9), dim, pieces)
        total = sum(stop - start for rank in range(3) for start, stop in owned_ranges(spec, rank))
        assert total == math.prod(spec.full_shape)
    assert owned_ranges(ParamSpec("norm", (7,)), 0) == [(0, 7)]
    assert owned_ranges(ParamSpec("norm", (7,)), 1) == []


@pytest.mark.parametrize("bad", [0, -1, 1e-9])
def test_bucket_size_is_checked(bad: float) -> None:
    """Of a bucket without room for an element a step would never end."""
    with pytest.raises(ValueError, match=r"reduce_bucket_size_in_m=.* at least 1e-06, which is one element"):
        ZeroSettings(bucket_size_in_m=bad, names={"bucket_size_in_m": "reduce_bucket_size_in_m"})
    assert ZeroSettings(bucket_size_in_m=1e-6).bucket_numel("cpu") == 1
    with pytest.raises(ValueError, match=r"ddp_bucket_cap_mb=1e-06 must be .* at least 3.8e-06, which is one element"):
        check_bucket_size("ddp_bucket_cap_mb", 1e-6, usual=25, element=4 / 2**20)


def test_buckets_follow_the_device_unless_their_size_is_given() -> None:
    assert bucket_numel(BUCKET_SIZE_IN_M, "cpu", torch.float32) == 12_000_000
    assert bucket_numel(BUCKET_SIZE_IN_M, "cuda", torch.float32) == 50_000_000
    assert bucket_numel(BUCKET_SIZE_IN_M, "cuda", torch.bfloat16) == 100_000_000
    assert bucket_numel(12, "cuda", torch.bfloat16) == 12_000_000


def test_parameters_that_share_elements_are_told_from_neighbors_in_one_memory() -> None:
    whole = torch.zeros(4, 9)
    columns = {f"columns {start}": whole[:, start : start + 3] for start in (0, 3, 6)}
    halves = dict(zip(("first", "second"), torch.zeros(8).split(4), strict=True))
    apart = {
        **columns,
        **halves,
        "none": torch.zeros(0),
        "meta": torch.zeros(3, device="meta"),
        "alone": torch.zeros(2),
    }
    assert overlapping(apart.items()) == []
    assert set(overlapping({**columns, "row": whole[1]}.items())) == {(name, "row") for name in columns}
    assert set(overlapping({**columns, "column": whole[:, 4]}.items())) == {("columns 3", "column")}
    assert overlapping({"one": whole, "transposed": whole.t()}.items()) == [("one", "transposed")]
    assert overlapping({"strided": whole[:, ::2], "bytes": whole.view(torch.uint8)[:, 8:12]}.items()) == [
        ("strided", "bytes")
    ]
    assert overlapping({"strided": whole[:, ::2], "bytes": whole.view(torch.uint8)[:, 4:8]}.items()) == []
