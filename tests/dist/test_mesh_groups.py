"""Making groups that only some ranks take part in does not disturb the groups made later."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.cluster import ParallelMesh
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
