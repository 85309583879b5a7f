"""Layers that are alike return alike: of a deep model without data only one of each kind runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import nn

from ...utils import pytree
from .weight import LossError

_T = TypeVar("_T")


class AlikeLayers:
    """Of layers of one class with parameters of the same shapes, called with the same shapes, the first one runs, and
    the others return new tensors like its.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}  # of one run: output by what a layer is and gets
        self._leaves_out = True

    def forget(self) -> None:
        """A run has ended."""
        self._known.clear()

    def run_one_of(self, layer: nn.Module) -> None:
        kind = (type(layer), tuple((parameter.shape, parameter.requires_grad) for parameter in layer.parameters()))
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._leaves_out:
                return forward(*args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            given = tuple(
                (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x) for x in leaves
            )
            key = (kind, spec, given, torch.is_grad_enabled())
            if key not in self._known:
                self._known[key] = forward(*args, **kwargs)
                return self._known[key]
            return pytree.tree_map_only(
                torch.Tensor,
                lambda seen: torch.empty_like(seen).requires_grad_(seen.requires_grad).clone(),
                self._known[key],
            )

        layer.forward = run  # type: ignore[method-assign]

    def tried(self, run: Callable[[], _T]) -> _T:
        """What `run` returns. Where it fails it is tried with all layers, which from then on always run: some leave
        behind, beside what they return, what a later one reads (as layers of Gemma 3n do with keys and values).
        """
        try:
            return run()
        except Exception as error:
            if not self._leaves_out or isinstance(error, LossError):
                raise
            self._leaves_out = False
            try:
                return run()
            except Exception:
                self._leaves_out = True  # it was something else
                raise
