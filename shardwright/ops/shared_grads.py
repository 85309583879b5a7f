"""Sum the gradients of what several ranks hold: replicated parameters with partial gradients, rows that ranks share.

    replicated, applied to sharded activations      the gradient of each rank is a part of the sum (`ParamSpec.partial`)
    rows held by several ranks (key/value heads)    the gradient of each holder is a part of the sum
    (`ParamSpec.shared_runs`)

`sync_shared_gradients` sums all of them after backward, by one all-reduce of one flat buffer per dtype; plugins call it
once per step. `sum_in_backward` sums each as backward computes it, so that a plain training loop needs no call. Where a
rank does not hold a run, its part of the buffer is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..spec import ParamSpec, get_spec
from .collective import reduce_from_group
from .weight_grad import takes_none

_SUMMED = "_shardwright_summed_in_backward"


@torch.no_grad()
def sync_shared_gradients(params: Iterable[Tensor], group: dist.ProcessGroup, axis: str = "tp") -> None:
    """After backward, make the gradients of shared parameters and rows those of the whole model.

    params  parameters of this rank, in the same order on all ranks of `group`. A gradient that is missing counts as
            zero and is created when another rank has one; where no rank has one, none is made
    group   the ranks along `axis`

    Call it once per step, after the last microbatch: summing is linear, so accumulated gradients need one call. It must
    be the same call on all ranks; without shared parameters it communicates nothing. Parameters of `sum_in_backward`
    are left alone.
    """
    if group.size() == 1:
        return
    rank = group.rank()
    by_dtype: dict[torch.dtype, list[_Shared]] = {}
    for param in dict.fromkeys(params):
        runs = _shared_runs(param, rank, axis) if param.requires_grad and not hasattr(param, _SUMMED) else []
        if runs:
            dtype = param.grad.dtype if param.grad is not None else (getattr(param, "grad_dtype", None) or param.dtype)
            by_dtype.setdefault(dtype, []).append(_Shared(param, runs))
    for dtype, shared in by_dtype.items():
        _sum(shared, dtype, group)


def sum_in_backward(params: Iterable[Tensor], group: dist.ProcessGroup, axis: str = "tp") -> None:
    """From now on, every backward makes the gradients of shared parameters and rows those of the whole model, before it
    adds them up.

    params  leaves; in backward all ranks of `group` must reach the same of them, in the same order, as they do when
            they run the same model
    """
    if group.size() == 1:
        return
    for param in dict.fromkeys(params):
        runs = _shared_runs(param, group.rank(), axis)
        if runs and not hasattr(param, _SUMMED):
            setattr(param, _SUMMED, True)
            trained = param.requires_grad
            param.requires_grad_(True).register_hook(_Summing(runs, group))  # torch takes hooks only while it does
            param.requires_grad_(trained)


@takes_none
class _Summing(NamedTuple):
    """The hook of one parameter: local gradient -> with what ranks share summed; differentiable like any collective
    here.
    """

    runs: list[HeldRun]
    group: dist.ProcessGroup

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # on every rank
            return None
        if self.runs[0].dim is None:
            return reduce_from_group(grad, self.group)
        sizes = [run.numel for run in self.runs]
        parts = [grad.new_zeros(run.numel) if run.offset is None else run.of(grad).reshape(-1) for run in self.runs]
        summed = reduce_from_group(torch.cat(parts), self.group).split(sizes)
        grad = grad.clone()
        for run, part in zip(self.runs, summed, strict=True):
            if run.offset is not None:
                run.of(grad).copy_(part.view(run.shape))
        return grad


class HeldRun(NamedTuple):
    """Something that several ranks hold."""

    shape: tuple[int, ...]
    dim: int | None  # None: the whole parameter
    offset: int | None  # in this rank's shard along `dim`; None when this rank is no holder

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, shard: Tensor) -> Tensor:
        """Its part of a tensor of a holder's shape."""
        if self.dim is None:
            return shard
        assert self.offset is not None
        return shard.narrow(self.dim, self.offset, self.shape[self.dim])


class _Shared(NamedTuple):
    param: Tensor
    runs: list[HeldRun]


def _shared_runs(param: Tensor, rank: int, axis: str) -> list[HeldRun]:
    """In an order that all ranks agree on."""
    spec = get_spec(param)
    if spec is None:
        return []
    if axis in spec.partial:
        return [HeldRun(tuple(param.shape), None, 0)]
    return held_runs(spec, rank) if spec.axis == axis else []


def held_runs(spec: ParamSpec, rank: int) -> list[HeldRun]:
    """The rows that several ranks of the spec's axis hold, ascending; one that `rank` holds lies in one piece of its
    shard.
    """
    runs = []
    for run in spec.shared_runs:
        assert spec.dim is not None
        shape = list(spec.full_shape)
        shape[spec.dim] = run.length
        offset = None
        if rank in run.holders:
            [(_, offset, _)] = spec.local_runs(rank, run.start, run.length)
        runs.append(HeldRun(tuple(shape), spec.dim, offset))
    return runs


def _sum(shared: list[_Shared], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """One all-reduce of [all runs | for every parameter, the number of ranks that have a gradient]."""
    sizes = [run.numel for _, runs in shared for run in runs]
    flat = torch.zeros(sum(sizes) + len(shared), dtype=dtype, device=shared[0].param.device)
    slots = flat[: sum(sizes)].split(sizes)
    counts = flat[sum(sizes) :]
    counts.copy_(torch.tensor([param.grad is not None for param, _ in shared], dtype=dtype))
    for view, slot in _views(shared, slots):
        if view is not None:
            slot.copy_(view)
    dist.all_reduce(flat, group=group)
    for (param, _), count in zip(shared, counts.tolist(), strict=True):
        if count and param.grad is None:
            param.grad = torch.zeros_like(param, dtype=dtype)
    for view, slot in _views(shared, slots):
        if view is not None:
            view.copy_(slot)


def _views(shared: list[_Shared], slots: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, Tensor]]:
    """The part of the gradient for each slot; None where this rank holds none, or has no gradient."""
    remaining = iter(slots)
    for param, runs in shared:
        for run in runs:
            slot = next(remaining).view(run.shape)
            yield None if param.grad is None or run.offset is None else run.of(param.grad), slot
