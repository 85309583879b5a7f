"""Saving at one layout and going on at another, compared with one process that was never interrupted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, keep_float64, loss_of, zoo

BEFORE, AFTER, BATCH = 2, 2, 4
TOLERANCE = 1e-10

transformers.logging.set_verbosity_error()

# (world size, arguments of HybridParallelPlugin)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "zero1": (2, {"zero_stage": 1}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tp2-pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "tp4": (4, {"tp_size": 4}),
    "tp2-zero3": (4, {"tp_size": 2, "zero_stage": 3}),
    "zero1-k2": (4, {"zero_stage": 1, "zero_group_size": 2}),
    "pp2-chunks2-zero1": (
        4,
        {"pp_size": 2, "num_microbatches": 2, "pp_style": "interleaved", "num_model_chunks": 2, "zero_stage": 1},
    ),
    "zbv-tp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {  # for models that have some
    "ep2-zero1": (2, {"ep_size": 2, "zero_stage": 1}),
    "ep2-zero3": (2, {"ep_size": 2, "zero_stage": 3}),
    "tp2-ep2": (4, {"tp_size": 2, "ep_size": 2}),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two param groups, so that groups must find their parameters again."""
    model = zoo.build(name, dtype=torch.float64)
    optimizer = adamw(model)
    params = list(model.parameters())
    common = {key: value for key, value in optimizer.defaults.items() if key in ("lr", "eps", "betas")}
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, **common)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    return zoo.inputs(name, batch_size=BATCH, seq_len=11, seed=step, dtype=torch.float64)


@cache
def reference(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process, plain torch, all steps without a break."""
    model, optimizer = build(name)
    lrs = schedule(optimizer)
    for step in range(BEFORE + AFTER):
        optimizer.zero_grad()
        loss_of(model(**batch(name, step))).backward()
        optimizer.step()
        lrs.step()
    return model, optimizer


def boost(name: str, layout: str) -> tuple[Any, ...]:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **(LAYOUTS | EXPERTS)[layout][1]))
    model, optimizer = build(name)
    lrs = schedule(optimizer)
    model, wrapped, _, _, lrs = booster.boost(model, optimizer, criterion, lr_scheduler=lrs)
    return booster, model, wrapped, lrs


def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    return loss_of(outputs)


def train(name: str, steps: range, booster: Any, model: nn.Module, optimizer: Any, lrs: Any) -> None:
    plugin = booster.plugin
    size = BATCH // plugin.dp_size
    first = plugin.mesh.coordinate("dp") * size
    for step in steps:
        optimizer.zero_grad()
        rows = {key: value[first : first + size] for key, value in batch(name, step).items()}
        booster.execute_pipeline(iter([rows]), model, criterion, optimizer)
        optimizer.step()
        lrs.step()


@keep_float64()
def save_at(rank: int, world: int, name: str, layout: str, path: Path) -> None:
    booster, model, optimizer, lrs = boost(name, layout)
    train(name, range(BEFORE), booster, model, optimizer, lrs)
    booster.save(
        path / layout, model=model, optimizer=optimizer, lr_scheduler=lrs, step=BEFORE, extra={"layout": layout}
    )


@keep_float64()
def load_at(rank: int, world: int, name: str, layout: str, path: Path, saved: list[str]) -> None:
    """Go on at `layout` from each of the `saved` checkpoints; every rank compares what it holds."""
    plain, plain_optimizer = reference(name)
    states = {n: plain_optimizer.state[p] for n, p in plain.named_parameters()}
    weights = dict(plain.named_parameters())
    for source in saved:
        booster, model, optimizer, lrs = boost(name, layout)
        state = booster.load(path / source, model=model, optimizer=optimizer, lr_scheduler=lrs)
        assert (state["step"], state["extra"], state["skipped"]) == (BEFORE, {"layout": source}, [])
        train(name, range(BEFORE, BEFORE + AFTER), booster, model, optimizer, lrs)
        mesh = booster.plugin.mesh
        compare_models(plain, model, coordinate=mesh.coordinate, gradients=False)
        for shard in optimizer.shards():
            coordinate = mesh.coordinate(shard.spec.axis)
            real = (
                shard.spec.shard(torch.ones(shard.spec.full_shape), coordinate).flatten()[shard.start : shard.stop] > 0
            )
            wanted = {"master": weights[shard.name].detach(), "exp_avg": states[shard.name]["exp_avg"]}
            wanted["exp_avg_sq"] = states[shard.name]["exp_avg_sq"]
            for key, full in wanted.items():
                mine = shard.master if key == "master" else shard.state[key]
                theirs = shard.spec.shard(full, coordinate).flatten()[shard.start : shard.stop]
                torch.testing.assert_close(
                    mine[real],
                    theirs[real],
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                    msg=lambda text, what=(source, shard.name, key): f"{what}: {text}",
                )
            assert float(shard.extra["step"]) == BEFORE + AFTER
        assert [group["lr"] for group in optimizer.param_groups] == [
            group["lr"] for group in plain_optimizer.param_groups
        ]
