"""What a plan of GPUs leaves out of their memory: what lies in that of the host."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.lazy import LazyInitContext
from shardwright.lazy.weights import LazyWeights
from shardwright.planner.fakes import Fakes, is_fake
from shardwright.planner.live_bytes import LiveBytes
from shardwright.planner.replay import Job, replay
from shardwright.plugins import HybridParallelPlugin
from shardwright.utils.device import planning_for
from shardwright.utils.streams import host_memory

CPU = torch.device("cpu")


def test_host_memory_and_what_is_made_of_it_do_not_count() -> None:
    with Fakes(), LiveBytes(host=False) as live:
        on_device = torch.zeros(1000)
        room = host_memory((500,), torch.float32, CPU)
        room.copy_(on_device[:500])
        state = torch.zeros_like(room)
        assert live.bytes() == live.most == 4000
        back = torch.empty(500)
        back.copy_(room * state)
        mixed = back + room
        assert live.bytes() == live.most == sum(live.holdings().values()) == 8000
    del mixed


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 256), nn.Linear(256, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.table(ids))
        return scores


def reader() -> Reader:
    with LazyInitContext():
        return Reader()


def test_masters_and_states_that_lie_on_the_host_are_not_in_the_peak_of_a_gpu() -> None:
    def peak(offload: bool) -> tuple[int, int]:
        job = Job(
            lambda: HybridParallelPlugin(zero_stage=1, precision="bf16", cpu_offload=offload),
            reader,
            lambda model: torch.optim.AdamW(model.parameters(), fused=True),
            {"ids": torch.arange(8).view(2, 4)},
        )
        with planning_for("cuda"):
            ((_, kept, most, *_),) = replay(job, world_size=1)
        return kept, most

    kept, most = peak(offload=False)
    away = 3 * 4 * 2 * 64 * 256  # masters and two states
    assert peak(offload=True) == (kept - away, most - away)


class Scaled(nn.Module):
    """As CLIP, with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))


def test_parameters_of_a_single_number_have_no_memory_either() -> None:
    with LazyInitContext():
        model = Scaled()
    weights = LazyWeights.of(model)
    assert weights is not None
    with Fakes():
        assert weights.materialize(model) == 1
        assert is_fake(model.scale)
        assert model.scale.shape == ()
        model.scale.data = torch.empty(3)[1].view(())  # as buckets do
        model.scale.grad = torch.empty(3)[1].view(())
    with LazyInitContext():
        model = Scaled()
    weights = LazyWeights.of(model)
    assert weights is not None
    weights.materialize(model)
    assert model.scale.shape == ()
    assert model.scale.item() == 2.5
