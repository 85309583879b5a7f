"""Collectives and messages in groups that quantise: within the bound, the same on all ranks, as few bytes as said."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.collectives import all_gather, reduce_scatter
from shardwright.comm.p2p import PipeComm
from shardwright.comm.quantised import OF_LARGEST, RELATIVE, wire_bytes
from shardwright.comm.quantised_wire import exact_group, is_quantised, quantised_group
from shardwright.ops.collective import all_reduce, all_to_all
from shardwright.testing import run_ranks
from tests.ranks.counting import CountBytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of magnitudes that differ by orders within a block, with zeros."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp()
    return x.masked_fill(torch.rand(shape, generator=generator) < 0.1, 0).to(dtype)


def bound(x: Tensor) -> Tensor:
    """Of one rounding, with the largest of the whole tensor in place of that of the block."""
    largest = x.double().abs().max() if x.numel() else 0.0
    return RELATIVE * x.double().abs() + OF_LARGEST * largest


def within(actual: Tensor, exact: Tensor, error: Tensor, dtype: torch.dtype) -> bool:
    rounding = torch.finfo(dtype).eps * (exact.abs() + error) + torch.finfo(dtype).tiny
    return bool(((actual.double() - exact).abs() <= error + rounding).all())


def on_rank(rank: int, world: int) -> list[Any]:
    group = quantised_group(dist.group.WORLD)
    assert quantised_group(dist.group.WORLD) is group
    assert quantised_group(group) is group
    assert is_quantised(group)
    assert exact_group(group) is dist.group.WORLD
    held = []
    for dtype in DTYPES:
        parts = [values(peer, 5, 7 * world, 3, dtype=dtype) for peer in range(world)]
        exact = torch.stack([part.double() for part in parts])
        terms = sum(bound(part) for part in parts)
        with CountBytes() as sent:
            total = all_reduce(parts[rank], group)
        share = -(-exact[0].numel() // world)
        assert sent.bytes == 2 * (world - 1) * wire_bytes(share)
        assert within(total, exact.sum(0), terms + bound(exact.sum(0).abs() + terms), dtype)
        held.append(total)
        for sizes in (None, [4 * world, 3 * world, *[0] * (world - 2)]):
            offset = sum((sizes or [7] * world)[:rank])
            length = (sizes or [7] * world)[rank]
            mine = reduce_scatter(parts[rank], group, 1, sizes)
            own = slice(offset, offset + length)
            assert within(mine, exact.sum(0)[:, own], terms[:, own], dtype)
            whole = all_gather(parts[0][:, own], group, 1, sizes)
            assert within(whole, exact[0], bound(exact[0]), dtype)
            held.append(whole)
        swapped = all_to_all(parts[rank], group, 1, 0, [7] * world, [5] * world)
        wanted = exact[:, :, 7 * rank : 7 * rank + 7].flatten(0, 1)
        error = torch.stack([bound(part) for part in parts])[:, :, 7 * rank : 7 * rank + 7].flatten(0, 1)
        assert swapped.shape == wanted.shape
        assert within(swapped, wanted, error, dtype)
        assert torch.equal(swapped[5 * rank : 5 * rank + 5].double(), wanted[5 * rank : 5 * rank + 5])  # its own
    _special(rank, world, group)
    return held


def _special(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x = torch.ones(70)
    x[3], x[40] = (torch.inf if rank == 0 else 1.0), (torch.nan if rank == world - 1 else 1.0)
    total = all_reduce(x, group)
    assert total[3] == torch.inf
    assert total[40].isnan()
    assert total.isfinite().sum() == 68
    most = torch.full((8,), 60000.0, dtype=torch.float16)
    assert all_reduce(most, group).isinf().all(), "an overflow must be seen"
    for exact in (torch.tensor([1 + rank, 3]), values(rank, 9, dtype=torch.float32).double()):
        assert torch.equal(all_reduce(exact, group), all_reduce(exact, dist.group.WORLD))
    assert all_reduce(torch.empty(0), group).shape == (0,)
    assert all_reduce(values(0, 1)[0] + 1, group).shape == ()
    _messages(rank, group)


def _messages(rank: int, group: dist.ProcessGroup) -> None:
    """Activations and gradients are rounded, masks and small tensors are not."""
    comm = PipeComm(group)
    activation, mask, small = values(5, 20, 31, dtype=torch.bfloat16), torch.full((600,), -torch.inf), values(6, 4)
    for _ in range(2):  # with a header, and without
        if rank == 0:
            payload = {"hidden": activation.clone().requires_grad_(), "mask": mask, "loss": small.requires_grad_()}
            with CountBytes() as sent:
                comm.isend(payload, 1, "key").wait()
        elif rank == 1:
            got = comm.irecv(0, "key").wait()
            assert torch.equal(got["mask"], mask)
            assert torch.equal(got["loss"], small)
            assert within(got["hidden"], activation.double(), bound(activation), torch.bfloat16)
            assert not torch.equal(got["hidden"], activation)
            assert got["hidden"].requires_grad
            assert got["hidden"].dtype == torch.bfloat16
    if rank == 0:
        assert sent.bytes == wire_bytes(620) + mask.nbytes + small.nbytes


def test_collectives_and_messages_stay_within_the_bound() -> None:
    first, *others = run_ranks(on_rank, 3)
    for held in others:
        for mine, theirs in zip(first, held, strict=True):
            assert torch.equal(mine, theirs)
