"""A measured step: spans of every action of every rank, gathered without pickle."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from pipeline_toy import ToyModel, ToyStage, make_batch

from shardwright.cluster import ParallelMesh
from shardwright.comm.p2p import PipeComm
from shardwright.pipeline import schedules
from shardwright.pipeline.clocks import ahead_of_first
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.pipeline.timeline import Recorder
from shardwright.testing import run_ranks


class _Slow(ToyStage):
    def forward(self, received: Any, microbatch: int) -> Any:
        time.sleep(0.02)
        return super().forward(received, microbatch)


def _measured(rank: int, world_size: int) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    placement = schedules.get_placement("zbv", world_size, 2)
    microbatches = make_batch(5)
    model = ToyModel()
    stages = [_Slow(model, s, placement.num_stages, microbatches) for s in placement.stages_of(rank)]
    groups = ParallelMesh(pp=world_size).message_groups(placement.channels)  # no collective among the messages
    runtime = PipelineRuntime(PipeComm(dist.group.WORLD, groups), placement, stages)
    schedule = lower(schedules.get("zbv", world_size, 5, 2))
    runtime.recorder = Recorder()
    for _ in range(2):  # the second step has no headers
        runtime.run(schedule, [tuple(tokens.shape) for tokens in microbatches])
    timeline = runtime.recorder.gather(runtime.comm, placement)
    for actions, spans in zip(schedule.actions, timeline.ranks, strict=True):
        assert [span.action for span in spans] == actions
        ends = [0.0]
        for _, start, ready, end in spans:
            assert ends[-1] <= start <= ready <= end
            ends.append(end)
    costs = timeline.mean_costs()
    assert min(costs.forward) >= 0.02  # type: ignore[type-var, arg-type]
    ideal = timeline.ideal()
    assert ideal.makespan <= timeline.makespan
    skew = 1000.0 - 7 * rank  # as if every rank were on a machine of its own
    ahead = ahead_of_first(runtime.comm.group, runtime.comm.device, lambda: time.perf_counter() + skew, machine=rank)
    assert abs(ahead - -7 * rank) < 0.05
    assert ahead_of_first(runtime.comm.group, runtime.comm.device) == 0.0
    return {"bubble": timeline.bubble, "ideal": ideal.bubble, "summary": timeline.summary()}


def test_measured_steps_are_gathered_on_every_rank() -> None:
    results = run_ranks(_measured, 3, timeout=60)
    assert results[0] == results[1] == results[2]
    assert 0 <= results[0]["ideal"] <= results[0]["bubble"] + 0.02 < 1
    assert "bubble" in results[0]["summary"]
