"""Steps of a pipeline beside those of the plain model in one process, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwright import Booster
from shardwright.testing import adamw, compare_models


def train_beside(
    booster: Booster, plain: nn.Module, model: nn.Module, batch: Callable[[int], dict[str, Any]], seeds: Iterable[int]
) -> Any:
    """The boosted model, after a step on each batch whose loss and gradients are those of `plain`."""
    plugin: Any = booster.plugin
    boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    step: Any = adamw(plain.parameters())
    for seed in seeds:
        want = plain(**batch(seed))["loss"]
        want.backward()
        given = booster.execute_pipeline(iter([batch(seed)]), boosted, None, optimizer, return_loss=True)
        if given["loss"] is not None:
            torch.testing.assert_close(given["loss"], want, rtol=1e-10, atol=1e-10)
        compare_models(
            plain, boosted, coordinate=plugin.mesh.coordinate, gradients=optimizer.gradients(), weights=False
        )
        step.step()
        optimizer.step()
        step.zero_grad()
        optimizer.zero_grad()
    return boosted
