"""One layout of HybridParallelPlugin trained for some steps and compared with one process, on every rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, keep_float64, loss_of, zoo
from shardwright.testing.compare import GRADIENT_FLOOR

STEPS = 3
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Layout:
    """A job. `plugin` are arguments of HybridParallelPlugin; batches are those of all data-parallel ranks together."""

    model: str
    world: int
    plugin: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)  # of the model's config
    dtype: str = "fp64"
    batch: int = 4  # samples of one data-parallel rank
    accumulate: int = 1
    max_norm: float = 0.0
    seed: int = 0
    checkpointing: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in asdict(self).items() if value not in (0, 0.0, False, {}))


def build(layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zoo.build(layout.model, seed=layout.seed, dtype=DTYPES[layout.dtype], **layout.overrides)
    return model, adamw(model)


def batches(layout: Layout, step: int, replicas: int) -> list[dict[str, torch.Tensor]]:
    """The global batches of one step, one per accumulation; sequence lengths and label counts differ from one to the next."""
    return [
        zoo.inputs(
            layout.model,
            batch_size=layout.batch * replicas,
            seq_len=11 + 2 * ((step + micro) % 2),
            seed=1000 * layout.seed + 10 * step + micro,
            dtype=DTYPES[layout.dtype],
            **layout.overrides,
        )
        for micro in range(layout.accumulate)
    ]


def rows(batch: dict[str, torch.Tensor], replica: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value[replica * size : (replica + 1) * size] for name, value in batch.items()}


def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    return loss_of(outputs)


def run_layout(rank: int, world: int, layout: Layout) -> dict[str, Any]:
    """Train both sides in this process; raises where they differ. Returns what was compared."""
    with keep_float64() if layout.dtype == "fp64" else nullcontext():
        return _run(world, layout)


def _run(world: int, layout: Layout) -> dict[str, Any]:
    settings = {"precision": "fp32", "max_norm": layout.max_norm, **layout.plugin}
    booster = Booster(plugin=HybridParallelPlugin(**settings))
    plugin = booster.plugin
    assert isinstance(plugin, HybridParallelPlugin)
    reference, reference_optimizer = build(layout)
    model, optimizer = copy.deepcopy(reference), None
    if layout.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = adamw(model)
    model, optimizer, *_ = booster.boost(model, optimizer, criterion)
    assert optimizer is not None
    replica, dtype = plugin.mesh.coordinate("dp"), DTYPES[layout.dtype]
    losses: list[float] = []
    expected: list[float] = []
    held: set[str] = set()
    for step in range(STEPS):
        reference_optimizer.zero_grad()
        optimizer.zero_grad()
        for micro, batch in enumerate(batches(layout, step, plugin.dp_size)):
            loss = loss_of(reference(**batch)) / layout.accumulate
            loss.backward()
            last = micro == layout.accumulate - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                result = booster.execute_pipeline(
                    iter([rows(batch, replica, layout.batch)]), model, _scaled(layout.accumulate), optimizer, return_loss=True
                )
            if plugin.stage_manager.is_last_stage():
                losses.append(float(result["loss"]))
                expected.append(float(loss.detach()))
        gradients = optimizer.gradients()  # type: ignore[attr-defined]
        report = compare_models(
            reference,
            model,
            coordinate=plugin.mesh.coordinate,
            losses=(torch.tensor(expected, dtype=dtype), torch.tensor(losses, dtype=dtype)) if losses else None,
            gradients=gradients,
            gradient_floor=GRADIENT_FLOOR if layout.dtype == "fp64" else 1.0,
            weights=False,
        )
        if layout.max_norm:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), layout.max_norm)
            mine = optimizer.get_grad_norm()
            assert mine is not None
            assert abs(float(norm) - mine) <= 1e-5 * float(norm), (float(norm), mine)
        reference_optimizer.step()
        optimizer.step()
        report = compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=False)
        held |= report.held
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, held)
    missing = {name for name, _ in reference.named_parameters(remove_duplicate=False)} - set().union(*everywhere)
    assert not missing, f"held by no rank: {sorted(missing)}"
    return {"losses": losses, "held": len(held)}


def _scaled(accumulate: int) -> Any:
    def scaled(outputs: Any, inputs: Any) -> torch.Tensor:
        return criterion(outputs, inputs) / accumulate

    return scaled
