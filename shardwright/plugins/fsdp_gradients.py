"""Gradients that FSDP2 keeps unsharded on every rank: of calls under `no_sync`, until a backward outside reduces them.

`Optimizer.zero_grad` sees the shards alone, so a step that is given up would be added to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def drop_unsharded(model: nn.Module) -> None:
    """Of all modules of `model` that are sharded on their own. `unshard` and its relatives do not touch them."""
    for group in _groups(model):
        group._partial_reduce_output = None  # summed within a shard group, and not over replicas yet
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            unsharded = getattr(param, "_unsharded_param", None)  # before the first forward there is none
            if unsharded is not None:
                unsharded.grad = None


def _groups(model: nn.Module) -> Iterator[Any]:
    """Private names of torch, seen in 2.13; before it there was one group per module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])
