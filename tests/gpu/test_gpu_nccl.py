"""NCCL with one rank, which is all that one GPU allows: how groups begin, end, and say what they did. A rehearsal has
gloo in its place.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import batch_of
from place import DEVICE, ONE_RANK, REHEARSED

pytestmark = pytest.mark.gpu
BACKEND = "gloo" if REHEARSED else "nccl"


def steps(backend: str | None) -> list[float]:
    """A job of one rank, in this process."""
    import shardwright
    from shardwright import Booster
    from shardwright.plugins import HybridParallelPlugin
    from shardwright.testing import adamw, zoo

    shardwright.launch(0, 1, None, None, backend=backend, timeout=60)
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=2, precision="bf16", max_norm=1.0))
    model: Any = zoo.build("llama-causal-lm", dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    losses = []
    for step in range(3):
        batch = batch_of("llama-causal-lm", step, torch.float32, "cpu")
        result = booster.execute_pipeline(iter([batch]), model, lambda o, _: o.loss, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result["loss"]))
    return losses


def bound_to_a_device() -> None:
    """The communicator is made at once; a job that is there already is taken as it is, and can be made again."""
    device = None if REHEARSED else torch.device("cuda", 0)
    found = []
    for _ in range(2):
        dist.init_process_group(
            ONE_RANK, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=device
        )
        found.append(steps(None))
        x = torch.ones(3, device=DEVICE)
        dist.all_reduce(x)
        dist.barrier()
        assert x.tolist() == [1.0] * 3
        dist.destroy_process_group()
    assert found[0] == found[1]


def launched() -> None:
    assert steps(BACKEND)[-1] > 0
    x = torch.arange(4.0, device=DEVICE)
    out = torch.empty_like(x)
    for work in (dist.all_reduce(x, async_op=True), dist.all_gather_into_tensor(out, x, async_op=True)):
        work.wait(timedelta(seconds=30))
    assert torch.equal(out, x)
    group = dist.new_group([0], timeout=timedelta(seconds=30))
    dist.broadcast(x, 0, group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()


def recorded() -> None:
    """What collectives there were, and where they came from, is kept for the day when one hangs."""
    steps(BACKEND)
    dist.all_reduce(torch.ones(3, device=DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    raw: Any = torch._C._distributed_c10d
    dump = raw._dump_fr_trace() if REHEARSED else raw._dump_nccl_trace()
    entries = pickle.loads(dump)["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries), entries[-1:]
    dist.destroy_process_group()


def left_alone() -> None:
    """A process that ends without destroying its groups ends."""
    steps(BACKEND)


@pytest.mark.parametrize("job", [bound_to_a_device, launched, recorded, left_alone], ids=lambda job: job.__name__)
def test_one_rank(job: Any) -> None:
    """In a process of its own, which must end by itself and say nothing of leaks."""
    folder = Path(__file__).parent
    places = [str(folder), str(folder.parent / "plugins"), str(folder.parents[1])]
    code = f"import sys; sys.path[:0] = {places!r}; import test_gpu_nccl as jobs; jobs.{job.__name__}(); print('done')"
    settings = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "200", "TORCH_FR_BUFFER_SIZE": "200", "LOCAL_RANK": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "done" in run.stdout
    assert "destroy_process_group() was not called" not in run.stderr or job is left_alone
