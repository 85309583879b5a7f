"""Schedules against closed forms, against torch's generators and against their promises on memory."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import Action, Kind, parse_list, validate
from shardwright.pipeline.planning.placement import Placement
from shardwright.pipeline.planning.simulate import Costs, simulate
from shardwright.pipeline.schedules import STYLES, Schedule
from shardwright.pipeline.schedules.interleaved import limit

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zb", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


def slots(style: str, p: int, m: int, v: int) -> int:
    """Length of a step in units of F = I = W = 1, B = 2.

    Every rank has 3 v m units of work; what comes on top is the bubble. With fewer microbatches than the zero-bubble
    schedules need to mesh, the path of the last microbatch dominates instead.
    """
    match style:
        case "gpipe" | "1f1b" | "eager_1f1b" | "interleaved":
            return 3 * (v * m + p - 1)
        case "zb":
            return max(3 * m + p - 1, 2 * m + 2 * p - 1)
        case "zbv":
            return max(6 * m + p - 1, 4 * m + 4 * p - 2)
        case "dualpipev":
            return max(6 * m + 2 * (p - 1), 4 * m + 6 * p - 2) if m > p else 4 * m + 5 * p - 3
        case "dualpipev without pairs":
            return max(6 * m + p - 1, 4 * m + 5 * p - 1) if m > p else 4 * m + 5 * p - 3
    raise AssertionError(style)


@pytest.mark.parametrize("p", range(2, 17))
def test_slots_equal_the_formulas(p: int) -> None:
    for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p, 5 * p - 1, 8 * p}):
        for style, v in CASES:
            if style == "interleaved" and m % p != 0:
                continue
            result = simulate(schedules.get(style, p, m, v))
            expected = slots(style, p, m, v)
            assert result.makespan == expected, (style, p, m, v)
            assert result.bubble == pytest.approx(1 - 3 * v * m / expected)
    m = 4 * p
    one_f_one_b, zero_bubble, v_shape = (
        simulate(schedules.get(style, p, m, v)) for style, v in (("1f1b", 1), ("zb", 1), ("zbv", 2))
    )
    assert one_f_one_b.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert simulate(schedules.get("interleaved", p, m, 3)).bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    # Zero bubble: a third of the waiting; V: the same waiting over twice the work
    assert zero_bubble.makespan - 3 * m == (one_f_one_b.makespan - 3 * m) / 3
    assert v_shape.bubble == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("p", range(2, 17))
def test_slots_equal_the_formulas_everywhere(p: int) -> None:
    for m in range(1, 8 * p + 1):
        for style, v in CASES:
            if style != "interleaved" or m % p == 0:
                assert simulate(schedules.get(style, p, m, v)).makespan == slots(style, p, m, v), (style, p, m, v)


@pytest.mark.parametrize("p", range(1, 9))
def test_any_number_of_microbatches_is_valid_and_never_waits_for_ever(p: int) -> None:
    for m in range(1, 2 * p + 4):
        for style, v in CASES:
            schedule = schedules.get(style, p, m, v)
            validate(schedule.actions, schedule.placement, m)
            result = simulate(schedule)
            if style != "interleaved":
                assert result.makespan == slots(style, p, m, v), (style, p, m, v)
            else:  # never longer than if the microbatches were padded to whole rounds
                assert result.makespan <= slots(style, p, -(-m // p) * p, v), (p, m, v)
            evaluation = schedules.get(style, p, m, v, forward_only=True)
            validate(evaluation.actions, evaluation.placement, m, forward_only=True)
            forward = simulate(evaluation)
            if style in ("zbv", "dualpipev"):
                # The best there is: the last rank starts after p - 1 slots, and what it does last has p - 1 stages to
                # go
                assert forward.makespan == 2 * m + 2 * (p - 1), (p, m)
            elif m % p == 0 or v == 1:
                assert forward.makespan == v * m + p - 1, (style, p, m, v)


@pytest.mark.parametrize("p", range(1, 9))
def test_live_activations_are_as_promised(p: int) -> None:
    for m in (1, p - 1, p, 2 * p, 4 * p + 1):
        if m < 1:
            continue
        one_f_one_b = simulate(schedules.get("1f1b", p, m)).peak_live
        assert one_f_one_b == [min(m, p - rank) for rank in range(p)]
        assert simulate(schedules.get("gpipe", p, m)).peak_live == [m] * p
        eager = simulate(schedules.get("eager_1f1b", p, m)).peak_live
        assert eager == [min(m, 2 * (p - rank) - 1) for rank in range(p)]
        # Zero bubble: no rank holds more than the first rank of 1F1B does
        zero_bubble = simulate(schedules.get("zb", p, m)).peak_live
        assert max(zero_bubble) == max(one_f_one_b)
        # V: chunks are half as large, so 2 p of them are the p of 1F1B, the same on all ranks
        v_shape = simulate(schedules.get("zbv", p, m, 2)).peak_live
        assert max(v_shape) <= 2 * max(one_f_one_b)
        if m >= 2 * p - 1:
            assert v_shape == [2 * p] * p
        # One chunk more where forwards run together with backwards, or would
        for pairs in (True, False):
            paired = simulate(schedules.get("dualpipev", p, m, 2, pairs=pairs)).peak_live
            assert max(paired) <= (2 * p + 1 if m > p else 2 * m)
            if m >= 2 * p and p > 1:
                assert paired == [2 * p + 1] * p
        for v in (2, 3):
            if m % p == 0:
                bound = [min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
                assert simulate(schedules.get("interleaved", p, m, v)).peak_live == bound


@pytest.mark.parametrize(("p", "v"), [(2, 3), (2, 8), (3, 4), (4, 2), (4, 4), (5, 3), (8, 4), (8, 8)])
def test_interleaving_any_number_of_microbatches_costs_little_memory_and_time(p: int, v: int) -> None:
    """At most an eighth (or one) more chunks than with a multiple of p, and mostly as short as can be."""
    best = 0
    numbers = range(p, 4 * p)
    for m in numbers:
        result = simulate(schedules.get("interleaved", p, m, v))
        assert max(result.peak_live) <= max(limit(p, v) * 9 // 8, limit(p, v) + 1), m
        assert result.makespan <= slots("interleaved", p, -(-m // p) * p, v), m
        assert result.makespan <= 1.2 * slots("interleaved", p, m, v), m
        best += result.makespan == slots("interleaved", p, m, v)
    assert best >= 0.5 * len(numbers)


def test_fifteen_microbatches_hold_hardly_more_than_sixteen() -> None:
    held = {m: max(simulate(schedules.get("interleaved", 8, m, 4)).peak_live) for m in (8, 12, 15, 16, 23)}
    assert held == {8: 32, 12: 33, 15: 38, 16: 39, 23: 38}
    assert simulate(schedules.get("interleaved", 8, 15, 4)).makespan == 3 * (4 * 15 + 7), "as short as can be"


def test_gradients_add_up_in_the_same_order_in_every_schedule() -> None:
    for style, v in CASES:
        for rank_actions in schedules.get(style, 4, 9, v).actions:
            for stage in {action.stage for action in rank_actions}:
                order = [
                    action.microbatch
                    for action in rank_actions
                    if action.stage == stage and action.kind in (Kind.B, Kind.W)
                ]
                assert order == list(range(9)), (style, stage)


def test_unequal_costs_and_transfers() -> None:
    schedule = schedules.get("1f1b", 2, 3)
    slow_end = simulate(schedule, Costs(forward=[1, 3], input_grad=[1, 3], weight_grad=[1, 3]))
    assert slow_end.makespan == 1 + 3 * 9 + 2  # the second stage never waits after its first input
    hidden = simulate(schedule, Costs(transfer=0.5))
    blocking = simulate(schedule, Costs(transfer=0.5, overlap=False))
    assert simulate(schedule).makespan < hidden.makespan <= blocking.makespan
    assert hidden.spans[1][0].start == 1.5
    with pytest.raises(ValueError, match=r"Costs\.forward has 3 entries for 2 stages"):
        simulate(schedule, Costs(forward=[1, 2, 3]))


def test_pairs_cost_what_they_do_not_hide() -> None:
    one, two = (Action.parse(text) for text in ("0FB1", "1B0"))
    schedule = Schedule(Placement(1, 2, "round_robin"), [parse_list("0F0 1F0 (0F1;1B0) 1F1 1B1 0B0 0B1")])
    costs = Costs(forward=[1, 2], input_grad=[3, 4], weight_grad=[5, 6], hidden=0.25)
    spans = {action: (start, end) for action, start, end in simulate(schedule, costs).spans[0]}
    assert spans[one] == spans[two] == (3.0, 3.0 + 0.75 * (1 + 10))
    assert simulate(schedule, costs).bubble == 0.0, "what is hidden is no work"
    for p in (1, 2, 3, 8):
        for m in (1, p, p + 1, 2 * p, 5 * p):
            plain, apart = (
                simulate(schedules.get("dualpipev", p, m, 2, pairs=pairs)).makespan for pairs in (True, False)
            )
            assert apart == slots("dualpipev without pairs", p, m, 2), (p, m)
            gained = [
                simulate(schedules.get("dualpipev", p, m, 2), Costs(hidden=hidden)).makespan for hidden in (0.1, 0.2)
            ]
            assert gained[1] <= gained[0] <= plain, (p, m)
            if m >= 2 * p:  # the dearest rank has m - p + min(p - 1, 2) pairs of 3 units or so
                assert gained[1] <= plain - 0.2 * 3 * 2 * (m - 2 * p), (p, m)


def test_an_eager_warm_up_hides_transfers() -> None:
    """1F1B waits for two messages per microbatch; with twice the warm-up a step takes hardly longer than without
    messages.
    """
    p, m, transfer = 8, 64, 0.2
    plain, eager = (
        simulate(schedules.get(style, p, m), Costs(transfer=transfer)).makespan for style in ("1f1b", "eager_1f1b")
    )
    free = simulate(schedules.get("1f1b", p, m)).makespan
    assert plain > free + 1.8 * transfer * m
    assert eager <= free + 4 * transfer * p


def test_a_schedule_that_waits_for_ever_is_found() -> None:
    placement = Placement(2)
    bad = [[Action.parse(word) for word in text.split()] for text in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")]
    with pytest.raises(ValueError, match="ERROR HERE"):
        simulate(Schedule(placement, bad))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1v", 2, 4), "did you mean '1f1b'"),
        (("zb-h1", 2, 4), "did you mean 'zb'"),
        (("interleaved", 2, 4), "num_model_chunks=1: pp_style='interleaved' needs at least 2"),
        (("1f1b", 2, 4, 2), "needs exactly 1 .* works with 'interleaved', 'zbv', 'dualpipev'"),
        (("zbv", 2, 4, 3), "needs exactly 2 .* works with 'interleaved'"),
        (("1f1b", 2, 0), "num_microbatches=0"),
        (("1f1b", 0, 1), "pp_size=0"),
        (("interleaved", 2, 4, 0), "num_model_chunks=0"),
    ],
)
def test_bad_settings_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.get(*arguments)


# torch's own generators ----------------------------------------------------------------------------------------------


def torch_order(name: str, p: int, m: int, v: int) -> list[list[Action]]:
    """Compute actions of torch's schedule class `name`, generated from stages that compute nothing."""
    oracle = pytest.importorskip("torch.distributed.pipelining.schedules")

    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index,
            num_stages=p * v,
            is_first=index == 0,
            is_last=index == p * v - 1,
            group_rank=0,
            group_size=p,
            group=None,
            has_backward=True,
            submod=torch.nn.Identity(),
            device=torch.device("cpu"),
        )

    if name in ("ScheduleGPipe", "Schedule1F1B"):
        made = getattr(oracle, name)(stage(0), m, loss_fn=lambda output, target: output)
    else:
        indices = (
            [0, 2 * p - 1]
            if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
            else [chunk * p for chunk in range(v)]
        )
        made = getattr(oracle, name)([stage(index) for index in indices], m, loss_fn=lambda output, target: output)
    kinds = {"F": Kind.F, "I": Kind.I, "W": Kind.W, "B": Kind.B}
    lists = []
    for rank in range(p):
        if name == "ScheduleDualPipeV":
            lists.append(parse_list(" ".join(_without_name(action) for action in made.pipeline_order[rank])))
            continue
        actions = [
            action
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.value in kinds
        ]
        if name == "Schedule1F1B" and rank == p - 1:
            # Its list for display counts the forwards of the last rank from 1; what it executes counts them from 0.
            actions = [
                a._replace(microbatch_index=a.microbatch_index - (a.computation_type.value == "F")) for a in actions
            ]
        lists.append([Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index) for a in actions])
    return lists


def _without_name(action: Any) -> str:
    """Torch prints pairs as `(0F3;1B2)OVERLAP_F_B`."""
    return str(action).removesuffix("OVERLAP_F_B")


@pytest.mark.skipif(
    not torch.__version__.startswith(("2.11.", "2.12.", "2.13.")),
    reason="torch's schedule classes are private; checked on 2.11 to 2.13",
)
@pytest.mark.parametrize(
    ("style", "name", "v"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb", "ScheduleInterleavedZeroBubble", 1),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_same_work_as_torch_and_never_longer(style: str, name: str, v: int) -> None:
    def halves(actions: list[Action]) -> Counter[Action]:
        """The work in actions, B counted as I and W."""
        parts = {Kind.B: (Kind.I, Kind.W), Kind.FB: (Kind.F,)}
        kinds = [(kind, a) for a in actions for kind in parts.get(a.kind, (a.kind,))]
        return Counter(Action(kind, a.stage, a.microbatch) for kind, a in kinds)

    compared = 0
    for p in (2, 3, 4, 8):
        for m in (p, p + 1, 2 * p - 1, 2 * p, 4 * p, 4 * p + 1):
            try:
                theirs = torch_order(name, p, m, v)
            except ValueError:  # a microbatch count that torch refuses
                continue
            ours = schedules.get(style, p, m, v)
            assert [halves(actions) for actions in ours.actions] == [halves(actions) for actions in theirs]
            if style == "dualpipev":
                assert [list(actions) for actions in ours.actions] == theirs, "the same order of all actions"
            for costs in (
                Costs(),
                Costs(forward=2, input_grad=2, weight_grad=1),
                Costs(forward=1, input_grad=2, weight_grad=1),
            ):
                other, own = simulate(Schedule(ours.placement, theirs), costs), simulate(ours, costs)
                # Interleaving an odd number of microbatches, torch holds far more of them: that may buy it a little
                # time.
                allowed = 1.04 if max(other.peak_live) > 1.1 * max(own.peak_live) else 1.0
                assert own.makespan <= allowed * other.makespan, (p, m, costs)
            compared += 1
    assert compared >= 12


def test_every_style_is_covered_here() -> None:
    assert {style for style, _ in CASES} == set(STYLES)
