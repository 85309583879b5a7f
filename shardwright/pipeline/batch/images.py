"""Images under a pipeline: only the stages that read what a vision tower makes of them run it.

Every stage runs a model's forward up to its first layer, and models look at the tower (its dtype, how it splits its
output) before they call it. So a stage that does not read the tower's output gets its microbatches without patches, as
if there were text alone. Which modules make up the tower is learnt by leaving the patches out: it is those that then do
not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...models.dry_run import call_model, meta_copy, run_dry, weight_sharing_copy
from ...models.known_values import run_knowing
from .microbatch import PATCHES


def has_patches(batch: Any) -> bool:
    return isinstance(batch, Mapping) and any(isinstance(batch.get(key), torch.Tensor) for key in PATCHES)


def without_patches(batch: Any) -> Any:
    return {key: value for key, value in batch.items() if key not in PATCHES} if isinstance(batch, Mapping) else batch


def find_towers(model: nn.Module, outside: tuple[str, ...], example: Any) -> frozenset[str] | None:
    """Those of the modules `outside` the layers that run for images alone; None where `example` has no patches."""
    if not has_patches(example):
        return None
    ways: list[Callable[[nn.Module, Any], Any] | None] = [run_dry, run_knowing]
    if not any(param.is_meta for param in model.parameters()):
        ways.append(None)
    for run in ways:
        try:
            return _ran(model, outside, example, run) - _ran(model, outside, without_patches(example), run)
        except Exception:  # the model's own code: it needs data, or images
            continue
    return frozenset()


def _ran(
    model: nn.Module, names: tuple[str, ...], example: Any, run: Callable[[nn.Module, Any], Any] | None
) -> frozenset[str]:
    """run: without data; None: with the weights"""
    copied, ran = meta_copy(model) if run is not None else weight_sharing_copy(model), set[str]()
    for name in names:
        copied.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: ran.add(name))  # type: ignore[misc]
    if run is not None:
        run(copied, example)
    else:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call_model(copied, example)
    return frozenset(ran)


def check_images(batch: Any, towers: frozenset[str] | None) -> None:
    """ValueError for a batch with images where stages were cut for none."""
    if towers is None and has_patches(batch):
        key = next(key for key in PATCHES if isinstance(batch.get(key), torch.Tensor))
        raise ValueError(
            f"the batch has {key}, but the pipeline stages were cut without knowing what reads images: pass a batch "
            "with images and texts as example_inputs= to the plugin, or use pp_size=1"
        )
