"""Peaks that the planner replays without memory are those of real ranks, to the byte."""

from __future__ import annotations

import pytest

from shardwright.pipeline.schedules import STYLES
from shardwright.testing.peaks import Case, compare, draw, every

# Two chunks on each rank: the first rank has messages from one that is replayed after it.
OPTIONS = {
    "precision": "fp32",
    "pp_size": 2,
    "pp_style": "interleaved",
    "num_model_chunks": 2,
    "num_microbatches": 4,
}


def test_replayed_peaks_are_those_of_real_ranks() -> None:
    found = list(compare([Case("bert-masked-lm", OPTIONS)], world=2))
    assert [one.rank for one in found] == [0, 1]
    for one in found:
        assert one.replayed == one.measured, one


def test_ranks_that_get_more_from_ranks_behind_them_are_replayed_after_these() -> None:
    """Into T5's decoder, whose last stage the first rank has, come two tensors; into its encoder comes one."""
    options = {**OPTIONS, "pp_style": "zbv"}
    for one in compare([Case("t5-conditional-generation", options, recomputed=0.0)], world=2):
        assert one.replayed == one.measured, one


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_replayed_peaks_of_drawn_layouts(world: int) -> None:
    off = [abs(one.off) for case in draw(seed=0, count=20, world=world) for one in compare([case], world)]
    assert max(off) <= 0.03


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", ["", *STYLES])
def test_replayed_peaks_of_every_stage_schedule_recomputation_and_loss(style: str) -> None:
    for case in every(style):
        for one in compare([case], world=4):
            assert abs(one.off) <= 0.03, one
