"""Collectives on local tensors whose sizes may differ over the ranks, and their asynchronous forms.

Shapes: a rank's tensor is [..., n_r, ...] with n_r = sizes[r] along `dim`; the joined tensor is [..., sum(sizes), ...].
Uneven exchanges pad to the largest n_r, because gloo's all_gather and NCCL's flat collectives only know equal sizes.
In a group of `comm.quantised_wire` floating-point tensors travel in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import quantised_wire, turns
from .compat import all_gather_single, all_to_all_single, reduce_scatter_single, without_function_modes
from .handle import Handle


def even_sizes(total: int, ranks: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first; they sum to `total`."""
    share, rest = divmod(total, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def gather_sizes(size: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Every rank's `size`. Reads the result back to the host: not for the hot path."""
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather_single(everyone, mine, group=group)
    return [int(value) for value in everyone.tolist()]


def all_gather_async(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Handle[torch.Tensor]:
    """Start joining every rank's tensor along `dim`; `wait()` returns the joined tensor. `sizes` only when they
    differ.
    """
    ranks = dist.get_world_size(group)
    sizes = list(sizes) if sizes is not None else [tensor.shape[dim]] * ranks
    assert len(sizes) == ranks, f"{len(sizes)} sizes for a group of {ranks}"
    if ranks == 1:
        return Handle("all_gather", [], lambda: tensor)
    if tensor.ndim and quantised_wire.travels_quantised(tensor, group):
        return quantised_wire.gather_parts(tensor, group, dim % tensor.ndim, sizes)
    if len(set(sizes)) == 1 and tensor.ndim:
        return _all_gather_even(tensor, group, dim % tensor.ndim, ranks)
    largest = max(sizes)
    mine = _padded(tensor.movedim(dim, 0), largest).contiguous()
    joined = mine.new_empty((ranks * largest, *mine.shape[1:]))
    work = all_gather_single(joined, mine, group=group, async_op=True)

    def finish() -> torch.Tensor:
        whole = torch.cat([part[:size] for part, size in zip(joined.split(largest), sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    return Handle("all_gather", [work], finish, keep=mine)


def _all_gather_even(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int, ranks: int) -> Handle[torch.Tensor]:
    """Tensors travel as they lie in memory, [R, *shape]; one copy brings R beside `dim`, none where all dims before
    it have size 1.
    """
    mine = tensor.contiguous()
    joined = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
    work = all_gather_single(joined, mine, group=group, async_op=True)

    def finish() -> torch.Tensor:
        with without_function_modes():  # who follows a loss sees what came, not how it was put together
            return joined if dim == 0 else joined.view(ranks, *mine.shape).movedim(0, dim).flatten(dim, dim + 1)

    return Handle("all_gather", [work], finish, keep=mine)


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Every rank's tensor joined along `dim`."""
    return turns.wait(all_gather_async(tensor, group, dim, sizes), tensor)


def reduce_scatter_async(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> Handle[torch.Tensor]:
    """Start summing `tensor` over the ranks and dealing the sum out along `dim`; `wait()` returns this rank's part."""
    ranks = dist.get_world_size(group)
    if sizes is None:
        assert tensor.shape[dim] % ranks == 0, (
            f"dim {dim} of {tuple(tensor.shape)} is not divisible by {ranks}: pass sizes"
        )
        sizes = [tensor.shape[dim] // ranks] * ranks
    assert len(sizes) == ranks, f"{len(sizes)} sizes for a group of {ranks}"
    assert sum(sizes) == tensor.shape[dim], f"sizes {list(sizes)} do not sum to dim {dim} of {tuple(tensor.shape)}"
    if ranks == 1:
        return Handle("reduce_scatter", [], lambda: tensor)
    if quantised_wire.travels_quantised(tensor, group):
        return quantised_wire.scatter_sums(tensor, group, dim % tensor.ndim, sizes)
    if len(set(sizes)) == 1:
        return _reduce_scatter_even(tensor, group, dim % tensor.ndim, ranks)
    largest = max(sizes)
    parts = tensor.movedim(dim, 0).split(list(sizes))
    flat = torch.cat([_padded(part, largest) for part in parts])
    mine = flat.new_empty((largest, *flat.shape[1:]))
    work = reduce_scatter_single(mine, flat, group=group, async_op=True)
    size = sizes[dist.get_rank(group)]
    return Handle("reduce_scatter", [work], lambda: mine[:size].movedim(0, dim).contiguous(), keep=flat)


def _reduce_scatter_even(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int, ranks: int) -> Handle[torch.Tensor]:
    """One copy brings the ranks' parts of `dim` one after the other, [R, *part]; none where all dims before it have
    size 1.
    """
    parts = tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0).contiguous()
    mine = parts.new_empty(parts.shape[1:])
    work = reduce_scatter_single(mine, parts.flatten(0, 1), group=group, async_op=True)
    return Handle("reduce_scatter", [work], lambda: mine, keep=parts)


def reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    return turns.wait(reduce_scatter_async(tensor, group, dim, sizes), tensor)


def all_reduce_in_place(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> turns.Waitable | None:
    """Sum `tensor` over the ranks; with `async_op` it is there after the `wait()` of what is returned."""
    if not quantised_wire.travels_quantised(tensor, group):
        work: turns.Waitable | None = dist.all_reduce(tensor, group=group, async_op=async_op)
        return work
    handle = quantised_wire.sum_over(tensor, group)
    if not async_op:
        handle.wait()
    return handle


def all_to_all_flat(
    parts: Sequence[torch.Tensor], counts: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send flat part r to rank r; the flat parts, of `counts` elements, that came."""
    like = parts[0]
    if quantised_wire.travels_quantised(like, group):
        found: list[torch.Tensor] = turns.wait(quantised_wire.trade_parts(parts, counts, like.dtype, group), like)
        return found
    lengths = [part.numel() for part in parts]
    return _trade(torch.cat(list(parts)), lengths, counts, group)


def all_to_all_even(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> list[torch.Tensor]:
    """Send the r-th of equal parts along `dim` to rank r; what came, flat. One copy brings the parts one after the
    other; none where all dims before `dim` have size 1.
    """
    ranks = dist.get_world_size(group)
    parts = tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0).contiguous().flatten(1)
    if quantised_wire.travels_quantised(tensor, group):
        return all_to_all_flat(parts.unbind(), [parts.shape[1]] * ranks, group)
    lengths = [parts.shape[1]] * ranks
    return _trade(parts.flatten(), lengths, lengths, group)


def _trade(
    sent: torch.Tensor, lengths: Sequence[int], counts: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    received = sent.new_empty(sum(counts))
    turns.run(all_to_all_single, received, sent, list(counts), list(lengths), group=group)
    return list(received.split(list(counts)))


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` with zeros appended along dim 0 until it has `size` entries."""
    if tensor.shape[0] == size:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((size - tensor.shape[0], *tensor.shape[1:]))])
