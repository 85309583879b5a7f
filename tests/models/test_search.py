"""Searching what holds together: as few tries as there is to find out, whatever the number of layers."""

from __future__ import annotations

import logging

import pytest

from shardwright.shardformer import search
from shardwright.shardformer.hf_plan import Proposal
from shardwright.shardformer.rules import Rules


def layers(number: int) -> list[Proposal]:
    """Of each an attention that holds in its second way, and an MLP that holds at once."""
    found = []
    for place in range(number):
        first, second = {f"{place}.attention": "wrong"}, {f"{place}.attention": "right"}
        found.append(Proposal(f"{place}.attention", [first, second], "Attention"))
        found.append(Proposal(f"{place}.mlp", [{f"{place}.mlp": "right"}], "MLP"))
    return found


def searched(
    proposals: list[Proposal], overlap: bool = False, wrong: str = "wrong"
) -> tuple[search.Search, Rules, int]:
    tries = 0

    def tried(rules: Rules, more: Rules) -> Rules | None:
        nonlocal tries
        tries += 1
        together = {**rules, **more}
        return None if wrong in together.values() else together

    found = search.Search(tried, "Net", overlap)
    return found, found.grown({}, proposals), tries


def test_the_first_of_a_kind_speaks_for_all() -> None:
    few, rules, tries = searched(layers(3))
    assert set(rules.values()) == {"right"}
    assert len(rules) == len(few.kept) == 6
    assert searched(layers(40))[2] == tries <= 5
    some, rules, tries = searched(layers(40), wrong="right")  # no MLP holds, attentions do at once
    assert set(rules) == {f"{place}.attention" for place in range(40)}
    assert len(some.failed) == 40
    assert tries <= 8


def test_what_is_wrong_is_found_by_halves() -> None:
    proposals = [Proposal(str(place), [{str(place): "wrong" if place == 11 else "right"}]) for place in range(64)]
    found, rules, tries = searched(proposals)
    assert [each.name for each in found.failed] == ["11"]
    assert len(rules) == 63
    assert tries <= 14


def test_one_module_in_two_proposals() -> None:
    inner, outer = Proposal("inner", [{"a": "right"}]), Proposal("outer", [{"a": "other", "b": "right"}])
    assert searched([inner, outer], overlap=True)[1] == {"a": "other", "b": "right"}
    assert searched([inner, outer], overlap=False)[1] == {"a": "right"}


def test_a_long_search_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(search, "LONG", 0.0)
    with caplog.at_level(logging.WARNING):
        searched(layers(2))
    assert "Net: 1 plans were tried on a small copy in 0 s, and the search goes on" in caplog.text
