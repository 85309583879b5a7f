"""Dropout over data-parallel ranks and pipeline stages: every place draws its own masks, and scripts the same
numbers everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks


def masks_of_a_step(rank: int, world_size: int, layout: dict[str, Any]) -> list[torch.Tensor]:
    """The masks of all residual dropouts of one step."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.5,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=1, **layout))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    masks: list[torch.Tensor] = []
    dropout = F.dropout

    def recorded(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        y = dropout(x, p, training, inplace)
        if p and training and not x.is_meta:  # the forward is tried without data first
            masks.append(y == 0)
        return y

    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", recorded)
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    same = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(same, torch.rand(3))
    assert torch.equal(same[0], same[1]), "what scripts draw fell out of step"
    return masks


def both(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    return [masks_of_a_step(rank, world_size, layout) for layout in ({"pp_size": 2, "num_microbatches": 1}, {})]


def test_places_have_masks_of_their_own():
    first, second = run_ranks(both, 2)
    for mine, others in zip(first, second, strict=True):
        assert mine
        assert len(mine) == len(others)
        for one, other in zip(mine, others, strict=True):
            assert abs((one == other).double().mean() - 0.5) < 0.12
