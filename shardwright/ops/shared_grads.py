"""Sum the gradients of what several ranks hold: replicated parameters with partial gradients, rows that ranks share.

    replicated, applied to sharded activations      the gradient of each rank is a part of the sum (`ParamSpec.partial`)
    rows held by several ranks (key/value heads)    the gradient of each holder is a part of the sum (`ParamSpec.shared_runs`)

Both go through one all-reduce of one flat buffer per dtype. Where a rank does not hold a run, its part of the buffer is zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.spec import get_spec


@torch.no_grad()
def sync_shared_gradients(params: Iterable[Tensor], group: dist.ProcessGroup, axis: str = "tp") -> None:
    """After backward, make the gradients of shared parameters and rows those of the whole model.

    params  parameters of this rank, in the same order on all ranks of `group`; those without a gradient, on any rank, are skipped
            where no rank has one, and count as zero where another rank has
    group   the ranks along `axis`

    Call it once per step, after the last microbatch: summing is linear, so accumulated gradients need one call. It must be the same
    call on all ranks; without shared parameters it communicates nothing.
    """
    if group.size() == 1:
        return
    rank = group.rank()
    by_dtype: dict[torch.dtype, list[tuple[Tensor, list[tuple[Tensor | None, tuple[int, ...]]]]]] = {}
    for param in dict.fromkeys(params):
        parts = _shared_parts(param, rank, axis)
        if parts and param.requires_grad:
            dtype = param.grad.dtype if param.grad is not None else (getattr(param, "grad_dtype", None) or param.dtype)
            by_dtype.setdefault(dtype, []).append((param, parts))
    for dtype, shared in by_dtype.items():
        _sum(shared, dtype, group)


def _shared_parts(param: Tensor, rank: int, axis: str) -> list[tuple[Tensor | None, tuple[int, ...]]]:
    """Views of the gradient to sum, in an order that all ranks agree on: (view or None where not held or no gradient, shape)."""
    spec = get_spec(param)
    if spec is None:
        return []
    if axis in spec.partial:
        return [(param.grad, tuple(param.shape))]
    if not spec.is_sharded or spec.axis != axis:
        return []
    assert spec.dim is not None
    parts: list[tuple[Tensor | None, tuple[int, ...]]] = []
    for run in spec.shared_runs:
        shape = list(spec.full_shape)
        shape[spec.dim] = run.length
        view = None
        if param.grad is not None and rank in run.holders:
            [(_, offset, length)] = spec.local_runs(rank, run.start, run.length)
            view = param.grad.narrow(spec.dim, offset, length)
        parts.append((view, tuple(shape)))
    return parts


def _sum(shared: list[tuple[Tensor, list[tuple[Tensor | None, tuple[int, ...]]]]], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    sizes = [torch.Size(shape).numel() for _, parts in shared for _, shape in parts]
    device = shared[0][0].device
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    slots = iter(flat.split(sizes))
    placed = []
    for param, parts in shared:
        for view, shape in parts:
            slot = next(slots).view(shape)
            if view is not None:
                slot.copy_(view)
            placed.append((param, view, slot))
    dist.all_reduce(flat, group=group)
    for _, view, slot in placed:
        if view is not None:
            view.copy_(slot)
