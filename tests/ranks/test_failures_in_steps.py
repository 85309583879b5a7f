"""A failure in a step reaches every rank with its story, the job refuses to go on, and recovers when asked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from failure_jobs import Training, batch_of, join, one_process

import shardwright
from shardwright.cluster import BrokenJobError, JobError
from shardwright.testing import run_ranks

LAYOUTS = [
    pytest.param(2, {"pp_size": 2, "num_microbatches": 4}, 1, id="pp2"),
    pytest.param(4, {"pp_size": 2, "tp_size": 2, "num_microbatches": 4}, 3, id="pp2-tp2"),
    pytest.param(4, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}, 3, id="pp2-dp2-zero1"),
    pytest.param(2, {"tp_size": 2}, 1, id="tp2"),
    pytest.param(2, {"zero_stage": 2, "num_microbatches": 2}, 1, id="dp2-zero2"),
]


def _guard(calls: list[int]) -> Any:
    """A criterion that raises when it is called the second time in a step, where it can."""

    def criterion(outputs: Any, batch: Any) -> Any:
        if outputs.loss.is_meta:  # followed before the step, on every rank
            return outputs.loss
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("a user's guard")
        return outputs.loss

    return criterion


def _fail_refuse_recover(rank: int, world: int, layout: dict[str, Any], failing: int) -> dict[str, Any]:
    join(rank, world)
    training = Training(**layout)
    part = (lambda batch: batch) if training.booster.plugin.dp_size == 1 else _share(training.booster.plugin)
    losses = [training.run(part(batch_of(0)))]
    story = ""
    if rank == failing:
        calls = [0 if layout.get("num_microbatches") else 1]
        training.criterion = _guard(calls)
    started = time.monotonic()
    try:
        training.run(part(batch_of(1)))
    except (JobError, RuntimeError, ValueError) as error:
        story = f"{type(error).__name__}: {error}"
    took = time.monotonic() - started
    training.criterion = lambda outputs, _: outputs.loss
    refused = []
    checks: list[Any] = [
        lambda: training.run(part(batch_of(1))),
        lambda: training.booster.save("nowhere", training.model, training.optimizer),
        training.optimizer.step,
    ]
    for check in checks:
        try:
            check()
        except BrokenJobError as error:
            refused.append(str(error))
    shardwright.recover()
    training.optimizer.zero_grad()
    losses += [training.run(part(batch_of(seed))) for seed in (1, 2)]
    total = [None] * world
    dist.all_gather_object(total, rank)
    return {"story": story, "took": took, "refused": refused, "losses": losses, "total": total}


def _one_rank_had_stepped(rank: int, world: int) -> str:
    join(rank, world)
    training = Training(pp_size=2, num_microbatches=2)
    training.run(batch_of(0))
    if rank == 0:
        training.optimizer.step()  # as if the failure had come later than this rank's part of the step
    dist.barrier()
    try:
        shardwright.recover()
    except BrokenJobError as error:
        return str(error)
    return ""


def test_weights_that_no_longer_fit_are_not_trained_on() -> None:
    for text in run_ranks(_one_rank_had_stepped, 2, debug="OFF", timeout=40):
        assert "rank(s) [0] had taken the optimizer step" in text


def _share(plugin: Any) -> Any:
    """This data-parallel rank's rows of a batch."""
    number, place = plugin.data_parallel

    def share(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value.chunk(number)[place] for name, value in batch.items()}

    return share


@pytest.mark.parametrize(("world", "layout", "failing"), LAYOUTS)
def test_a_failed_step_is_told_refused_and_recovered_from(world: int, layout: dict[str, Any], failing: int) -> None:
    results = run_ranks(_fail_refuse_recover, world, layout, failing, debug="OFF", timeout=60)
    expected = one_process([0, 1, 2])
    for rank, result in enumerate(results):
        assert "a user's guard" in result["story"], result["story"]
        if rank != failing:
            assert result["story"].startswith("JobError: "), result["story"]
            for part in (
                f"rank {failing} (",
                "pp=",
                "tp=",
                "step 2 of execute_pipeline",
                "criterion: raise ValueError",
            ):
                assert part in result["story"], result["story"]
            if layout.get("pp_size") == 2:
                assert "microbatch 1" in result["story"]
        assert result["took"] < 10
        assert len(result["refused"]) == 3
        for text in result["refused"]:
            assert "a user's guard" in text
            assert "shardwright.recover()" in text
        assert result["total"] == list(range(world))
        for loss, reference in zip(result["losses"], expected, strict=True):
            assert loss is None or loss == pytest.approx(reference, abs=1e-5)
    assert any(result["losses"][-1] is not None for result in results)


class _Interrupt(KeyboardInterrupt): ...


def _interrupted(rank: int, world: int) -> list[float | None]:
    join(rank, world)
    training = Training(pp_size=2, pp_style="zb", num_microbatches=4)
    losses = [training.run(batch_of(0))]
    calls = [0]

    def criterion(outputs: Any, _: Any) -> Any:
        calls[0] += not outputs.loss.is_meta
        if calls[0] == 4:
            raise _Interrupt
        return outputs.loss

    training.criterion = criterion
    with pytest.raises((JobError, _Interrupt)):
        training.run(batch_of(1))
    shardwright.recover()
    training.optimizer.zero_grad()
    training.criterion = lambda outputs, _: outputs.loss
    return losses + [training.run(batch_of(seed)) for seed in (1, 2)]


def test_what_waits_in_a_step_that_is_interrupted_is_dropped() -> None:
    results = run_ranks(_interrupted, 2, debug="OFF", timeout=60)
    assert results[1] == pytest.approx(one_process([0, 1, 2]), abs=1e-5)
