"""Parameters that no optimizer trains: the same on all ranks, in the dtypes that the model works in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..precision.policy import PrecisionPolicy
from ..spec import get_spec
from .groups import Groups


def settle_rest(
    model: nn.Module,
    precision: PrecisionPolicy | None,
    dtypes: Mapping[str, torch.dtype],
    trained: set[nn.Parameter],
    groups: Groups,
) -> None:
    """Parameters outside the optimizer: the first rank's values, in the working dtypes; buffers in theirs."""
    for name, param in model.named_parameters():
        if param not in trained:
            param.data = param.data.to(dtypes.get(name, param.dtype))
            group = groups.of_spec(get_spec(param)).everyone
            if group is not None:
                dist.broadcast(param.data, group=group, group_src=0)
    if precision is not None:
        precision.cast_buffers(model)
