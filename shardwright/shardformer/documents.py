"""Whether a model keeps the documents of a packed row apart, tried on a small copy of it.

In a row [1, T] without a mask whose positions begin again with every document, most causal models of transformers let
tokens see their own document alone. Others (bidirectional ones, those without position ids) take the row for one text.
"""

from __future__ import annotations

import copy
from functools import cached_property

import torch
from torch import nn

from .layer.parallel_module import native_class
from .small_copy import build_small

_LENGTHS = (5, 7)


class DocumentProbe:
    """Of one model, which is whole when this is built and may be changed afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self._native = native_class(model)
        self._config = copy.deepcopy(getattr(model, "config", None))
        self._size = sum(param.numel() for param in model.parameters())

    def __call__(self) -> bool:
        return self._keeps_apart

    @cached_property
    def _keeps_apart(self) -> bool:
        if self._config is None:
            return False
        small = build_small(self._native, self._config, self._size, ranks=1)
        if small is None:
            return False
        ids = torch.arange(3, 3 + sum(_LENGTHS))[None]
        positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
        try:
            with torch.no_grad():
                row = small(input_ids=ids, position_ids=positions, use_cache=False).logits
                alone = [
                    small(input_ids=part, position_ids=place, use_cache=False).logits
                    for part, place in zip(ids.split(_LENGTHS, 1), positions.split(_LENGTHS, 1), strict=True)
                ]
        except Exception:  # the model's own code, which may take no positions
            return False
        return torch.allclose(row, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
