"""Peaks that follow from a shorter layout are those of the whole one."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import pytest

from shardwright.pipeline.planning.actions import Kind
from shardwright.planner.buckets import Buckets, come_again
from shardwright.planner.peaks import DRIFTS, Found
from shardwright.planner.places import Place, Sort, like
from shardwright.planner.repeats import More, extend, is_steady
from shardwright.planner.segments import Segment
from shardwright.testing.peaks import Case, compare_shorter, draw_deep

OPTIONS = {"precision": "bf16", "zero_stage": 2, "num_microbatches": 4, "zero_bucket_size_in_m": 0.001}


def test_peaks_of_more_layers_and_microbatches() -> None:
    """Of four layers two are left out, and of four microbatches one."""
    ((found, note),) = compare_shorter(Case("llama-causal-lm", OPTIONS, 0.0, 4), world=2)
    assert note == ""
    assert found.replayed == pytest.approx(found.measured, abs=64)  # a few numbers, of losses


def test_actions_are_as_far_from_the_ends_of_a_step_as_those_that_stand_for_them() -> None:
    sort = Sort(Kind.I, 1)
    found = [like(Place(sort, number), Counter({sort: 10}), Counter({sort: 6})) for number in range(10)]
    assert [place.number for place in found if place is not None] == [0, 1, 2, 3, 3, 3, 3, 3, 4, 5]
    same = [like(Place(sort, number), Counter({sort: 6}), Counter({sort: 6})) for number in range(6)]
    assert [place.number for place in same if place is not None] == [0, 1, 2, 3, 4, 5]
    assert like(Place(sort, 0), Counter({sort: 10}), Counter()) is None


def test_actions_in_the_middle_stand_where_they_do_in_their_round() -> None:
    sort = Sort(Kind.B, 1)
    found = [like(Place(sort, number), Counter({sort: 20}), Counter({sort: 16}), (4, 4)) for number in range(20)]
    assert [place.number % 4 for place in found if place is not None] == [0, 1, 2, 3] * 5
    of_six = [like(Place(sort, number), Counter({sort: 48}), Counter({sort: 16}), (6, 4)) for number in range(12, 18)]
    assert [place.number for place in of_six if place is not None] == [8, 9, 10, 10, 10, 11]


@pytest.mark.sweep
def test_peaks_of_interleaved_rounds_leave_nothing_behind() -> None:
    options = {"precision": "bf16", "pp_size": 4, "pp_style": "interleaved", "num_model_chunks": 2}
    for found, note in compare_shorter(Case("llama-causal-lm", options | {"num_microbatches": 20}, 0.0, 8), world=4):
        assert note == ""
        assert found.replayed == pytest.approx(found.measured, rel=1e-3)


def test_peaks_whose_middle_leaves_something_behind_are_noted() -> None:
    assert "leave something behind" in Found([], rough=(DRIFTS,)).note
    both = Found([], rough=("B", DRIFTS)).note
    assert "in B, whose" in both
    assert "leave something behind" in both


def test_peaks_of_layers_that_share_buckets() -> None:
    """A bucket takes two layers and a part of the next one."""
    options = {**OPTIONS, "zero_bucket_size_in_m": 0.12}
    ((found, note),) = compare_shorter(Case("llama-causal-lm", options, 0.0, 9), world=2)
    assert note == ""
    assert found.replayed == pytest.approx(found.measured, abs=64)


def _buckets(*sizes: tuple[int, ...], capacity: int = 1000) -> Buckets:
    return Buckets(capacity, {"all": list(sizes)})


def test_buckets_come_again_where_a_layer_more_has_more_of_them() -> None:
    base = _buckets((50, 30), (30, 9))
    assert come_again(base, [(_buckets((50, 30), (30,), (30, 9)), 5)])
    assert not come_again(base, [(_buckets((50, 30), (30, 30, 9)), 5)])
    assert not come_again(base, [(_buckets((50, 30), (30,), (30, 9), capacity=1200), 5)])
    assert come_again(base, [(_buckets((50, 30), (30, 30, 9)), 0)])  # no layer is left out
    assert come_again(_buckets((30, 30), capacity=0), [(_buckets((30, 30, 30), capacity=0), 5)])
    norms = _buckets((2, 2)), _buckets((2, 2, 2))
    assert come_again(norms[0], [(norms[1], 5)])
    assert not come_again(norms[0], [(norms[1], 500)])


def test_peaks_where_the_last_weight_gradients_wait_as_no_others_do() -> None:
    """Four microbatches more than are replayed: what stands for those between them leaves nothing behind."""
    options = {"precision": "bf16", "tp_size": 2, "pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}
    options["num_microbatches"] = 10
    along = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    for found, _ in compare_shorter(Case("llama-causal-lm", options | along, 0.0, 6), world=4):
        assert found.replayed == pytest.approx(found.measured, rel=1e-3)


def test_peaks_of_pipelines_whose_weights_are_gathered_and_left() -> None:
    """Backwards between forwards find other weights gathered than those behind the last forward."""
    options = {"precision": "bf16", "pp_size": 2, "zero_stage": 3, "gather_ahead": 0, "num_microbatches": 8}
    (first, _), (last, _) = compare_shorter(Case("llama-causal-lm", options, 0.0, 8), world=4)
    assert first.replayed == pytest.approx(first.measured, rel=1e-3)
    assert last.replayed == pytest.approx(last.measured, rel=3e-3)


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


def _gathered(layers: int, ahead: int) -> Segment:
    """A backward: 10 of each layer go, 30 are there while it runs, and it finds weights of 4 of those ahead beside its
    own.
    """
    held, there = 100 * layers, 0
    filled, points = list[int](), list[int]()
    for left in range(layers - 1, -1, -1):
        window = min(ahead, left) + 1
        filled.append(4 * (window - there))
        points.append(held + 4 * window + 30)
        held, there = held - 10, window - 1
    return Segment("some", np.array([100 * layers]), [30] * layers, np.array(points)[:, None], np.array([held]), filled)


def test_layers_that_are_gathered_ahead_are_seen_until_one_has_all_of_them_beside_it() -> None:
    steady = {seen for seen in range(2, 9) if is_steady(_gathered(seen, 3), _gathered(seen + 1, 3))}
    assert steady == {5, 6, 7, 8}
    assert is_steady(_gathered(2, 0), _gathered(3, 0))
    for seen, exact in ((2, False), (5, True), (8, True)):
        found, real = extend(_gathered(seen, 3), [More(_gathered(seen + 1, 3), 16 - seen)]), _gathered(16, 3)
        assert found.rough != exact
        assert found.change.tolist() == (real.end - real.start).tolist() == [-160]
        assert (found.top.tolist() == [int((real.points - real.start).max())] == [46]) == exact


@pytest.mark.sweep
@pytest.mark.parametrize("recomputed", [0.0, 1.0])
def test_peaks_where_weights_are_gathered_ahead(recomputed: float) -> None:
    options = {"precision": "bf16", "zero_stage": 3, "gather_ahead": 2}
    ((found, note),) = compare_shorter(Case("llama-causal-lm", options, recomputed, 9), world=2)
    assert note == ""
    assert found.replayed == pytest.approx(found.measured, abs=64)


@pytest.mark.sweep
def test_peaks_of_drawn_deep_layouts() -> None:
    off = [abs(one.off) for case, world in draw_deep(seed=0, count=24) for one, _ in compare_shorter(case, world)]
    assert statistics.median(off) <= 0.03
    assert max(off) <= 0.05
