"""What is sent, and when, as recorded on the way of a GPU: reductions leave while backward goes on, updated weights
while the step ends, units before those in front of them compute, messages before what can hide them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, make_batch
from torch import Tensor, nn

from shardwright import Booster
from shardwright.cluster import ParallelMesh
from shardwright.comm.p2p import PipeComm
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import COMPUTE, Kind
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import Costs, simulate
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks
from shardwright.testing.call_order import CallRecorder, Launch, Mark, Waited, check_order
from shardwright.testing.stream_model import StreamModel
from shardwright.utils.streams import modelled

LAYERS, BUCKETS = 6, 12  # a weight or a bias each
MICROBATCHES = 6


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _names(recorder: CallRecorder) -> list[str]:
    return [
        event.what if isinstance(event, Mark) else event.kind
        for event in recorder.events
        if not isinstance(event, Waited)
    ]


def _third_step(rank: int, world: int, **options: Any) -> list[str]:
    """Names of calls and marks in a step that knows the order of the units, and until the forward of the next."""
    plugin = LowLevelZeroPlugin(precision="fp32", reduce_bucket_size_in_m=0.0001, **options)
    booster, model = Booster(plugin=plugin), _Chain()
    layers, params = list(model.layers), list(model.parameters())
    with modelled(StreamModel()), CallRecorder() as recorder:
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: recorder.mark("layer"))
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _: recorder.mark("gradient"))
        for step in range(4):
            recorder.mark("forward")
            if step == 3:
                break
            if step == 2:
                recorder.events[:-1] = []
            loss = model(torch.randn(3 + rank, 12)).square().sum()
            recorder.mark("backward")
            booster.backward(loss, optimizer)
            recorder.mark("step")
            optimizer.step()
            optimizer.zero_grad()
        optimizer.gatherer.wait()
    return _names(recorder)


def _zero(rank: int, world: int) -> dict[int, list[str]]:
    return {
        1: _third_step(rank, world, stage=1, overlap_allgather=True),
        2: _third_step(rank, world, stage=2, overlap_allgather=True),
        3: _third_step(rank, world, stage=3),
    }


def _check_reductions(names: list[str], count: int) -> None:
    """Each but the last leaves while gradients of a later bucket are still to come."""
    during = names[names.index("backward") : names.index("step")]
    reductions = [place for place, name in enumerate(during) if name == "reduce_scatter_base"]
    assert len(reductions) == count, during
    for this, following in pairwise(reductions):
        assert "gradient" in during[this:following], "a bucket waits for the one behind it"


def _check_units(names: list[str]) -> None:
    """While a layer computes the weights of the next one are on their way."""
    forward = names[: names.index("backward")]
    layers = [place for place, name in enumerate(forward) if name == "layer"]
    for number, place in enumerate(layers):
        assert forward[:place].count("allgather_base") >= min(number + 2, LAYERS), forward
    backward = names[names.index("backward") : names.index("step")]
    gathered = [place for place, name in enumerate(backward) if name == "allgather_base"]
    reduced = [place for place, name in enumerate(backward) if name == "reduce_scatter_base"]
    for number, place in enumerate(gathered):  # the last layer has stayed
        assert place < reduced[number], "the weights of a layer come before the gradients of the one behind it leave"


def test_zero_overlaps() -> None:
    for steps in run_ranks(_zero, 2, debug="OFF"):
        for stage, names in steps.items():
            _check_reductions(names, LAYERS if stage == 3 else BUCKETS)
            if stage == 3:
                _check_units(names)
                continue
            updated = names[names.index("step") :]
            assert updated.count("allgather_base") == BUCKETS, "they leave in the step, before the next forward"
            assert updated[-1] == "forward"
            assert "allgather_base" not in names[: names.index("step")]


def _pipeline(rank: int, world: int, style: str, chunks: int) -> tuple[list[str], list[Launch]]:
    """Actions and calls of a step whose messages have no headers."""
    assert dist.group.WORLD is not None
    placement = schedules.get_placement(style, world, chunks)
    microbatches, model = make_batch(MICROBATCHES), ToyModel()
    stages = [ToyStage(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
    groups = ParallelMesh(pp=world).message_groups(placement.channels)
    with modelled(StreamModel()):
        runtime = PipelineRuntime(PipeComm(dist.group.WORLD, groups), placement, stages)
        keys = [tuple(tokens.shape) for tokens in microbatches]
        schedule = lower(schedules.get(style, world, MICROBATCHES, chunks))
        runtime.run(schedule, keys)
        recorder = CallRecorder()
        for kind, handler in runtime._handlers.items():
            runtime._handlers[kind] = _marked(recorder, kind, handler)
        with recorder:
            runtime.run(schedule, keys)
    return _names(recorder), recorder.launches


def _marked(recorder: CallRecorder, kind: Kind, handler: Any) -> Any:
    def run(stage: int, microbatch: int) -> None:
        recorder.mark(f"{kind.name} {stage} {microbatch}")
        handler(stage, microbatch)

    return run


STYLES = (("1f1b", 1), ("zbv", 2), ("interleaved", 2))


def _pipelines(rank: int, world: int) -> list[tuple[list[str], list[Launch]]]:
    return [_pipeline(rank, world, *style) for style in STYLES]


def test_messages_leave_before_what_can_hide_them() -> None:
    results = run_ranks(_pipelines, 2, debug="OFF")
    for (style, chunks), *of_ranks in zip(STYLES, *results, strict=True):
        check_order([launches for _, launches in of_ranks])
        schedule = lower(schedules.get(style, 2, MICROBATCHES, chunks))
        for rank, (names, _) in enumerate(of_ranks):
            actions = list(schedule.actions[rank])
            assert [name for name in names if name not in ("send", "recv")] == [
                f"{action.kind.name} {action.stage} {action.microbatch}" for action in actions
            ]
            for before, name in pairwise(names):  # posted by the action itself, and by no computation
                assert name not in ("send", "recv") or before[:4].lower() == name or before == name
            _check_places(actions)
        _check_hidden(style, chunks)


def _check_places(actions: list[Any]) -> None:
    """Nothing is computed between what makes a message and its SEND."""
    for place, action in enumerate(actions):
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            made = next(other for other in reversed(actions[:place]) if other.kind in COMPUTE)
            assert made[1:] == action[1:], f"{made} stands before {action}"


def _check_hidden(style: str, chunks: int) -> None:
    """A RECV stands before the computation in front of the one that needs it, unless what it brings is made later."""
    plain = schedules.get(style, 2, MICROBATCHES, chunks)
    simulation, lowered = simulate(plain, Costs(transfer=1 / 16)), lower(plain)
    made = {span.action: span.end for spans in simulation.spans for span in spans}
    for rank, spans in enumerate(simulation.spans):
        actions, ends = list(lowered.actions[rank]), {span.action: span.end for span in spans}
        for place, action in enumerate(actions):
            if action.kind not in (Kind.RECV_F, Kind.RECV_B):
                continue
            forward = action.kind is Kind.RECV_F
            kinds = (Kind.F,) if forward else (Kind.B, Kind.I)
            following = [other for other in actions[place:] if other.kind in COMPUTE]
            if following[0].kind in kinds and following[0][1:] == action[1:]:
                earlier = [other for other in actions[:place] if other.kind in COMPUTE]
                source = action.stage - 1 if forward else action.stage + 1
                end = max(made.get(action._replace(kind=kind, stage=source), 0.0) for kind in kinds)
                assert not earlier or end >= ends[earlier[-1]], f"{action} could have come while {earlier[-1]} ran"
