"""ZeRO stage 3 rounds as stages 0 to 2 do where several layers are given one tensor: what an encoder returns, position
biases, and a weight that is the embedding of both sides and the head.
"""

from __future__ import annotations

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo

STEPS = 3


def train(rank: int, stage: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, and all weights behind the last step."""
    model = zoo.build("t5-conditional-generation", dtype=torch.float32)
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(5 + rank)
    losses = []
    for _ in range(STEPS):
        ids, labels = (torch.randint(1, 60, (2, length), generator=generator) for length in (9, 7))
        loss = boosted(input_ids=ids, labels=labels).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def compare(rank: int, world: int) -> None:
    losses, weights = train(rank, 0)
    for stage in (1, 2, 3):
        other_losses, other_weights = train(rank, stage)
        assert all(map(torch.equal, losses, other_losses)), stage
        different = [name for name, weight in weights.items() if not torch.equal(weight, other_weights[name])]
        assert not different, (stage, different)


@pytest.mark.parametrize("world", [1, 2])
def test_encoder_decoder_is_bitwise_equal(world: int) -> None:
    run_ranks(compare, world, timeout=120)
