"""Training on both sides: the model on its layout against the same model in this process."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...models.dry_run import call_model
from ...spec import get_spec
from ..compare import GRADIENT_FLOOR, TOLERANCES, compare_models
from ..train import adamw
from .axes import Axis
from .side import Side, cast, trained
from .subject import Batch, Built

TOLERANCE = 1e-8  # of float64; some models cast to single precision in ways that keep_float64 does not see
_WHOLE_FROM = 0.01  # share of the parameters from which a part that is not sharded is named
Result = dict[str, Any]


def train(built: Built, axis: Axis, reference: nn.Module | None = None, side: Side | None = None) -> Result:
    """Two steps of AdamW on both sides: losses and every gradient of both, every weight and what forwards leave in
    buffers after them.
    """
    dtype = getattr(torch, axis.dtype)
    plain: Any = _in_dtype(copy.deepcopy(built.model) if reference is None else reference, dtype)
    if side is None:
        side = Side(axis, _in_dtype(copy.deepcopy(built.model), dtype), built)
        side.boost()
    found = {**(_shares(side.model) if axis.name == "tp2" else {}), **({"note": side.note} if side.note else {})}
    optimizer = adamw(trained(plain))
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    wrong, held, tolerance = "", set[str](), _tolerance(dtype)
    for step, batch in enumerate((built.batch, built.later)):
        optimizer.zero_grad()
        side.optimizer.zero_grad()
        said, held, own = _step(plain, side, cast(batch, dtype), dtype, is_first=not step)
        wrong = wrong or said
        if own is not dtype:  # as that of torch's binary cross entropy with targets in single precision
            tolerance = _tolerance(dtype, own)
            said = f"its loss is in {str(own).removeprefix('torch.')}"
            found["note"] = f"{side.note}; {said}" if side.note else said
        side.optimizer.step()
        optimizer.step()
    coordinate = side.plugin.mesh.coordinate
    after = compare_models(plain, side.model, coordinate=coordinate, gradients=False, tolerance=tolerance, check=False)
    wrong = wrong or _problem(after.check) or _missing(plain, held)
    if side.plugin.mesh.size("dp") == 1:  # else each replica keeps what its own samples leave, as in any DDP
        wrong = wrong or _other_buffers(plain, side.model.unwrap(), before, tolerance)
    return {"outcome": "wrong" if wrong else "verified", **({"why": wrong} if wrong else {}), "steps": 2, **found}


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model.to(dtype)` would take the imaginary part from complex tables of positions."""
    return model.double() if dtype is torch.float64 else model.float()


def _step(
    plain: Any, side: Side, batch: Batch, dtype: torch.dtype, is_first: bool
) -> tuple[str, set[str], torch.dtype]:
    """Forward and backward of both sides; what is wrong with losses and gradients, the names that were compared, and
    the dtype of the loss in one process.
    """
    mesh = side.plugin.mesh
    replica, replicas = mesh.coordinate("dp"), mesh.size("dp")
    parts = _parts(batch, replicas)
    loss = side.backward(parts[replica])
    expected = []
    for part in parts:
        torch.manual_seed(7)
        expected.append(side.built.criterion(call_model(plain, side.told(part))))
        (expected[-1] / replicas).backward()
    report = compare_models(
        plain,
        side.model,
        coordinate=mesh.coordinate,
        losses=None if loss is None else (expected[replica].detach().reshape(1), loss.reshape(1)),
        gradients=side.optimizer.gradients(),
        weights=False,
        tolerance=_tolerance(dtype, expected[0].dtype),
        # In single precision the first step has carried rounding into the weights, unevenly.
        gradient_floor=GRADIENT_FLOOR if is_first or dtype is torch.float64 else 1.0,
        check=False,
    )
    return _problem(report.check), report.held, expected[0].dtype


def _parts(batch: Batch, replicas: int) -> list[Batch]:
    """The samples of every replica."""
    if replicas == 1:
        return [batch]
    cut = {key: value.chunk(replicas) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    return [{**batch, **{key: value[replica] for key, value in cut.items()}} for replica in range(replicas)]


def _tolerance(dtype: torch.dtype, loss: torch.dtype = torch.float64) -> float:
    """`loss`: the dtype of the loss, whose rounding all gradients of a model in double precision have."""
    if dtype is not torch.float64:
        return TOLERANCES[dtype]
    return TOLERANCE if loss is torch.float64 else torch.finfo(loss).eps


def _problem(check: Callable[[], Any]) -> str:
    try:
        check()
    except AssertionError as error:
        return " ".join(str(error).split())[:400]
    return ""


def _missing(plain: nn.Module, held: set[str]) -> str:
    """Names that no rank has. Collective."""
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    missing = {name for name, _ in plain.named_parameters(remove_duplicate=False)}.difference(*everywhere)
    return f"held by no rank: {', '.join(sorted(missing))[:300]}" if missing else ""


def _other_buffers(plain: nn.Module, model: nn.Module, before: dict[str, torch.Tensor], tolerance: float) -> str:
    """Of the buffers that training changed (running statistics), those that this rank has and that differ."""
    held = dict(model.named_buffers())
    wrong = []
    for name, expected in plain.named_buffers():
        actual = held.get(name)
        if actual is None or actual.is_meta or not actual.numel() or torch.equal(expected, before[name]):
            continue
        expected = expected.double()
        if actual.shape != expected.shape:
            wrong.append(f"{name} has shape {tuple(actual.shape)}")
        elif float((actual.double() - expected).abs().max()) > tolerance * max(1.0, float(expected.abs().max())):
            wrong.append(name)
    return f"other buffers after training: {', '.join(wrong)[:300]}" if wrong else ""


def _shares(model: Any) -> Result:
    """Of the parameters here, how many are sharded, and which parts are not."""
    sizes: Counter[str] = Counter()
    total = 0
    for name, param in model.unwrap().named_parameters():
        spec = get_spec(param)
        size = param.numel() if spec is None else torch.Size(spec.full_shape).numel()
        total += size
        if spec is None or not spec.is_sharded:
            sizes[re.sub(r"\b\d+\b", "*", name)] += size
    if not total:
        return {}
    whole = [name for name, size in sizes.most_common() if size >= _WHOLE_FROM * total]
    return {"share": round(1 - sum(sizes.values()) / total, 3), "whole": whole[:8]}
