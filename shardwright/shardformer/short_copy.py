"""Copies of models that are not built from a config: as wide as the model, with fewer layers.

Of every list of layers a few are kept, among them one of each kind: layers that print alike and hold the same settings
are one kind. Numbers are drawn anew from a fixed seed, equal on every rank, also for a model that has none yet; for a
forward that needs its own (a decay, a temperature) there are copies with those.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.register import on_a_cpu

LARGEST = 300_000_000  # parameters of a copy, which is in double precision
_DEPTH = 4


def short_copies(model: nn.Module) -> Iterator[nn.Module]:
    """In evaluation mode and double precision on the CPU, the smallest first; none where all are too large."""
    for short in (True, False):
        for own in (False, True):
            if own and any(param.is_meta for param in model.parameters()):
                continue
            copied = _copy(model, short, own)
            if copied is not None:
                yield copied


def _copy(model: nn.Module, short: bool, own: bool) -> nn.Module | None:
    with ExitStack() as stack:
        if short:
            for module in model.modules():
                if isinstance(module, nn.ModuleList | nn.Sequential) and _has_many_layers(module):
                    stack.enter_context(_shortened(module))
        if sum(param.numel() for param in model.parameters()) > LARGEST:
            return None
        generator = torch.Generator().manual_seed(0)
        memo: dict[int, Any] = {}
        for name, param in model.named_parameters():
            made = param.detach().to("cpu", _exact(param)) if own else _drawn(name, param, generator)
            memo[id(param)] = nn.Parameter(made.clone(), requires_grad=made.is_floating_point())
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach().to("cpu", _exact(buffer)).clone()
        try:
            copied = copy.deepcopy(model, memo).eval()
        except Exception:  # of a model that holds what cannot be copied
            return None
        for config in (getattr(module, "config", None) for module in copied.modules()):
            had = getattr(config, "_attn_implementation_internal", None)
            if on_a_cpu(had) != had:
                config._attn_implementation_internal = on_a_cpu(had)  # type: ignore[union-attr]
        return copied


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.is_floating_point() else tensor.dtype


def _drawn(name: str, param: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of a size that keeps activations as they are; scales of norms near one."""
    noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    if param.ndim > 1:
        return noise / max(param[0].numel(), 1) ** 0.5
    return 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)


def _has_many_layers(layers: nn.ModuleList | nn.Sequential) -> bool:
    """Linears and the like in a row are the parts of one layer, each of which has its place."""
    return sum(_is_layer(layer) for layer in layers) > _DEPTH


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.children())


@contextmanager
def _shortened(layers: nn.ModuleList | nn.Sequential) -> Iterator[None]:
    """Inside, the list has few of its layers; an `nn.ModuleList`, which is read by numbers, has them under the first
    numbers.
    """
    before = layers._modules
    kept = _of_every_kind(list(before.items()))
    in_order = isinstance(layers, nn.ModuleList) and all(name.isdigit() for name in before)
    names = map(str, range(len(kept))) if in_order else (name for name, _ in kept)
    layers._modules = dict(zip(names, (layer for _, layer in kept), strict=True))  # type: ignore[arg-type,misc]
    try:
        yield
    finally:
        layers._modules = before


def _of_every_kind(layers: list[tuple[str, nn.Module | None]]) -> list[tuple[str, nn.Module | None]]:
    """The first of each kind, the first others until there are enough, and what is no layer."""
    seen: set[str] = set()
    chosen: set[int] = set()
    for place, (_, layer) in enumerate(layers):
        kind = _kind(layer)
        if kind not in seen or (layer is not None and not _is_layer(layer)):
            seen.add(kind)
            chosen.add(place)
    wanted = max(_DEPTH, sum(layer is not None and not _is_layer(layer) for _, layer in layers) + 1)
    for place in range(len(layers)):
        if len(chosen) < wanted:
            chosen.add(place)
    return [layers[place] for place in sorted(chosen)]


def _kind(layer: nn.Module | None) -> str:
    """What a layer is made of and set to, apart from its number."""
    if layer is None:
        return ""
    settings = [
        (name, value)
        for module in layer.modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and not name.endswith(("idx", "index"))
    ]
    functions = [
        getattr(value, "__qualname__", type(value).__name__)
        for module in layer.modules()
        for _, value in sorted(vars(module).items())
        if callable(value) and not isinstance(value, nn.Module)
    ]
    return repr((str(layer), settings, functions))
