"""Looks at every operator of a step that is run again, forward and backward, for the first that makes a number that is
not finite of numbers that are, and follows what becomes of it: what never reaches the loss or a gradient is no fault.

Tensors are known by their storage. What is handed in from elsewhere (other ranks, kernels that are no operators) shows
when an operator reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...cluster.heart import heart
from ...pipeline.stubs import is_making_absent
from ...utils.pytree import TorchDispatchMode, tree_leaves
from ...utils.tensors import local_tensor
from .notes import Call
from .origin import BATCH, ELSEWHERE, OPERATION, PARAMETER, Origin
from .place import Places

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted")
_WRITES_DOWN = (
    "full",
    "full_like",
    "new_full",
    "fill",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "scalar_tensor",
    "where",
)
_AWAY = ("c10d", "_c10d_functional", "c10d_functional")  # what they fill is there later


class _Nameless(NamedTuple):
    """The schema of what has none: an operator of operators, as flex attention is."""

    name: str = "nameless"
    is_mutable: bool = False


_NAMELESS = _Nameless()


class Trace(TorchDispatchMode):
    """`reached` is what came to the loss or a gradient of this rank first; `first` what this rank made or was given
    first, which may come to another's.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._places = model, Places(model)
        self._bad: dict[int, Origin] = {}
        self._count = 0
        self._samples = 0
        self._loss: Origin | None = None
        self._gradient: Origin | None = None
        self.first: Origin | None = None

    @property
    def reached(self) -> Origin | None:
        return self._loss or self._gradient

    @contextmanager
    def watching(self) -> Iterator[None]:
        # FSDP2's parameters see no gradient; there `first` is what is known.
        trained = [
            param for param in self._model.parameters() if param.requires_grad and not isinstance(param, DTensor)
        ]
        hooks = [param.register_hook(self._note_gradient) for param in trained]
        try:
            with self._places.watching(), torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, call: Call) -> None:
        """What a call was given may be bad already."""
        self._samples = call.samples()
        for name, value in call.entries():
            made = _described(value)
            if made:
                mild = _is_mild(value)
                rows = _rows_of(value, value.shape[0] if value.dim() else 0)
                self._bad[_key(value)] = Origin(BATCH, name, made, rows, is_mild=mild)

    def note_loss(self, loss: torch.Tensor) -> None:
        if self._loss is None and not _is_finite(loss):
            self._loss = self._bad.get(_key(loss))

    def _note_gradient(self, grad: torch.Tensor) -> None:
        if self._gradient is None and not _is_finite(local_tensor(grad)):
            self._gradient = self._bad.get(_key(local_tensor(grad)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = getattr(func, "_schema", _NAMELESS).name.partition("::")
        if namespace in _AWAY:
            return func(*args, **kwargs)
        if name in _UNWRITTEN:
            result = func(*args, **kwargs)
            for fresh in _tensors(result):
                self._bad.pop(_key(fresh), None)
            return result
        given = list(_tensors((args, kwargs)))
        written = [each for each in given if _mutates(func) and not _is_finite(each)]  # before it is gone
        result = func(*args, **kwargs)
        if namespace == _NAMELESS.name:
            return result
        made = list(_tensors(result))
        for output in made:
            if not _is_finite(output):
                self._note(f"{namespace}.{name}", name, output, given, written, _mutates(func), args)
            elif output.untyped_storage().nbytes() == output.numel() * output.element_size():
                self._bad.pop(_key(output), None)
        return result

    def _note(
        self,
        called: str,
        name: str,
        output: torch.Tensor,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        mutates: bool,
        args: Any,
    ) -> None:
        key = _key(output)
        # what was written over says nothing of what was there before
        read = [each for each in given if not mutates or _key(each) != key or any(each is one for one in written)]
        of = [
            (each, self._bad.get(_key(each)))
            for each in read
            if any(each is one for one in written) or not _is_finite(each)
        ]
        strong = next((origin for _, origin in of if origin is not None and not origin.is_mild), None)
        if strong is not None:
            self._bad[key] = strong = self._with_rows(strong, output)
            if strong.kind == BATCH and (self.first is None or self.first.is_unread):
                self.first = strong
            return
        if name == "full" and is_making_absent():  # nothing that counts comes of it
            self._bad[key] = self._origin(ELSEWHERE, called, output, [], "", False)
            return
        if name == "lift_fresh":  # torch.tensor(...), a number put into a tensor: written down by the script
            self._bad[key] = self._origin(OPERATION, called, output, [], "", True)
            return
        unknown = [each for each, origin in of if origin is None and not _is_mild(each)]
        mild = _is_mild(output)
        if unknown or not (given or name in _WRITES_DOWN):  # bytes that came over a wire are no numbers yet
            self._bad[key] = self._origin(ELSEWHERE, called, unknown[0] if unknown else output, given, "", mild)
            return
        parent = next((origin for _, origin in of if origin is not None), None)
        if mild and (parent is not None or of):
            self._bad[key] = parent or self._origin(ELSEWHERE, called, output, given, "", True)
            return
        on_purpose = name in _WRITES_DOWN and any(
            isinstance(each, float) and not math.isfinite(each) for each in tree_leaves(args)
        )
        told = f"{parent.made} from {parent.name} at {parent.line}" if parent is not None and parent.line else ""
        self._bad[key] = self._origin(OPERATION, called, output, given, told, on_purpose or mild)

    def _origin(
        self, kind: str, called: str, bad: torch.Tensor, given: list[torch.Tensor], mild_from: str, mild: bool
    ) -> Origin:
        self._count += 1
        backward, module, line = self._places.here()
        action: Any = heart.action
        sizes = ", ".join(f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in given[:3])
        of = f"{sizes}{f', with {mild_from}' if mild_from else ''}"
        origin = Origin(
            kind,
            called,
            _described(bad),
            # gradients of weights have rows, too, and as many as a multiple of the samples
            () if backward and bad.dim() and bad.shape[0] != self._samples else _rows_of(bad, self._samples),
            backward,
            action.stage if action is not None else -1,
            action.microbatch if action is not None else -1,
            module,
            line,
            of,
            mild,
            self._count,
        )
        if self.first is None and not mild and kind == OPERATION:
            self.first = origin
        return origin

    def _with_rows(self, origin: Origin, output: torch.Tensor) -> Origin:
        """An entry of the batch, once it is known in which microbatch it was read."""
        action: Any = heart.action
        if origin.kind != BATCH or origin.microbatch >= 0 or action is None:
            return origin
        return replace(origin, microbatch=action.microbatch, stage=action.stage, rows=_rows_of(output, self._samples))


def find_bad(model: nn.Module, held: Iterable[tuple[str, torch.Tensor]]) -> Origin | None:
    """A parameter or buffer that is not finite before the step begins. `held`: what this rank has of parameters."""
    for name, tensor in [*held, *model.named_buffers()]:
        local = local_tensor(tensor.detach())
        if local.is_floating_point() and not _is_finite(local) and not _is_mild(local):
            return Origin(PARAMETER, name, _described(local))
    return None


def _mutates(func: Any) -> bool:
    return bool(getattr(func, "_schema", _NAMELESS).is_mutable)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for each in tree_leaves(tree):
        if isinstance(each, torch.Tensor):
            local = local_tensor(each)
            if local.is_floating_point() and local.device.type != "meta" and local.layout is torch.strided:
                yield local


def _key(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _is_finite(tensor: torch.Tensor) -> bool:
    wide = tensor.detach()
    return bool((wide.float() if wide.element_size() == 1 else wide).isfinite().all())


def _is_mild(tensor: torch.Tensor) -> bool:
    """Whether -inf alone keeps it from being finite."""
    wide = tensor.detach().float() if tensor.element_size() < 4 else tensor.detach()
    return not bool((wide.isnan() | (wide == math.inf)).any())


def _described(tensor: torch.Tensor) -> str:
    """ "nan in 3 of 64 elements", "" for one that is finite."""
    wide = local_tensor(tensor.detach())
    wide = wide.float() if wide.element_size() < 4 else wide
    kinds = {"nan": wide.isnan(), "inf": wide == math.inf, "-inf": wide == -math.inf}
    found = [(kind, int(mask.sum())) for kind, mask in kinds.items()]
    told = [f"{kind} in {count} of {wide.numel()} element{'s' * (wide.numel() != 1)}" for kind, count in found if count]
    return " and ".join(told)


def _rows_of(tensor: torch.Tensor, samples: int) -> tuple[int, ...]:
    """The samples that some of what is not finite belongs to; () where all have it, or dim 0 is none of samples."""
    wide = local_tensor(tensor.detach())
    if samples < 2 or wide.dim() == 0 or wide.shape[0] % samples:
        return ()
    bad = ~(wide.float() if wide.element_size() == 1 else wide).isfinite()
    rows = bad.reshape(samples, -1).any(1).nonzero().flatten().tolist()
    return tuple(rows) if len(rows) < samples else ()
