"""Collectives whose sizes differ over the ranks, against what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.comm.collectives import (
    all_gather,
    all_gather_async,
    even_sizes,
    gather_sizes,
    reduce_scatter,
)
from shardwright.comm.compat import reduce_scatter_single
from shardwright.ops.collective import gather_for_shards, reduce_scatter_to_group
from shardwright.testing import run_ranks
from shardwright.utils.pytree import TorchDispatchMode

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def whole(sizes: list[int], dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    shape = [3, 4, 5]
    shape[dim] = sum(sizes)
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exchange(rank: int, world_size: int, sizes: list[int]) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in DTYPES:
        for dim in (0, 1, -1):
            full = whole(sizes, dim, dtype, seed=1)
            mine = full.split(sizes, dim)[rank]
            torch.testing.assert_close(all_gather(mine, group, dim, sizes), full)
            assert all_gather(mine, group, dim, sizes).is_contiguous()
            addends = [whole(sizes, dim, dtype, seed=10 + r) for r in range(world_size)]
            torch.testing.assert_close(
                reduce_scatter(addends[rank], group, dim, sizes), sum(addends).split(sizes, dim)[rank]
            )
    assert gather_sizes(sizes[rank], group, torch.device("cpu")) == sizes
    first, second = (all_gather_async(torch.full((2,), float(rank + k)), group) for k in (0, 10))
    assert second.wait().view(world_size, 2)[:, 0].tolist() == [10.0 + r for r in range(world_size)]
    assert first.wait() is first.wait()


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [0, 2], [1, 0, 4, 2], [2, 2, 2, 2]], ids=str)
def test_uneven_collectives(sizes: list[int]) -> None:
    run_ranks(exchange, len(sizes), sizes)


def test_even_sizes() -> None:
    assert even_sizes(10, 4) == [3, 3, 2, 2]
    assert even_sizes(2, 4) == [1, 1, 0, 0]


class Copies(TorchDispatchMode):
    """Counts what copies whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("clone", "copy_", "cat", "_to_copy")
        return func(*args, **(kwargs or {}))


def copies(rank: int, world_size: int) -> None:
    """Along dim 1 the parts of several samples have to change places once; those of one sample, and along dim 0, lie
    right.
    """
    group = dist.group.WORLD
    assert group is not None
    with Copies() as own:  # what the backend copies by itself
        reduce_scatter_single(torch.empty(3), torch.empty(6), group=group)
    by_backend = {all_gather: 0, reduce_scatter: own.count}
    for samples, dim, expected in ((3, 1, 1), (1, 1, 0), (4, 0, 0)):
        x = torch.randn(samples, 6, 5)
        kept = x.clone()
        for function in (all_gather, reduce_scatter):
            with Copies() as found:
                result = function(x, group, dim)
            assert found.count - by_backend[function] == expected, (function, samples, dim)
            assert result.is_contiguous()
        assert torch.equal(x, kept)
        for gathers, differentiable in ((True, gather_for_shards), (False, reduce_scatter_to_group)):
            given = x.clone().requires_grad_()
            with Copies() as forward:
                y = differentiable(given, group, dim)
            dy = torch.randn_like(y)
            with Copies() as backward:
                y.backward(dy)
            scattered = expected + own.count
            assert forward.count == (expected if gathers else scattered), (differentiable, samples, dim)
            assert backward.count == (scattered if gathers else expected), (differentiable, samples, dim)


def test_even_exchanges_copy_as_little_as_can_be() -> None:
    run_ranks(copies, 2)
