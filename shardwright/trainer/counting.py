"""What a batch counts for: tokens that are seen, and labels that a mean is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .samples import IGNORED


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Tokens that are no padding, of samples that have a label; 0 where a batch has no tokens.

    Behind the documents of a packed sequence every token has position 0 (see `packing.join`); a document has two
    tokens at least.
    """
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, torch.Tensor):
        return 0
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        real = mask.bool()
    elif isinstance(positions, torch.Tensor) and positions.shape == ids.shape:
        real = positions > 0
        real[:, :-1] |= positions[:, 1:] == 1
    else:
        real = torch.ones_like(ids, dtype=torch.bool)
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
        real = real & (labels != IGNORED).any(dim=1, keepdim=True)
    return int(real.sum())


def labels_of(batch: Mapping[str, Any]) -> int:
    """Labels that count: of rows that are as long as the input all but the first, which nothing predicts; without
    labels the samples.
    """
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if not isinstance(labels, torch.Tensor):
        first = next((value for value in batch.values() if isinstance(value, torch.Tensor)), None)
        return 0 if first is None else len(first)
    shifted = isinstance(ids, torch.Tensor) and labels.ndim > 1 and labels.shape == ids.shape
    return int(((labels[:, 1:] if shifted else labels) != IGNORED).sum())
