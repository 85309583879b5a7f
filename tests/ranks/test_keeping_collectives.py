"""Selective recomputation of sharded blocks: no collective runs twice, and the gradients are those of the whole
block.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import CountCollectives
from torch import nn

from shardwright.ops.collective import (
    all_to_all_in_group,
    copy_to_group,
    gather_for_shards,
    gather_from_group,
    reduce_from_group,
)
from shardwright.ops.keeping import Selection
from shardwright.ops.linear import column_linear, row_linear
from shardwright.pipeline.checkpointing import run_checkpointed, run_selectively
from shardwright.pipeline.saved_bytes import measure
from shardwright.testing import run_ranks

HIDDEN, INNER, TOKENS = 8, 12, 6


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 3) for shape in ((INNER, HIDDEN), (HIDDEN, INNER)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + torch.tanh(F.linear(torch.sin(F.linear(self.norm(x), self.up)), self.down))
        return x


class Sharded(Whole):
    """`how` the halves meet: in place, in parts along the tokens, by a copy, or by an all-reduce that a script calls
    itself.
    """

    def __init__(self, whole: Whole, group: Any, how: str) -> None:
        nn.Module.__init__(self)
        self.norm, self.group, self.how = whole.norm, group, how
        n, k = group.size(), group.rank()
        self.up, self.down = (
            nn.Parameter(param.detach().chunk(n, dim)[k].clone()) for dim, param in enumerate((whole.up, whole.down))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group, n = self.group, self.group.size()
        for _ in range(2):
            if self.how == "sequence":
                part = x.chunk(n)[group.rank()]
                inner = torch.sin(F.linear(gather_for_shards(self.norm(part), group), self.up))
                out = torch.tanh(row_linear(inner, self.down, None, group, scatter_dim=0))
                x = x + gather_from_group(out, group, dim=0)
            elif self.how == "all_to_all":
                inner = torch.sin(column_linear(self.norm(x), self.up, None, group))
                inner = all_to_all_in_group(inner, group, scatter_dim=0, gather_dim=1)
                inner = all_to_all_in_group(inner * 1.0, group, scatter_dim=1, gather_dim=0)
                x = x + torch.tanh(row_linear(inner, self.down, None, group))
            elif self.how == "copy":
                inner = torch.sin(F.linear(copy_to_group(self.norm(x), group), self.up))
                x = x + torch.tanh(reduce_from_group(F.linear(inner, self.down), group))
            elif self.how == "own":
                inner = torch.sin(F.linear(copy_to_group(self.norm(x), group), self.up))
                x = x + torch.tanh(_Own.apply(F.linear(inner, self.down), group))
            else:
                inner = torch.sin(column_linear(self.norm(x), self.up, None, group))
                x = x + torch.tanh(row_linear(inner, self.down, None, group))
        return x


class _Own(torch.autograd.Function):
    """What a script may do: reduce in place what a product returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


def step(run: Any, module: nn.Module, count: bool) -> tuple[dict[str, torch.Tensor], Counter[str], int]:
    torch.manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    module.zero_grad()
    counter = CountCollectives()
    if count:
        counter.__enter__()
    with measure(module.parameters()) as saved:
        y = run(module, x)
    (y * y.cos()).sum().backward()
    if count:
        counter.__exit__(None, None, None)
    return {"x": x.grad, **{name: param.grad for name, param in module.named_parameters()}}, counter.calls, saved.bytes


def _compare(rank: int, world: int) -> None:
    torch.manual_seed(3)
    whole, group = Whole().double(), dist.group.WORLD
    expected, _, _ = step(lambda module, x: module(x), whole, False)

    def selectively(module: nn.Module, x: torch.Tensor) -> Any:
        return run_selectively(Selection(), module, x)

    def without_products(module: nn.Module, x: torch.Tensor) -> Any:
        return run_selectively(Selection(["aten.tanh"]), module, x)

    runs = {
        "plain": lambda module, x: module(x),
        "again": run_checkpointed,
        "kept": selectively,
        "tanh": without_products,
    }
    for how in ("", "sequence", "all_to_all", "copy", "own"):
        module = Sharded(whole, group, how)
        amounts, calls = {}, {}
        for name, run in runs.items():
            # Counting is a dispatch mode too, under which row linears reduce a copy: once with it and once without.
            for count in (True, False):
                found, calls[name, count], amounts[name] = step(run, module, count)
                for key, grad in found.items():
                    want = expected[key]
                    if key in ("up", "down"):
                        want = want.chunk(world, 0 if key == "up" else 1)[rank]
                    elif how == "sequence" and key == "x":  # every rank knows that of its own tokens
                        want, grad = want.chunk(world)[rank], grad.chunk(world)[rank]
                    elif how == "sequence":
                        dist.all_reduce(grad)
                    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10, msg=f"{how} {name} {key}")
        own = Counter({"allreduce_": 2}) if how == "own" else Counter()  # nobody knows of these
        assert calls["kept", True] - calls["plain", True] == own, (how, calls)
        assert sum(calls["again", True].values()) > sum(calls["plain", True].values()), (how, calls)
        assert amounts["again"] < amounts["kept"] < amounts["plain"], (how, amounts)


@pytest.mark.parametrize("world", [2])
def test_no_collective_runs_twice(world: int) -> None:
    run_ranks(_compare, world)
