"""Criteria that are called on tensors without data."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn

from ...models.dry_run import meta_copy
from .weight import Criterion


def without_memory(criterion: Criterion | None) -> Criterion | None:
    """A criterion that keeps state is copied, so that following it leaves no trace in it. A plain function is taken
    as it is.
    """
    if criterion is None or isinstance(criterion, types.FunctionType):
        return criterion
    owner = getattr(criterion, "__self__", criterion)
    try:
        if isinstance(owner, nn.Module):
            copied: Any = meta_copy(owner).train(owner.training)
        else:
            memo: dict[int, Any] = {}
            for value in vars(owner).values():  # a reference model is not copied with its weights
                if isinstance(value, nn.Module):
                    memo[id(value)] = meta_copy(value).train(value.training)
                elif isinstance(value, torch.Tensor):
                    memo[id(value)] = value
            copied = copy.deepcopy(owner, memo)
    except Exception:
        return criterion  # it holds something that cannot be copied
    return copied if owner is criterion else getattr(copied, criterion.__name__)
