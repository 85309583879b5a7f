"""The mesh, at sizes no machine here has: the fake backend plays any rank of any world."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwright.cluster.mesh import validate_sizes

SCRIPT = """
import json, sys
from shardwright.cluster import ParallelMesh, launch
rank, world, kwargs = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
launch(rank, world, None, None, backend="fake")
mesh = ParallelMesh(**kwargs)
axes = ("dp", "pp", "tp", "sp", "dp_sp", "zero", "zero_replica", "world")
print(json.dumps({
    "sizes": {axis: mesh.size(axis) for axis in axes},
    "coordinates": {axis: mesh.coordinate(axis) for axis in axes},
    "ranks": {axis: mesh.ranks(axis) for axis in axes},
    "group_sizes": {axis: mesh.group(axis).size() for axis in axes},
    "group_ranks": {axis: mesh.group(axis).rank() for axis in axes},
    "tied": mesh.tied_group([0, mesh.size("pp") - 1]) is not None,
    "device_mesh": mesh.device_mesh("zero_replica", "zero").mesh.tolist() if world <= 64 else None,
}))
"""


def build(rank: int, world: int, **kwargs: object) -> dict:
    command = [sys.executable, "-c", SCRIPT, str(rank), str(world), json.dumps(kwargs)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout.splitlines()[-1]
    )


def test_world_of_4096() -> None:
    mesh = build(2731, 4096, pp=8, tp=8, zero_group_size=16)
    assert mesh["sizes"] == {
        "dp": 64,
        "pp": 8,
        "tp": 8,
        "sp": 1,
        "dp_sp": 64,
        "zero": 16,
        "zero_replica": 4,
        "world": 4096,
    }
    # 2731 = ((dp * 8) + pp) * 8 + tp
    assert mesh["coordinates"]["tp"] == 2731 % 8
    assert mesh["coordinates"]["pp"] == 2731 // 8 % 8
    assert mesh["coordinates"]["dp"] == 2731 // 64
    assert mesh["coordinates"]["zero"] == 2731 // 64 % 16
    assert mesh["coordinates"]["zero_replica"] == 2731 // 64 // 16
    assert mesh["ranks"]["pp"] == [2731 // 64 * 64 + stage * 8 + 2731 % 8 for stage in range(8)]
    assert not mesh["tied"], "the stage in the middle holds no copy of the embedding"


@pytest.mark.parametrize("kwargs", [{}, {"dp_outside": False}, {"ring_attention": True}])
def test_every_axis_agrees_with_itself(kwargs: dict) -> None:
    rank = 13
    mesh = build(rank, 32, pp=2, tp=2, sp=2, zero_group_size=2, **kwargs)
    for axis, ranks in mesh["ranks"].items():
        assert len(ranks) == mesh["sizes"][axis] == mesh["group_sizes"][axis]
        assert ranks[mesh["coordinates"][axis]] == rank
        assert mesh["group_ranks"][axis] == mesh["coordinates"][axis], axis
    strides = {axis: mesh["ranks"][axis][1] - mesh["ranks"][axis][0] for axis in ("dp", "pp", "tp", "sp")}
    expected = {
        "": {"dp": 8, "pp": 4, "tp": 2, "sp": 1},
        "dp_outside": {"dp": 4, "pp": 16, "tp": 2, "sp": 1},
        "ring_attention": {"dp": 8, "pp": 4, "tp": 1, "sp": 2},
    }["".join(kwargs)]
    assert strides == expected
    assert sorted(rank for row in mesh["device_mesh"] for rank in row) == sorted(mesh["ranks"]["dp_sp"])


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (8, {"tp": 3}, ["world_size=8", "tp_size=3", "tp_size=2 or tp_size=4", "Start 6 or 9 ranks"]),
        (8, {"tp": 2, "pp": 3}, ["tp_size=2 x pp_size=3", "= 6", "pp_size=2", "pp_size=4"]),
        (8, {"pp": 0}, ["pp_size=0", "at least 1"]),
        (8, {"tp": 2.0}, ["tp_size=2.0", "whole number"]),
        (8, {"tp": True}, ["tp_size=True", "whole number"]),
        (8, {"sp": -1}, ["sp_size=-1"]),
        (8, {"tp": 2, "dp": 3}, ["dp_size=3", "dp_size=4", "start 6 ranks"]),
        (12, {"tp": 2, "zero_group_size": 4}, ["zero_group_size=4", "dp_size=6", "1, 2, 3, 6"]),
        (2, {"tp": 4}, ["world_size=2", "tp_size=2", "Start 4"]),
    ],
)
def test_bad_sizes_are_refused_with_what_would_work(world: int, sizes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate_sizes(world, **{"pp": 1, "tp": 1, "sp": 1, "dp": None, "zero_group_size": None, **sizes})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("asked", "shard"), [(None, 6), (0, 6), (-1, 6), (1, 1), (2, 2), (3, 3), (6, 6)])
def test_zero_group_size(asked: int | None, shard: int) -> None:
    assert validate_sizes(12, pp=1, tp=2, sp=1, dp=None, zero_group_size=asked) == (6, shard)


def test_without_a_process_group() -> None:
    from shardwright.cluster import ParallelMesh

    with pytest.raises(ValueError, match="launch_from_torch"):
        ParallelMesh()
