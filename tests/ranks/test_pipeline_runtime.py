"""The runtime on real rank processes: every schedule against one process, and all schedules against one another."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, layers_of, make_batch, reference
from torch import Tensor, nn

from shardwright.comm.p2p import PipeComm
from shardwright.ops.weight_grad import WeightGradStore
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import simulate
from shardwright.pipeline.runtime import Part, PipelineRuntime
from shardwright.testing import run_ranks

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb", 1), ("zbv", 2), ("dualpipev", 2)]


def shape_keys(microbatches: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tokens.shape) for tokens in microbatches]


def own_gradients(model: ToyModel, runtime: PipelineRuntime, rank: int) -> dict[str, Tensor]:
    """Gradients of the parameters that this rank's stages hold; all others must have none."""
    placement = runtime.placement
    held = {i for stage in placement.stages_of(rank) for i in layers_of(stage, placement.num_stages)}
    gradients = {}
    for name, param in model.named_parameters():
        part, _, rest = name.partition(".")
        stage = {"embed": 0, "head": placement.num_stages - 1}.get(part)
        mine = placement.rank_of(stage) == rank if stage is not None else int(rest.split(".")[0]) in held
        assert (param.grad is not None) == mine, name
        if param.grad is not None:
            gradients[name] = param.grad
    return gradients


class ToldGradients:
    """What a reduction is told, in order."""

    def __init__(self) -> None:
        self.prompt: tuple[nn.Parameter, ...] = ()
        self.calls: list[tuple[str, int, tuple[Part, ...], bool]] = []

    def begin(self, chunk: int, parts: Any, last: bool, of: Any) -> None:
        self.calls.append(("begin", chunk, tuple(parts), last))

    def end(self, chunk: int, parts: Any, last: bool) -> None:
        self.calls.append(("end", chunk, tuple(parts), last))

    def finish(self) -> None:
        self.calls.append(("finish", -1, (), True))

    def check(self, microbatches: int, chunks: int, where: str) -> None:
        assert self.calls.pop() == ("finish", -1, (), True), where
        expected = [("begin", False), ("end", False)] * (microbatches - 1) + [("begin", True), ("end", True)]
        for chunk, part in itertools.product(range(chunks), Part):
            mine = [(kind, last) for kind, of, parts, last in self.calls if of == chunk and part in parts]
            assert mine == expected, where
        # nothing else comes between the begin of parts and their end
        assert self.calls[0::2] == [("begin", *rest) for _, *rest in self.calls[1::2]], f"{where}: {self.calls}"


def _adds_alike() -> bool:
    """Whether this processor's `addmm` gives the bits of a product and a sum."""
    generator = torch.Generator().manual_seed(0)
    one, two, into = (torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    return torch.equal(torch.addmm(into, one, two), into + one @ two)


ADDS_ALIKE = _adds_alike()


def _every_schedule(rank: int, world_size: int, counts: list[int], switches: int) -> int:
    """`switches`: how many of the four settings each number of microbatches runs with; they take turns. Returns the
    number compared.
    """
    assert dist.group.WORLD is not None
    keep_linears_alike = WeightGradStore()  # so that linears take one path, and results can be compared bit by bit
    compared = 0
    first: dict[tuple[int, str, str], Tensor] = {}
    references = {m: reference(make_batch(m, m), 1) for m in counts}
    for style, chunks in CASES:
        placement = schedules.get_placement(style, world_size, chunks)
        comm = PipeComm(dist.group.WORLD)
        model = ToyModel()
        turns = itertools.cycle(SWITCHES)
        for m, (checkpointing, overlap) in ((m, next(turns)) for m in counts for _ in range(switches)):
            where = f"{style} chunks={chunks} m={m} checkpointing={checkpointing} overlap={overlap}"
            microbatches = make_batch(m, m)
            model.zero_grad()
            for layer in model.layers:
                layer.calls = 0
            stages = [
                ToyStage(model, s, placement.num_stages, microbatches, checkpointing) for s in placement.stages_of(rank)
            ]
            told = ToldGradients()
            runtime = PipelineRuntime(comm, placement, stages, reduction=told)
            schedule = schedules.get(style, world_size, m, chunks)
            result = runtime.run(lower(schedule, overlap=overlap), shape_keys(microbatches), overlap=overlap)

            loss, gradients = references[m]
            if placement.rank_of(placement.num_stages - 1) == rank:
                assert len(result.losses) == m
                assert abs(sum(result.losses).item() - loss) < 1e-10, where
            else:
                assert result.losses == []
            for name, gradient in own_gradients(model, runtime, rank).items():
                assert torch.allclose(gradient, gradients[name], rtol=1e-10, atol=1e-10), (where, name)
                # Microbatches add up in the same order whatever the schedule, so not a bit may differ, except where the
                # processor rounds a product that is added at once in another way than a product and a sum.
                among = "" if ADDS_ALIKE or not schedules.splits_backward(style) else style
                same = first.setdefault((m, name, among), gradient.clone())
                assert torch.equal(gradient, same), (where, name)
            told.check(m, chunks, where)
            assert result.peak_live == simulate(schedule).peak_live[rank], where
            for stage in stages:
                # Once per microbatch, and exactly once more where it is recomputed
                assert all(layer.calls == m * (2 if checkpointing else 1) for layer in stage.layers), where
            compared += 1

            if not checkpointing:  # evaluation between training steps, of another size
                evaluation = make_batch(m + 1, m + 1)
                for stage in stages:
                    stage.microbatches, stage.tokens = evaluation, sum(tokens.numel() for tokens in evaluation)
                forward = lower(schedules.get(style, world_size, m + 1, chunks, forward_only=True), overlap=overlap)
                result = runtime.run(forward, shape_keys(evaluation), overlap=overlap)
                assert result.peak_live == 0
                if result.losses and m + 1 in references:
                    assert abs(sum(result.losses).item() - references[m + 1][0]) < 1e-10, where
                    assert not any(loss.requires_grad for loss in result.losses)
    assert len(keep_linears_alike) == 0
    return compared


SWITCHES = list(itertools.product((False, True), (False, True)))


def run_every_schedule(ranks: int, counts: list[int], switches: int) -> None:
    assert (
        run_ranks(_every_schedule, ranks, counts, switches, timeout=110)
        == [len(CASES) * len(counts) * switches] * ranks
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule(ranks: int) -> None:
    run_every_schedule(ranks, [*range(1, 10)], 1)


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "counts"), [(2, [*range(1, 10)]), (4, [1, 2, 3, 4, 5]), (4, [6, 7, 8, 9])])
def test_every_schedule_with_all_switches(ranks: int, counts: list[int]) -> None:
    run_every_schedule(ranks, counts, len(SWITCHES))


def test_one_rank_is_a_pipeline_too() -> None:
    run_every_schedule(1, [1, 3], len(SWITCHES))


def _memory(rank: int, world_size: int, style: str, chunks: int) -> int:
    """Most tensors of a boundary's size alive at once on this rank, after many microbatches."""
    assert dist.group.WORLD is not None
    placement = schedules.get_placement(style, world_size, chunks)
    peaks = []
    for m in (8, 32):
        microbatches = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(m)]
        model = ToyModel()
        stages = [_Counting(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
        runtime = PipelineRuntime(PipeComm(dist.group.WORLD), placement, stages)
        runtime.run(lower(schedules.get(style, world_size, m, chunks)), shape_keys(microbatches))
        peaks.append(_Counting.peak)
        _Counting.peak = 0
        assert all(not pending for pending in runtime.comm._in_flight.values())
        del runtime, stages
    assert peaks[1] <= peaks[0] * 1.25, peaks
    return peaks[1]


class _Counting(ToyStage):
    """Counts living tensors of the size of a boundary."""

    peak = 0

    def forward(self, received: Any, microbatch: int) -> Any:
        if microbatch % 4 == 3:
            alive = sum(1 for thing in gc.get_objects() if type(thing) is Tensor and tuple(thing.shape) == (2, 3, 5))
            _Counting.peak = max(_Counting.peak, alive)
        return super().forward(received, microbatch)


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_memory_does_not_grow_with_microbatches(style: str, chunks: int) -> None:
    run_ranks(_memory, 2, style, chunks, timeout=100)


def _injected(rank: int, world_size: int) -> None:
    """A loss scaler's backward, frozen parameters, and errors of wrong use before anything is sent."""
    assert dist.group.WORLD is not None
    comm = PipeComm(dist.group.WORLD)
    placement = schedules.get_placement("zbv", world_size, 2)
    microbatches = make_batch(4)
    model = ToyModel()
    model.embed.requires_grad_(False)
    for layer in model.layers[:4]:  # all of stage 0 and a part of stage 1
        layer.requires_grad_(False)
    calls: list[str] = []

    def backward(loss: Tensor) -> None:
        calls.append("loss")
        (loss * 8).backward()

    def backward_by_grad(tensors: Any, grads: Any) -> None:
        calls.append("grad")
        torch.autograd.backward(tensors, grads)

    stages = [ToyStage(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
    runtime = PipelineRuntime(comm, placement, stages, backward=backward, backward_by_grad=backward_by_grad)
    schedule = lower(schedules.get("zbv", world_size, 4, 2))
    with pytest.raises(ValueError, match="3 shape keys for a schedule of 4 microbatches"):
        runtime.run(schedule, [0, 1, 2])
    with pytest.raises(ValueError, match="the schedule is for"):
        runtime.run(lower(schedules.get("1f1b", world_size, 4)), shape_keys(microbatches))
    with pytest.raises(ValueError, match="programs for 2 chunks"):
        PipelineRuntime(comm, placement, stages[:1])
    runtime.run(schedule, shape_keys(microbatches))
    _, gradients = reference(microbatches, 1)
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(param.grad, gradients[name] * 8, rtol=1e-10, atol=1e-10)
    # Stage 0 is frozen: nothing to run backward there.
    assert calls == (["loss"] * 4 if rank == 0 else ["grad"] * 8)


def test_backward_can_be_replaced_and_stages_frozen() -> None:
    run_ranks(_injected, 2, timeout=60)


def _steady(rank: int, world_size: int) -> list[int]:
    """Headers received in each of five steps, the last of which has new shapes."""
    assert dist.group.WORLD is not None
    placement = schedules.get_placement("interleaved", world_size, 2)
    comm = PipeComm(dist.group.WORLD)
    received = []
    original = comm._receive_header

    def counting(*args: Any) -> Any:
        received[-1] += 1
        return original(*args)

    comm._receive_header = counting  # type: ignore[method-assign]
    model = ToyModel()
    for seed in (0, 0, 0, 0, 1):
        microbatches = make_batch(6, seed)
        received.append(0)
        stages = [ToyStage(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
        PipelineRuntime(comm, placement, stages).run(
            lower(schedules.get("interleaved", world_size, 6, 2)), shape_keys(microbatches)
        )
    return received


def test_headers_travel_once_per_shape() -> None:
    shapes = len(set(shape_keys(make_batch(6, 0))))
    for counts in run_ranks(_steady, 2, timeout=60):
        assert counts[1:4] == [0, 0, 0]
        assert counts[0] in (shapes, 2 * shapes)  # rank 0 receives into one stage, rank 1 into two
        assert counts[4] > 0
