"""Actions: printing, parsing, validating, tables."""

from __future__ import annotations

import pytest

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import Action, Kind, format_list, parse_list, separate, table, validate
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.placement import Placement


def test_actions_print_and_parse_back() -> None:
    assert str(Action(Kind.F, 2, 0)) == "2F0"
    assert str(Action(Kind.REDUCE, 3)) == "3REDUCE"
    for rank_actions in lower(schedules.get("zbv", 3, 4, 2)).actions:
        assert parse_list(format_list(rank_actions)) == rank_actions


def test_pairs_print_as_one_and_parse_back() -> None:
    pair = [Action(Kind.FB, 0, 3), Action(Kind.B, 1, 2)]
    assert format_list([Action(Kind.F, 0, 2), *pair, Action(Kind.B, 1, 3)]) == "0F2 (0F3;1B2) 1B3"
    assert parse_list("(0F3;1B2)") == pair == [Action.parse(str(action)) for action in pair]
    assert format_list(separate(pair)) == "0F3 1B2"
    for rank_actions in lower(schedules.get("dualpipev", 3, 7, 2)).actions:
        assert parse_list(format_list(rank_actions)) == rank_actions
    marked = [line for line in table([pair], (0, 1)).splitlines() if "ERROR HERE" in line]
    assert [line.split() for line in marked] == [["1", "1B2)", "<--", "ERROR", "HERE"]]
    for text in ("(0F3)", "(0F3;1F2)", "(0I3;1B2)", "(0F3;1B2"):
        with pytest.raises(ValueError, match="is no action"):
            parse_list(text)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2REDUCE1", "2F-1", "2SEND0", "2GATHER0", "FREE", "2OFFLOAD"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("style", "ranks", "chunks", "stages"),
    [
        ("linear", 3, 1, [[0], [1], [2]]),
        ("round_robin", 2, 3, [[0, 2, 4], [1, 3, 5]]),
        ("v", 3, 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_placement_is_a_bijection(style: str, ranks: int, chunks: int, stages: list[list[int]]) -> None:
    placement = Placement(ranks, chunks, style)
    assert [placement.stages_of(rank) for rank in range(ranks)] == stages
    for stage in range(placement.num_stages):
        assert placement.stage_of(placement.rank_of(stage), placement.chunk_of(stage)) == stage


@pytest.mark.parametrize(
    "arguments", [(0, 1, "linear"), (2, 2, "linear"), (2, 3, "v"), (2, 1, "ring"), (2, 0, "round_robin")]
)
def test_bad_placements_are_refused(arguments: tuple[int, int, str]) -> None:
    with pytest.raises(ValueError):
        Placement(*arguments)


@pytest.mark.parametrize(
    ("first_rank", "why"),
    [
        ("0F0 0B0 0F1", "1 weight gradients"),
        ("0F0 0F1 0B0 0B1 0B1", "comes twice"),
        ("0B0 0F0 0F1 0B1", "0B0 before 0F0"),
        ("0F0 0F1 0W0 0I0 0B1", "0W0 before 0I0"),
        ("0F0 0F1 0I0 0B0 0B1", "0B0 after 0I0"),
        ("0F0 0F1 0I0 0B1", "1 weight gradients"),
        ("0F0 0F1 1B0 0B1", "holds stages"),
        ("0F0 0F1 0B0 0B2", "only 2 microbatches"),
        ("0F0 0F1 0B0 0REDUCE 0B1", "before the last weight gradient"),
        ("0F0 (0F1;0B1) 0B0", "behind 0F1, which runs together with a B of another microbatch"),
        ("0F0 0FB1 0F1 0B0 0B1", "behind 0F1, which runs together with a B"),
        ("0F0 0B0 0FB1", "is the last action"),
        ("0F0 (0F1;0B0) 0F1 0B1", "comes twice"),
        ("0GATHER 0F0 0FREE 0F1 0B0 0B1", "weights of stage 0 are not gathered"),
        ("0GATHER 0F0 0GATHER 0F1 0B0 0B1", "gathered already"),
        ("0GATHER 0F0 0F1 0B0 0B1 0FREE 0FREE", "not gathered"),
        ("0OFFLOAD0 0F0 0F1 0B0 0B1", "0OFFLOAD0 before 0F0"),
        ("0F0 0RELOAD0 0F1 0B0 0B1", "0RELOAD0 before 0OFFLOAD0"),
        ("0F0 0OFFLOAD0 0F1 0I0 0RELOAD0 0B1 0W0", "0I0 without 0RELOAD0"),
        ("0F0 0OFFLOAD0 0RELOAD0 0OFFLOAD0 0F1 0B0 0B1", "comes twice"),
        ("0F0 0F1 0B0 0OFFLOAD0 0B1", "after the backward that needs"),
    ],
)
def test_validation_finds_what_is_wrong(first_rank: str, why: str) -> None:
    second = parse_list("1F0 1B0 1F1 1B1")
    validate([parse_list("0F0 0F1 0I0 0B1 0W0 0REDUCE"), second], Placement(2), 2)
    validate([parse_list("0F0 0OFFLOAD0 0F1 0RELOAD0 0I0 0B1 0W0"), second], Placement(2), 2)
    validate([parse_list("0F0 (0F1;0B0) 0B1 0REDUCE"), second], Placement(2), 2)
    with pytest.raises(ValueError, match=why):
        validate([parse_list(first_rank), second], Placement(2), 2)


def test_forward_only_holds_no_backward() -> None:
    with pytest.raises(ValueError, match="forward-only"):
        validate([parse_list("0F0 0B0")], Placement(1), 1, forward_only=True)


def test_table_marks_the_failing_cell() -> None:
    actions = schedules.get("1f1b", 2, 20).actions
    text = table(actions, (1, 21), context=2)
    marked = [line for line in text.splitlines() if "ERROR HERE" in line]
    assert len(marked) == 1
    assert marked[0].split() == ["21", "0F11", "1B10", "<--", "ERROR", "HERE"]
    assert len(text.splitlines()) == 8  # header, two lines of dots, 5 steps
    assert len(table(actions).splitlines()) == 41
