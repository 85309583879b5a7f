"""Microbatches on which a loss is tried without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch.microbatch import OTHER_ROWS, batch_size, find_batch_dim, items_of, like


def resized(microbatch: Any, samples: int, factor: int, shared: frozenset[Any]) -> Any:
    """The microbatch on the meta device, with `factor` times the samples."""
    entries = {}
    for key, value in items_of(microbatch):
        if isinstance(value, torch.Tensor):
            dim = None if key in shared else find_batch_dim(key, value, samples)
            shape = list(value.shape)
            if dim is not None and dim != OTHER_ROWS:
                shape[dim] *= factor
            value = torch.empty(shape, dtype=value.dtype, device="meta")
        entries[key] = value
    return like(microbatch, entries)


def without_images(inputs: Any) -> Any:
    """Images go into the model's first layers, and how large they are is not known without data."""
    if not isinstance(inputs, Mapping):
        return inputs
    samples = batch_size(inputs)
    return {key: value for key, value in inputs.items() if find_batch_dim(key, value, samples) != OTHER_ROWS}
