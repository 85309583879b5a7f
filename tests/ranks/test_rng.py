"""Dropout over a tensor-parallel group: per-rank masks on shards, common masks elsewhere, the same ones when
recomputed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.shardformer.drawing_regions import make_sharded_region
from shardwright.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from shardwright.shardformer.rng import (
    sharded_rng,
    synchronize_rng,
    uses_dropout,
    without_dropout,
)
from shardwright.testing import run_ranks


class Attention(nn.Module):
    """Functional dropout on shards (eager and SDPA), functional dropout on the replicated output."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Identity(), nn.Identity()
        self.dropout = 0.3

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q = self.q_proj(x)
        eager = F.dropout(q, self.dropout, self.training)
        heads = q.view(1, 4, -1, 8)
        sdpa = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout if self.training else 0.0)
        out = self.o_proj(q)
        return {"eager": eager, "sdpa": sdpa, "out": F.dropout(out, self.dropout, self.training)}


def _equal_everywhere(x: torch.Tensor) -> bool:
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.detach().contiguous())
    return all(torch.equal(gathered[0], one) for one in gathered)


def _masks(rank: int, world: int) -> None:
    torch.manual_seed(100 + rank)
    group = dist.group.WORLD
    synchronize_rng(group)
    assert _equal_everywhere(torch.rand(5))

    attention = Attention()
    assert uses_dropout(attention)
    assert not uses_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert uses_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    for opens in ((), (attention.q_proj,)):
        attention = Attention()
        make_sharded_region(attention, group, (attention.q_proj,) if opens else (attention,), (attention.o_proj,))
        x = torch.ones(64, 32)
        first, second = attention(x), attention(x)
        assert not _equal_everywhere(first["eager"])
        assert not _equal_everywhere(first["sdpa"])
        assert _equal_everywhere(first["out"])
        assert _equal_everywhere(torch.rand(3)), "the shared stream fell out of step"
        assert not torch.equal(first["eager"], second["eager"])
        for name in ("eager", "out"):
            assert abs((first[name] == 0).double().mean() - 0.3) < 0.05
        attention.eval()
        before = torch.get_rng_state()
        attention(x)
        assert torch.equal(before, torch.get_rng_state())
    # Masks of different ranks are independent: they agree as often as chance has it.
    gathered = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(gathered, first["eager"])
    agree = ((gathered[0] == 0) == (gathered[1] == 0)).double().mean()
    assert abs(agree - (0.3**2 + 0.7**2)) < 0.05

    parallel, replicated = (
        DropoutForParallelInput.from_native_module(nn.Dropout(0.4), group),
        DropoutForReplicatedInput(0.4, False, group),
    )
    x = torch.ones(50, 20)
    assert not _equal_everywhere(parallel(x))
    assert _equal_everywhere(replicated(x))
    with sharded_rng(group).fork():
        a, b, c = parallel(x), replicated(x), F.dropout(x, 0.4)
        assert not torch.equal(a, c)
    for value, same in ((a, False), (b, True), (c, False)):
        assert _equal_everywhere(value) == same
    assert _equal_everywhere(torch.rand(3))
    assert torch.equal(parallel.eval()(x), x)

    # Recomputation draws what the forward drew: the gradient of a dropout is its mask.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            make_sharded_region(self.attention, group, (self.attention,), (self.attention.o_proj,))
            self.tail = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.attention(x.sin())
            mixed = (parts["eager"] * parts["sdpa"].reshape(x.shape) + parts["out"]).square()
            return self.tail(mixed + F.dropout(mixed, 0.2))

    blocks = nn.ModuleList([Block(), Block()])
    x = torch.randn(64, 32)
    grads = []
    for mode in (None, False, True):
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        h = leaf
        for block in blocks:
            h = block(h) if mode is None else checkpoint(block, h, use_reentrant=mode)
        h.square().sum().backward()
        grads.append(leaf.grad)
        assert not sharded_rng(group).is_open
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_masks_and_replay() -> None:
    run_ranks(_masks, 2)


def test_dropouts_are_taken_out_of_models_whose_modules_call_anything_their_config() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    model[1].config = 0.3  # Idefics keeps a number there
    assert not uses_dropout(without_dropout(model))
    assert model[1].config == 0.3
