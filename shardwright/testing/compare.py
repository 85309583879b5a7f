"""Parallel against single process: loss, every gradient and every updated weight, by full name.

The reference is the plain model, trained on the whole batch in one process. The other side is what this rank holds of
the parallel model: all of it, a pipeline stage, shards described by `ParamSpec`, or FSDP2's DTensors. `compare_models`
cuts the reference to the same shape and names what differs:

    with keep_float64():
        reference_losses = train_steps(reference, reference_optimizer, batches)
        losses = train_steps(model, optimizer, batches)
    compare_models(reference, model, coordinate=mesh.coordinate, losses=(reference_losses, losses))

Tolerances. A difference is measured against a scale and must not exceed the tolerance of the dtype (`TOLERANCES`):
    losses, weights   scale = max(1, largest absolute reference value of that tensor)
    gradients         scale = max(largest absolute value of that reference gradient, GRADIENT_FLOOR * the largest one of
                      all reference gradients): gradients are often far below 1, where an absolute bound would see
                      nothing, and some are exactly zero in theory (the bias of keys under softmax), where only the
                      scale of the others says what rounding may leave
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..interface.model import ModelWrapper
from ..spec import ParamSpec, get_spec
from ..utils.errors import counted
from .compare_report import Difference, MismatchError, Report

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GRADIENT_FLOOR = 1e-2
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

Coordinate = int | Mapping[str, int] | Callable[[str], int]


def compare_models(
    reference: nn.Module,
    model: nn.Module,
    *,
    coordinate: Coordinate = 0,
    losses: tuple[Any, Any] | None = None,
    gradients: bool | Mapping[str, torch.Tensor | None] = True,
    weights: bool = True,
    tolerance: float | None = None,
    gradient_floor: float = GRADIENT_FLOOR,
    check: bool = True,
) -> Report:
    """Compare what this rank holds of `model` with `reference`; raises `MismatchError` with the worst parameters.

    Call it when the gradients are synchronised, on all ranks alike (DTensors are gathered). Parameters that carry a
    `ParamSpec` are compared under `spec.name`, shard against shard; padding is left out. Parameters of other stages (on
    the meta device or released) are not compared: `check_complete` tells whether the ranks together hold everything.

    coordinate   this rank's place along the axis of the shards: `mesh.coordinate`, a mapping from axes, or a number
    losses       (reference, parallel): numbers or tensors, for example what `train_steps` returned
    gradients    False leaves them out; a mapping from full names brings gradients that are not in `.grad`
    weights      False leaves the weights out
    tolerance    instead of that of each parameter's dtype
    gradient_floor  smallest scale of a gradient, as a share of the largest one of the model; 1 measures all against
                    that one, which is what fp32 can promise after steps of Adam have carried rounding into the weights
    check        False returns the report of a comparison that failed, too

    A missing gradient equals a reference gradient that is missing or zero, nothing else.
    """
    expected = _named_parameters(reference)
    held = _held_parameters(model, expected)
    report = Report()
    if losses is not None:
        report.add(_compare_losses(*losses, tolerance))
    largest = max(
        (float(p.grad.abs().max()) for p in expected.values() if p.grad is not None and p.grad.numel()), default=0.0
    )
    for name, parameter in held.items():
        spec = get_spec(parameter)
        if name not in expected:
            report.add(Difference("parameter", name, note="not a parameter of the reference"))
            continue
        problem = _layout_problem(expected[name], spec)
        if problem:
            report.add(Difference("parameter", name, note=problem))
            continue
        report.held.add(name)
        allowed = tolerance if tolerance is not None else TOLERANCES[parameter.dtype]
        part = _Part(spec, _coordinate(coordinate, spec))
        if weights:
            report.add(_difference("weight", name, expected[name], parameter, part, allowed, floor=1.0))
        if gradients is not False:
            actual = parameter.grad if gradients is True else gradients.get(name)
            report.add(_gradient_difference(name, expected[name].grad, actual, part, allowed, gradient_floor * largest))
    # Tied parameters have several names; who holds one holds all of them.
    shared = {id(expected[name]) for name in report.held}
    report.held |= {name for name, parameter in expected.items() if id(parameter) in shared}
    if check:
        report.check()
    return report


def check_complete(reference: nn.Module, held: Iterable[Iterable[str]]) -> None:
    """Raise `MismatchError` unless the names that the ranks compared (`report.held` of each) make up the whole
    reference.
    """
    missing = sorted(set(_named_parameters(reference)) - {name for names in held for name in names})
    if missing:
        raise MismatchError(f"no rank holds {counted(len(missing), 'parameter')}: {', '.join(missing)}")


# --- which parameters ---


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All names, those of tied parameters too, without the prefixes of wrappers."""
    return {_plain(name): parameter for name, parameter in _unwrapped(model).named_parameters(remove_duplicate=False)}


def _held_parameters(model: nn.Module, expected: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters that this rank holds, each under one name: that of its spec, or one that the reference has."""
    held: dict[str, nn.Parameter] = {}
    seen: dict[int, str] = {}
    for name, parameter in _named_parameters(model).items():
        spec = get_spec(parameter)
        if parameter.is_meta or (
            parameter.numel() == 0 and name in expected and expected[name].numel() and spec is None
        ):
            continue
        name = spec.name if spec is not None else name
        known = seen.get(id(parameter))
        if known is None or (known not in expected and name in expected):
            held.pop(known or "", None)
            held[name] = parameter
            seen[id(parameter)] = name
    return held


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def _plain(name: str) -> str:
    """The name without what wrappers add: `module.` at the front (DDP), others also inside (checkpointing of single
    layers).
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts[0] == "module":
        del parts[0]
    return ".".join(parts)


# --- one parameter ---


class _Part:
    """Which part of a full tensor this rank holds."""

    def __init__(self, spec: ParamSpec | None, coordinate: int) -> None:
        self.spec = spec
        self.coordinate = coordinate

    def pair(self, full: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | str:
        """Reference and local values to compare, in float64; a sentence when their shapes do not fit."""
        full, local = _whole(full), _whole(local)
        if self.spec is None or self.spec.dim is None:
            if full.shape != local.shape:
                return f"shape {tuple(local.shape)} instead of {tuple(full.shape)}"
            return full, local
        dim, shape = self.spec.dim, self.spec.local_shape(self.coordinate)
        if tuple(local.shape) != shape:
            return f"shard of shape {tuple(local.shape)} instead of {shape}, which its spec says"
        runs = self.spec.local_runs(self.coordinate, 0, self.spec.full_shape[dim])
        full = self.spec.block_of(full, self.coordinate)
        if not runs:
            return full.narrow(dim, 0, 0), local.narrow(dim, 0, 0)
        return (
            torch.cat([full.narrow(dim, start, length) for start, _, length in runs], dim),
            torch.cat([local.narrow(dim, offset, length) for _, offset, length in runs], dim),
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered over its mesh (a collective), in float64 on the CPU."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).to("cpu", torch.float64)


def _coordinate(coordinate: Coordinate, spec: ParamSpec | None) -> int:
    if spec is None or spec.dim is None or isinstance(coordinate, int):
        return coordinate if isinstance(coordinate, int) else 0
    return coordinate[spec.axis] if isinstance(coordinate, Mapping) else coordinate(spec.axis)


def _layout_problem(full: torch.Tensor, spec: ParamSpec | None) -> str | None:
    """What is wrong with the spec itself: its shape, or indices that no rank holds."""
    if spec is None:
        return None
    if spec.full_shape != tuple(full.shape):
        return f"its spec says full_shape={spec.full_shape}, the reference has {tuple(full.shape)}"
    if spec.dim is None:
        return None
    covered = torch.zeros(spec.full_shape[spec.dim], dtype=torch.bool)
    for piece in (piece for rank in spec.pieces for piece in rank if not piece.is_padding):
        covered[piece.start : piece.start + piece.length] = True
    lost = (~covered).nonzero().flatten().tolist()
    return f"{len(lost)} indices of dim {spec.dim} are in no rank's pieces, the first is {lost[0]}" if lost else None


def _difference(
    kind: str, name: str, full: torch.Tensor, local: torch.Tensor, part: _Part, allowed: float, floor: float
) -> Difference:
    pair = part.pair(full, local)
    if isinstance(pair, str):
        return Difference(kind, name, note=pair)
    expected, actual = pair
    # The scale is the whole tensor's: a shard of small values is no more accurate than its siblings.
    scale = max(floor, float(full.detach().abs().max()) if full.numel() else 0.0)
    if not expected.numel():
        return Difference(kind, name, 0.0, scale, allowed)
    error = float((expected - actual).abs().max())
    note = "" if torch.isfinite(actual).all() else "not finite"
    return Difference(kind, name, error, scale, allowed, note)


def _gradient_difference(
    name: str, expected: torch.Tensor | None, actual: torch.Tensor | None, part: _Part, allowed: float, floor: float
) -> Difference:
    if expected is None and actual is None:
        return Difference("gradient", name, 0.0, floor, allowed)
    if actual is None:
        assert expected is not None
        largest = float(expected.abs().max())
        return Difference("gradient", name, largest, max(floor, largest), allowed, "missing" if largest else "")
    if expected is None:
        largest = float(_whole(actual).abs().max())
        return Difference("gradient", name, largest, floor, allowed, "the reference has none" if largest else "")
    return _difference("gradient", name, expected, actual, part, allowed, floor)


def _compare_losses(expected: Any, actual: Any, tolerance: float | None) -> Difference:
    first, second = _as_tensor(expected), _as_tensor(actual)
    allowed = tolerance if tolerance is not None else max(TOLERANCES[first.dtype], TOLERANCES[second.dtype])
    return _difference("loss", "loss", first, second, _Part(None, 0), allowed, floor=1.0)


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
