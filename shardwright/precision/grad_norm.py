"""One gradient norm for every layout.

The square of the norm of the whole model is the sum over ranks of the squares of the elements that each rank *owns*: an element
that several ranks hold (replicated over tp or dp, tied over stages, shared key/value rows) is owned by exactly one of them.
So one reduction of one number over the whole world gives the norm, whatever the layout, and a non-finite element anywhere
makes it non-finite everywhere: the fp16 overflow check is the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..spec import ParamSpec


def total_norm(
    grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device, norm_type: float = 2.0
) -> torch.Tensor:
    """p-norm of the elements in `grads` of all ranks of `group`, a 0-d tensor on `device`, not read back.

    `grads` are the tensors this rank owns, maybe none; all ranks of `group` must call.
    """
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    if grads:
        norms = torch.stack([norm.to(device, wide) for norm in torch._foreach_norm(list(grads), norm_type)])
    else:
        norms = torch.zeros(1, dtype=wide, device=device)
    if math.isinf(norm_type):
        result = norms.max()
        op = dist.ReduceOp.MAX
    else:
        result = norms.pow(norm_type).sum()
        op = dist.ReduceOp.SUM
    # Always fp64: ranks that own nothing cannot know the dtype of the others.
    result = result.double()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(result, op=op, group=group)
    return result if math.isinf(norm_type) else result.pow(1.0 / norm_type)


def owned_ranges(spec: ParamSpec, coordinate: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of the flattened local shard that the rank at `coordinate` of `spec.axis` owns, ascending and merged."""
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
    """The factor that brings `norm` to at most `max_norm`: torch's formula, so that clipped runs agree with plain torch."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
