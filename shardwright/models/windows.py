"""Layers that cut windows out of a map of pixels: Swin's, SAM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from .layer_chain import layer_lists

_CUT = "window_partition"


def why_no_sequence(model: nn.Module) -> str:
    """Why most of a model's layers have no sequences that ranks could share; "" where they have some.

    Attention within windows is that of many short rows, which lie beside each other in a map: there is nothing long to
    split, and neighbours in a window are no neighbours in the list of tokens.
    """
    lists = [(sum(param.numel() for param in each.parameters()), each) for _, each in layer_lists(model)]
    if not lists:
        return ""
    windowed = [(size, name) for size, each in lists for name in [_windowed(each)] if name]
    if 2 * sum(size for size, _ in windowed) <= sum(size for size, _ in lists):
        return ""
    _, name = max(windowed)
    return (
        f"{name} cuts windows out of a map of height and width by itself and attends within each of them, so that its "
        "layers have no sequences to split"
    )


def _windowed(layers: nn.Module) -> str:
    """The class below `layers` that cuts windows; "" where none does."""
    return next((type(module).__name__ for module in layers.modules() if any(_cutters(module))), "")


def _cutters(module: nn.Module) -> Iterator[bool]:
    if getattr(module, "window_size", 0):
        yield hasattr(module, _CUT)
        yield hasattr(sys.modules.get(type(module).__module__), _CUT)
