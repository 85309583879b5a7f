"""ZeRO and pipelines under the model of CUDA's streams: nothing is read, written or let go of without an order, and the
numbers are those of one process on the way that a GPU takes. What waits too little is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, make_batch
from pipeline_toy import reference as toy_reference
from test_zero import TINY_BUCKET, assert_same
from test_zero_plugin import boosted_run
from torch import Tensor, nn
from zero_cases import Model, Plan, adamw, batch, loss_of, reference

from shardwright import Booster
from shardwright.cluster import ParallelMesh
from shardwright.comm.p2p import PipeComm
from shardwright.pipeline import offload, schedules
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks
from shardwright.testing.calls import Call
from shardwright.testing.stream_model import Stream, StreamModel
from shardwright.zero.bucket import ScratchPool
from shardwright.zero.gather import ParamGatherer
from shardwright.zero.reducer import GradReducer

EXACT = Plan(torch.float64, max_norm=0.3, accumulation=2, steps=2, sometimes=True)
OVERLAPPED: dict[str, Any] = {"overlap_allgather": True}


class _Deaf(StreamModel):
    """Streams here do not wait for calls of these kinds."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self._unheard = kinds

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> Any:
        return call.kind, super().called(call, reads, writes)

    def waited(self, token: Any) -> None:
        if token[0] not in self._unheard:
            super().waited(token[1])


def _in_order(rank: int, world: int) -> None:
    expected = reference(EXACT)
    for options in ({"stage": 1, **OVERLAPPED}, {"stage": 2, **OVERLAPPED}, {"stage": 3}):
        with StreamModel() as model:
            trace = boosted_run(EXACT, rank, world, precision="fp32", **options)
        assert_same(trace, expected, 1e-10, str(options))
        model.check()
    for options in (
        {"stage": 1, "cpu_offload": True, **OVERLAPPED},
        {"stage": 2, "communication_dtype": torch.bfloat16, **OVERLAPPED},
        {"stage": 2, "fp8_communication": True, "cpu_offload": True},
        {"stage": 3, "cpu_offload": True},
    ):
        with StreamModel() as model:
            _train(rank, world, max_norm=0.3, **options)
        model.check()
    _pipelines_in_order(rank, world)


def _pipelines_in_order(rank: int, world: int) -> None:
    for style, chunks, broken in (("zbv", 2, False), ("1f1b", 1, False), ("1f1b", 1, True)):
        with _Deaf("recv") if broken else StreamModel() as model:
            _pipeline(rank, world, style, chunks, check=not broken)
        assert broken == bool(model.hazards), model.hazards
        assert not broken or any(hazard.kind == "read" for hazard in model.hazards)


def _pipeline(rank: int, world: int, style: str, chunks: int, check: bool) -> None:
    offload.SMALLEST = 16
    assert dist.group.WORLD is not None
    placement = schedules.get_placement(style, world, chunks)
    microbatches = make_batch(5)
    keys = [tuple(tokens.shape) for tokens in microbatches]
    model = ToyModel()
    stages = [ToyStage(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
    groups = ParallelMesh(pp=world).message_groups(placement.channels)
    runtime = PipelineRuntime(PipeComm(dist.group.WORLD, groups), placement, stages)
    schedule = lower(schedules.get(style, world, 5, chunks), offloaded=[1.0] * placement.num_stages)
    wanted = toy_reference(microbatches, placement.num_stages)[1]
    for _ in range(2):  # the second step has no headers
        model.zero_grad()
        runtime.run(schedule, keys)
    for name, param in model.named_parameters():
        if check and param.grad is not None:
            assert (param.grad - wanted[name]).abs().max() < 1e-10, name


def _train(rank: int, world: int, **options: Any) -> None:
    """Three steps; nothing is read in between that would wait for what the loop forgets."""
    plugin = LowLevelZeroPlugin(precision="bf16", reduce_bucket_size_in_m=TINY_BUCKET, **options)
    booster, model = Booster(plugin=plugin), Model()
    model, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(3):
        booster.backward(loss_of(model, batch(step, 0).chunk(world)[rank], step != 1), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def _found(rank: int, world: int, options: dict[str, Any], model: StreamModel | None = None) -> set[str]:
    """Kinds of what is found in a short run."""
    with model or StreamModel() as model:
        _train(rank, world, **options)
    return {hazard.kind for hazard in model.hazards}


def _offloaded(rank: int) -> set[str]:
    """Where every parameter has a gradient, so that the host reads nothing that would wait for them all."""
    booster, model = Booster(plugin=LowLevelZeroPlugin(precision="bf16", stage=1, cpu_offload=True)), nn.Linear(8, 8)
    with StreamModel() as streams:
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            booster.backward(model(torch.ones(2, 8) + rank).square().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return {hazard.kind for hazard in streams.hazards}


@contextmanager
def _broken(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _never_waits(reducer: GradReducer) -> Any:
    return reducer._streams.stream(reducer._stream)


def _without_event(pool: ScratchPool, buffer: Tensor) -> None:
    _give_back(pool, buffer)
    pool._free[-1] = pool._free[-1][0], None


def _without_waiting(gatherer: ParamGatherer, buckets: Any = None) -> None:
    streams = gatherer._streams
    gatherer._streams = SimpleNamespace(current_stream=lambda: SimpleNamespace(wait_event=lambda event: None))
    _wait(gatherer, buckets)
    gatherer._streams = streams


_give_back, _wait = ScratchPool.give_back, ParamGatherer.wait


def _out_of_order(rank: int, world: int) -> dict[str, set[str]]:
    """What is found where something waits too little, by what that is."""
    second: dict[str, Any] = {"stage": 2}
    found = {}
    assert not _offloaded(rank)
    with _broken(GradReducer, "_wait_stream", lambda reducer: None):
        found["optimizer for sums"] = _found(rank, world, second)
    with _broken(GradReducer, "_on_stream", _never_waits):
        found["reductions for gradients"] = _found(rank, world, second)
    with _broken(ScratchPool, "give_back", _without_event):
        found["buffers for their last use"] = _found(rank, world, second)
    with _broken(ParamGatherer, "wait", _without_waiting):
        found["modules for weights"] = _found(rank, world, {"stage": 1, **OVERLAPPED})
    with _broken(Stream, "synchronize", lambda stream: None):
        found["the host for gradients"] = _offloaded(rank)
    found["units for weights"] = _found(rank, world, {"stage": 3}, _Deaf("allgather_base"))
    return found


def test_zero_and_pipelines_are_in_order() -> None:
    run_ranks(_in_order, 2, timeout=100, debug="OFF")


def test_what_waits_too_little_is_found() -> None:
    found: dict[str, set[str]] = {}
    for of_rank in run_ranks(_out_of_order, 2, timeout=100, debug="OFF"):
        for name, kinds in of_rank.items():
            found[name] = found.get(name, set()) | kinds
    assert "write" in found["optimizer for sums"]
    assert "read" in found["reductions for gradients"]
    assert "write" in found["buffers for their last use"]
    assert "read" in found["modules for weights"]
    assert "write" in found["the host for gradients"]  # the kernel writes back what it has scaled
    assert {"read", "free"} <= found["units for weights"]
