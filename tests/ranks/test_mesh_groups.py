"""Groups of one layout are made once, and those that only some ranks take part in do not disturb the ones made
later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwright.cluster import ParallelMesh
from shardwright.cluster.groups import all_groups
from shardwright.pipeline.planning.placement import Placement
from shardwright.testing import run_ranks


def make_groups(rank: int, world: int) -> list[float]:
    sums = []
    for _ in range(2):
        pipeline = ParallelMesh(pp=3)
        tied = pipeline.tied_group([0, 2])
        assert (tied is None) == (pipeline.coordinate("pp") == 1)
        assert pipeline.tied_group([2, 0]) is tied
        later = ParallelMesh(tp=3)
        for group in (tied, pipeline.group("pp"), later.group("tp")):
            if group is not None:
                total = torch.tensor([float(rank)])
                dist.all_reduce(total, group=group)
                sums.append(float(total))
    return sums


def test_tied_groups_of_some_ranks() -> None:
    assert run_ranks(make_groups, 3) == [[2.0, 3.0, 3.0] * 2, [3.0, 3.0] * 2, [2.0, 3.0, 3.0] * 2]


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"tp": 2, "zero_group_size": 1},
    {"pp": 4},
    {"sp": 2, "tp": 2, "ring_attention": True},
    {"sp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "dp_outside": False},
    {"zero_group_size": 2},
]
AXES = ("dp", "pp", "tp", "sp", "dp_sp", "zero", "zero_replica", "world")


def groups_of(mesh: ParallelMesh) -> Iterator[tuple[list[int], dist.ProcessGroup]]:
    for axis in AXES:
        yield mesh.ranks(axis), mesh.group(axis)
    for style in ("linear", "round_robin"):
        groups = mesh.message_groups(Placement(mesh.size("pp"), 1, style).channels)
        assert set(groups) == {
            channel for channel in Placement(mesh.size("pp"), 1, style).channels if mesh.coordinate("pp") in channel
        }
        for channel, group in groups.items():
            yield sorted(mesh.stage_ranks(channel)), group
    for holders in ([0, mesh.size("pp") - 1], [0, 1]):
        if mesh.size("pp") > 2 and (group := mesh.tied_group(holders)) is not None:
            yield mesh.stage_ranks(holders), group


def use_all_layouts(rank: int, world: int) -> int:
    numbers = []
    for _ in range(3):
        for layout in LAYOUTS:
            for ranks, group in groups_of(ParallelMesh(**layout)):
                assert dist.get_process_group_ranks(group) == ranks
                total = torch.tensor([2.0**rank])
                dist.all_reduce(total, group=group)
                assert total.item() == sum(2.0**member for member in ranks)
        numbers.append(len(all_groups()))
    assert numbers[0] == numbers[2], f"{numbers}: groups are made again"
    return numbers[0]


def test_groups_are_made_once() -> None:
    assert len(set(run_ranks(use_all_layouts, 4))) == 1


def test_messages_have_a_group_of_their_own() -> None:
    run_ranks(keep_messages_apart, 2)


def keep_messages_apart(rank: int, world: int) -> None:
    mesh = ParallelMesh(pp=2)
    channels = Placement(2).channels
    down, up = mesh.message_groups(channels).values()
    assert len({id(group) for group in (down, up, mesh.group("pp"))}) == 3
    assert list(ParallelMesh(pp=2).message_groups(channels).values()) == [down, up]
    dist.barrier()  # a rank that ends closes connections, which another may still be making


def make_own_groups_in_between(rank: int, world: int) -> None:
    dist.new_group([0, 1])  # as torch wants it, by all ranks: 0 and 1 are now members of more groups than 2 and 3
    passing = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
    if rank == 2:
        dist.new_group([rank], use_local_synchronization=True)
    use_all_layouts(rank, world)
    for group in passing:
        dist.destroy_process_group(group)
    use_all_layouts(rank, world)
    dist.destroy_process_group(ParallelMesh(tp=2).group("tp"))
    use_all_layouts(rank, world)
    assert ParallelMesh(tp=2).group("tp") in all_groups(), "a failure must be able to close it"


def test_groups_of_the_script_do_not_disturb_those_of_layouts() -> None:
    run_ranks(make_own_groups_in_between, 4)
