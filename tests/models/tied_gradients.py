"""Summing the gradients of tied parameters over their copies, where no optimizer of the package does it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shardwright.pipeline.cut.tied import TiedGroup


@torch.no_grad()
def sync_tied_gradients(
    model: nn.Module, groups: Iterable[TiedGroup], rank: int, process_groups: dict[tuple[int, ...], dist.ProcessGroup]
) -> None:
    """Sum the gradients of every tied parameter over its copies, one collective per set of ranks and dtype.

    To be called once per step, when all microbatches are through and before data-parallel reduction, clipping or
    stepping. A copy without a gradient counts as zeros.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    batches: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for group in groups:
        if rank in group.ranks:
            parameter = parameters[group.names[0]]
            if parameter.requires_grad:
                dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
                batches.setdefault((group.ranks, dtype), []).append(parameter)
    for (ranks, _), members in sorted(batches.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in members if parameter.grad is not None]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            dist.all_reduce(gradients[0], group=process_groups[ranks])
            continue
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=process_groups[ranks])
        for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
