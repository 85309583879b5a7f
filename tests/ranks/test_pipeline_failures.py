"""What happens when a rank fails in the middle of a step: it says where, and the others do not hang."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, make_batch
from torch import Tensor

from shardwright.comm.p2p import PipeComm
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.runtime import PipelineError, PipelineRuntime
from shardwright.testing import RankError, run_ranks

ERROR = "shardwright.pipeline.runtime.PipelineError"


class _Failing(ToyStage):
    """Fails in the forward of one microbatch, in one of several ways."""

    how = "raise"

    def forward(self, received: Any, microbatch: int) -> Any:
        if self.stage == 1 and microbatch == 2:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "raise":
                raise KeyError("broken layer")
            elif self.how == "shape":
                received["x"] = received["x"][:, :1]
                result = super().forward(received, microbatch)
                return {**result, "x": result["x"][:, :0]}
        if self.stage == self.num_stages - 1 and self.how == "loss":
            return super().forward(received, microbatch).expand(2)
        return super().forward(received, microbatch)


def _run(rank: int, world_size: int, how: str, style: str, chunks: int, num_steps: int = 1) -> None:
    assert dist.group.WORLD is not None
    _Failing.how = how
    placement = schedules.get_placement(style, world_size, chunks)
    microbatches: list[Tensor] = make_batch(1) * 6
    model = ToyModel()
    stages = [_Failing(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
    runtime = PipelineRuntime(PipeComm(dist.group.WORLD), placement, stages)
    schedule = lower(schedules.get(style, world_size, 6, chunks))
    for _ in range(num_steps):
        runtime.run(schedule, [tuple(tokens.shape) for tokens in microbatches])


@pytest.mark.parametrize(
    ("style", "chunks", "step"), [("1f1b", 1, "1F2"), ("zbv", 2, "1F2"), ("interleaved", 2, "1F2")]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_names_its_place_and_ends_the_others(style: str, chunks: int, step: str, world_size: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_run, world_size, "raise", style, chunks, timeout=60)
    text = str(caught.value)
    assert "rank 1 of" in text
    assert f"action {step} (stage 1, chunk 0, microbatch 2) failed on rank 1: KeyError: 'broken layer'" in text
    assert f"{step} <-- ERROR HERE" in text
    # The others have ended by themselves, with an error that points at the failing rank, before they had to be killed
    for rank in {0, 2, 3} & set(range(world_size)):
        assert f"rank {rank}: {ERROR}" in text, text


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_ends_the_others(world_size: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_run, world_size, "kill", "1f1b", 1, timeout=60)
    text = str(caught.value)
    assert "SIGKILL" in text or "signal 9" in text or "-9" in text, text
    for rank in {0, 2, 3} & set(range(world_size)):
        assert f"rank {rank}: {ERROR}" in text, text


def _message(rank: int, world_size: int, how: str) -> str:
    try:
        _run(rank, world_size, how, "1f1b", 1)
    except PipelineError as error:
        return str(error)
    return ""


def test_wrong_returns_of_a_stage_are_explained() -> None:
    assert ("must return the loss of the microbatch, a scalar tensor; it returned a tensor of shape [2]") in run_ranks(
        _message, 1, "loss"
    )[0]


def test_unlike_messages_are_refused_by_their_sender() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_run, 3, "shape", "1f1b", 1, timeout=60)
    assert "is not what the receiver expects after the earlier ones" in str(caught.value)
    assert "action 1SEND_F2 (stage 1, chunk 0, microbatch 2) failed on rank 1" in str(caught.value)
