"""Steps of given microbatches through HybridParallelPlugin, compared with plain transformers that runs one
microbatch after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, keep_float64

Batch = dict[str, Any]
Terms = Callable[[Any, Batch], list[tuple[torch.Tensor, float]]]  # outputs, microbatch -> means, and what each counts


def label_mean(outputs: Any, microbatch: Batch) -> list[tuple[torch.Tensor, float]]:
    return [(outputs.loss, int((microbatch["labels"][:, 1:] != -100).sum()))]


def reference_step(model: nn.Module, optimizer: Any, microbatches: Sequence[Batch], terms: Terms) -> torch.Tensor:
    """Every term is the mean over all microbatches of what it counts."""
    optimizer.zero_grad()
    totals: list[float] = []
    with torch.no_grad():
        for microbatch in microbatches:
            counts = [float(count) for _, count in terms(model(**copy.copy(microbatch)), microbatch)]
            totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
    loss = torch.zeros((), dtype=torch.float64)
    for microbatch in microbatches:
        means = terms(model(**copy.copy(microbatch)), microbatch)
        part = sum(mean * (count / total) for (mean, count), total in zip(means, totals, strict=True))
        part.backward()  # type: ignore[union-attr]
        loss += part.detach()  # type: ignore[union-attr]
    optimizer.step()
    return loss


@keep_float64()
def compare_steps(
    plugin_settings: dict[str, Any],
    build: Callable[[], nn.Module],
    steps: Sequence[Sequence[Sequence[Batch]]],
    feed: Callable[[Sequence[Batch]], Any],
    terms: Terms = label_mean,
    criterion: Any = None,
) -> tuple[Any, Any]:
    """The last step's result and microbatches.

    steps  of every step, of every data-parallel rank, its microbatches
    feed   what its iterator gives for them
    """
    reference = build()
    plugin = HybridParallelPlugin(precision="fp32", **plugin_settings)
    booster = Booster(plugin=plugin)
    model = copy.deepcopy(reference)
    expected_optimizer = adamw(reference)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    result, mine = None, None
    for replicas in steps:
        optimizer.zero_grad()
        mine = replicas[plugin.data_parallel[1]]
        result = booster.execute_pipeline(iter([feed(mine)]), model, criterion, optimizer, return_outputs=True)
        gradients = {name: None if grad is None else grad.clone() for name, grad in optimizer.gradients().items()}
        optimizer.step()
        every = [microbatch for given in replicas[: plugin.dp_size] for microbatch in given]
        loss = reference_step(reference, expected_optimizer, every, terms)
        compare_models(
            reference,
            model,
            coordinate=plugin.mesh.coordinate,
            gradients=gradients,
            losses=(loss.reshape(1), result["loss"].reshape(1)) if result["loss"] is not None else None,
            weights=plugin.zero_stage < 3,
        )
    dist.barrier()
    return result, mine
