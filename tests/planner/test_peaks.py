"""Peaks that follow from a shorter layout are those of the whole one."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from shardwright.planner.repeats import More, extend
from shardwright.planner.segments import Segment
from shardwright.testing.peaks import Case, compare_shorter, draw_deep

OPTIONS = {"precision": "bf16", "zero_stage": 2, "num_microbatches": 4, "zero_bucket_size_in_m": 0.001}


def test_peaks_of_more_layers_and_microbatches() -> None:
    """Of four layers two are left out, and of four microbatches one."""
    ((found, note),) = compare_shorter(Case("llama-causal-lm", OPTIONS, 0.0, 4), world=2)
    assert note == ""
    assert found.replayed == pytest.approx(found.measured, abs=64)  # a few numbers, of losses


def _segment(layers: int) -> Segment:
    """Something of 50 that goes behind the layers, 10 and 30 of each layer, of which 10 stay, and 7 at the end."""
    held, grown, points = 50, [50], [50]
    for _ in range(layers):
        grown += [10, 30]
        points += [held + 10, held + 40]
        held += 10
    held -= 50
    grown, points = [*grown, 7], [*points, held + 7]
    amounts = np.array(points)[:, None] + 100
    return Segment("some", np.array([100]), grown, amounts, np.array([held + 100]))


def test_a_segment_of_many_layers_follows_from_two_and_three() -> None:
    found, real = extend(_segment(2), [More(_segment(3), 5)]), _segment(7)
    assert not found.rough
    assert found.change.tolist() == (real.end - real.start).tolist() == [70]
    assert found.top.tolist() == [int((real.points - real.start).max())] == [150]


@pytest.mark.sweep
def test_peaks_of_drawn_deep_layouts() -> None:
    off = [abs(one.off) for case, world in draw_deep(seed=0, count=24) for one, _ in compare_shorter(case, world)]
    assert statistics.median(off) <= 0.03
    assert max(off) <= 0.05
