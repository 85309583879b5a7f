"""One gradient norm for every layout.

The square of the norm of the whole model is the sum over ranks of the squares of the elements that each rank *owns*: an
element that several ranks hold (replicated over tp or dp, tied over stages, shared key/value rows) is owned by exactly
one of them. So one reduction of one number over the whole world gives the norm, whatever the layout, and a non-finite
element anywhere makes it non-finite everywhere: the fp16 overflow check is the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..spec import ParamSpec

BLOCK = 256  # elements summed in fp32 on the CPU, whose kernel keeps one running sum: 12 M elements in one go lose 5e-4


def power_sum(grads: Sequence[torch.Tensor], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """Sum of |g|^p over all elements (their maximum for p = inf), an fp64 0-d tensor on `device`, not read back.

    Blocks are counted from the start of each tensor: tensors cut at multiples of `BLOCK` give the same sum bit by bit,
    nearly always, as the whole, because only fp64 additions change their order.
    """
    parts = [part.to(device) for part in _norms(grads, norm_type)]
    norms = torch.cat(parts).double() if parts else torch.zeros(1, dtype=torch.float64, device=device)
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _norms(grads: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """1-d tensors of norms of parts of `grads` that together are all of it."""
    on_device = [grad for grad in grads if grad.device.type != "cpu"]
    result = []
    for dtype in {grad.dtype for grad in on_device}:
        same = [grad for grad in on_device if grad.dtype == dtype]
        result.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=_wide(dtype))))
    for grad in grads:
        if grad.device.type == "cpu":
            flat, dtype = grad.flatten(), _wide(grad.dtype)
            rest = flat.numel() % BLOCK
            if flat.numel() > rest:
                result.append(
                    torch.linalg.vector_norm(flat[: flat.numel() - rest].view(-1, BLOCK), norm_type, dim=1, dtype=dtype)
                )
            if rest:
                result.append(torch.linalg.vector_norm(flat[-rest:], norm_type, dtype=dtype)[None])
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def total_norm(local: torch.Tensor, group: dist.ProcessGroup | None, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all ranks' elements from each one's `power_sum`; all ranks of `group` must call. Stays on the
    device.
    """
    result = local.clone()
    infinite = math.isinf(norm_type)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return result if infinite else result.pow(1.0 / norm_type)


def owned_ranges(spec: ParamSpec, coordinate: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of the flattened local shard that the rank at `coordinate` of `spec.axis` owns, ascending
    and merged.
    """
    if not spec.is_sharded:
        return [(0, math.prod(spec.full_shape))] if coordinate == 0 else []
    assert spec.dim is not None
    shape = spec.local_shape(coordinate)
    inner = math.prod(shape[spec.dim + 1 :])
    row = shape[spec.dim] * inner
    ranges: list[tuple[int, int]] = []
    runs = sorted(spec.owned(coordinate))
    for outer in range(math.prod(shape[: spec.dim])):
        for offset, length in runs:
            start = outer * row + offset * inner
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], start + length * inner)
            else:
                ranges.append((start, start + length * inner))
    return ranges


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings `norm` to at most `max_norm`: torch's formula, so that clipped runs agree with plain
    torch.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
