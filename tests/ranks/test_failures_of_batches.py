"""Ranks of one replica that are given different batches are refused before they exchange anything of the wrong size."""

from __future__ import annotations

from typing import Any

import pytest
from failure_jobs import Training, batch_of, join

from shardwright.cluster import JobError
from shardwright.testing import run_ranks


def _other(batch: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "size":
        return {name: value[:2] for name, value in batch.items()}
    if how == "length":
        return {name: value[:, :-2] for name, value in batch.items()}
    if how == "dtype":
        return {**batch, "attention_mask": batch["attention_mask"].bool()}
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def _run(rank: int, world: int, layout: dict[str, Any], plain: bool, how: str, at: int) -> tuple[str, str, int]:
    """Rank 1 is given something else in step `at` (the first step has a check of its own, of the values).

    Returns the error's kind and text and the number of steps that went well.
    """
    join(rank, world)
    training = Training(**layout)
    done = 0
    try:
        for step in range(3):
            batch = batch_of(step)
            batch = _other(batch, how) if step == at and rank == 1 else batch
            training.run_plain(batch) if plain else training.run(batch)
            done += 1
    except (ValueError, JobError) as error:
        return type(error).__name__, str(error), done
    return "", "", done


CASES = [
    pytest.param({"pp_size": 2, "num_microbatches": 2}, False, "size", 1, id="pp-size"),
    pytest.param({"pp_size": 2, "num_microbatches": 2}, False, "length", 2, id="pp-length"),
    pytest.param({"tp_size": 2}, True, "size", 1, id="tp-plain-size"),
    pytest.param({"tp_size": 2}, True, "keys", 1, id="tp-plain-keys"),
    pytest.param({"tp_size": 2}, False, "dtype", 1, id="tp-dtype"),
]


@pytest.mark.parametrize(("layout", "plain", "how", "at"), CASES)
def test_other_batches_are_refused_with_both_named(layout: dict[str, Any], plain: bool, how: str, at: int) -> None:
    results = run_ranks(_run, 2, layout, plain, how, at, debug="OFF", timeout=40)
    kinds = [kind for kind, _, _ in results]
    assert "ValueError" in kinds
    for kind, text, done in results:
        assert kind in ("ValueError", "JobError"), results
        assert "must be given the same batch" in text
        assert f"in step {at + 1}" in text
        assert done == at
    whole = next(text for kind, text, _ in results if kind == "ValueError")
    assert "rank 0 has " in whole
    assert "rank 1 has " in whole


def _raise_alike(rank: int, world: int) -> list[str]:
    """The same mistake on all ranks breaks nothing."""
    join(rank, world)
    training = Training(pp_size=2, num_microbatches=2)
    seen = []
    for mistake in ([batch_of(0)], iter(())):
        try:
            training.booster.execute_pipeline(mistake, training.model, training.criterion, training.optimizer)  # type: ignore[arg-type]
        except Exception as error:
            seen.append(type(error).__name__)
    assert not {"JobError", "BrokenJobError"}.intersection(seen)
    training.run(batch_of(0))
    return seen


def test_a_mistake_of_all_ranks_breaks_nothing() -> None:
    for seen in run_ranks(_raise_alike, 2, timeout=40):
        assert len(seen) == 2
        assert seen[0] == "ValueError"
