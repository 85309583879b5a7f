"""Activations in host memory under the bare runtime: order of what ran, failures in the middle of a step, no growth."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, make_batch, reference
from torch import Tensor

from shardwright.comm.p2p import PipeComm
from shardwright.pipeline import offload, schedules
from shardwright.pipeline.planning.actions import COMPUTE, MOVES, Kind
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.runtime import PipelineError, PipelineRuntime
from shardwright.pipeline.timeline import Recorder
from shardwright.testing import run_ranks

MICROBATCHES = 7


class _Failing(ToyStage):
    """Fails in the forward of a microbatch when others are away, leaving and there again."""

    fails_at = -1

    def forward(self, received: Any, microbatch: int) -> Any:
        if microbatch == self.fails_at:
            raise KeyError("broken layer")
        return super().forward(received, microbatch)


def _compare(model: ToyModel, wanted: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert (param.grad - wanted[name]).abs().max() < 1e-10, name
        param.grad = None


def _one_rank(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    offload.SMALLEST = 16
    microbatches = make_batch(MICROBATCHES, 3)
    _, wanted = reference(microbatches, 1)
    keys = [tuple(tokens.shape) for tokens in microbatches]
    for style, checkpointing in (("gpipe", False), ("gpipe", True)):
        placement = schedules.get_placement(style, 1, 1)
        model = ToyModel()
        stage = _Failing(model, 0, 1, microbatches, checkpointing)
        runtime = PipelineRuntime(PipeComm(dist.group.WORLD), placement, [stage])
        schedule = lower(schedules.get(style, 1, MICROBATCHES), offloaded=[1.0])
        runtime.recorder = Recorder()
        runtime.run(schedule, keys)
        _compare(model, wanted)
        spans = runtime.recorder.spans()
        _check_order(spans)
        blocks = len(runtime._offload._free)
        assert blocks == MICROBATCHES - 1, "the last one is needed at once"
        for fails_at in (2, MICROBATCHES - 1):
            stage.fails_at = fails_at
            with pytest.raises(PipelineError, match="broken layer"):
                runtime.run(schedule, keys)
            assert runtime._offload.is_idle
            stage.fails_at = -1
            for param in model.parameters():
                param.grad = None
            runtime.run(schedule, keys)
            _compare(model, wanted)
        assert len(runtime._offload._free) == blocks


def _check_order(spans: Any) -> None:
    """A copy out begins as its F ends; a copy back between the two actions in front of its B."""
    compute = [span for span in spans if span.action.kind in COMPUTE]
    moves = [span for span in spans if span.action.kind in MOVES]
    assert moves
    for action, start, _, _ in moves:
        if action.kind is Kind.OFFLOAD:
            [forward] = [span for span in compute if span.action == action._replace(kind=Kind.F)]
            assert forward.end <= start
            assert not any(forward.end < other.start < start for other in compute)
        else:
            [place] = [i for i, span in enumerate(compute) if span.action == action._replace(kind=Kind.B)]
            assert compute[place - 2].end <= start <= compute[place - 1].start


def test_copies_run_beside_actions_and_survive_failures() -> None:
    run_ranks(_one_rank, 1, timeout=30)
