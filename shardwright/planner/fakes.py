"""Tensors that have a shape, a dtype and a place, and no memory: code that was written for a CPU runs on them as it is.

    with Fakes():
        model, optimizer, *_ = booster.boost(lazy_model, optimizer)     # all floating tensors made here are fakes
        ...                                                             # and so is what is computed from them

Whole numbers and truth values stay real, since hosts look at them: ids, masks, counts, headers of messages. So do
single numbers, tables of ones (which masks of floating dtype are made of) and what was there before. Collectives of
fakes, and messages, are over at once. What a host reads off a fake is made up: a loss of 1, a condition that does not
hold. So is where the largest of some fakes are (`lots`).

Of a job of GPUs attention and dropout are kernels that a CPU does not have (`fused_kernels`).
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ..comm.compat import finished_work
from ..models.dry_run import nonzero_of
from ..utils.device import chosen_as_for
from ..utils.pytree import TorchDispatchMode
from .fake_kernels import find_fake
from .fused_kernels import fused_kernels
from .lots import largest

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_MOST_ONES = 2**22  # of samples and tokens
_ROOM = 2**40  # of a memory among the addresses of fakes, which are further apart
_MAKERS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.rand.default,
    _aten.randn.default,
}
_WITH_INPUT = ("_allgather_base_", "alltoall_base_", "_reduce_scatter_base_")  # collectives: output, input


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory, or would have it if it were no fake."""
    return tensor.fake_device.type != "meta" if isinstance(tensor, FakeTensor) else not tensor.is_meta


class Fakes(TorchDispatchMode):
    """See above.

    Checked on torch 2.11 and 2.13: `torch._subclasses.fake_tensor`, which has no public name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_addresses())
        self._stack.enter_context(_silence())
        if chosen_as_for("cpu") == "cuda":
            self._stack.enter_context(fused_kernels())
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked for more often than anything is computed
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func.namespace == "c10d":
            _answer(func, args)
            return (args[0], finished_work()) if len(func._schema.returns) == 2 else finished_work()
        if any(issubclass(kind, FakeTensor) for kind in types):
            return self._compute(func, args, kwargs)
        if func in _MAKERS and _is_for_numbers(args, kwargs) and not _may_be_mask(func, args):
            with self._mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _aten.nonzero.default:
            return nonzero_of(args[0])
        if (found := find_fake(self._mode, func, args, kwargs)) is not None:
            return found
        with self._mode:
            if func is _aten._grouped_mm.default:  # its shape rule knows bfloat16 alone (torch 2.13)
                first, second, *others = args
                return func(first.bfloat16(), second.bfloat16(), *others, **kwargs).to(first.dtype)
            try:
                result = func(*args, **kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException) as error:
                raise ValueError(
                    f"a step of this model cannot be replayed without data: what {func} returns goes by the numbers "
                    "that it is given. Leave out --peak or --html, or plan the model with another head or loss"
                ) from error
            # Checked on torch 2.13: the first of a kind is referred to weakly, so that it cannot be swapped with a
            # parameter; others are not
            if func is _aten.detach.default and weakref.getweakrefcount(result):
                result = func(*args, **kwargs)
        if func is _aten.topk.default:
            return result[0], _by_lot(args[0], args[2] if len(args) > 2 else -1, result[1])
        if func is _aten.max.dim:
            return result[0], _by_lot(args[0], args[1], result[1])
        if func is _aten.argmax.default:
            return _by_lot(args[0], args[1] if len(args) > 1 else None, result)
        return result


@contextmanager
def _addresses() -> Iterator[None]:
    """Inside, fakes have addresses: code asks by them which tensors share memory. Of those that have some, torch copies
    the memory (`copy.deepcopy`), and what a fake is set to is never let go of (checked on torch 2.11 and 2.13).
    """
    fakes = set[int]()
    of_storage = torch.UntypedStorage.data_ptr

    def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = torch.Tensor.untyped_storage(tensor)
        fakes.add(storage._cdata)
        return storage

    def start_of(storage: torch.UntypedStorage) -> int:
        return storage._cdata * _ROOM if storage._cdata in fakes else of_storage(storage)

    def address_of(tensor: torch.Tensor) -> int:
        return start_of(storage_of(tensor)) + int(tensor.storage_offset()) * tensor.dtype.itemsize

    with ExitStack() as stack:
        for cls, name, function in (
            (FakeTensor, "untyped_storage", storage_of),
            (FakeTensor, "data_ptr", address_of),
            (FakeTensor, "__deepcopy__", _deep_copy),
            (torch.UntypedStorage, "data_ptr", start_of),
        ):
            stack.callback(delattr, cls, name)
            assert name not in vars(cls), (cls, name)
            setattr(cls, name, function)
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Without what torch logs, beside the error, when an operator cannot be called on fakes."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # which refuses
    if id(tensor) not in memo:
        copied = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = copy.deepcopy(tensor.grad, memo)
        others = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
        vars(copied).update(copy.deepcopy(others, memo))
    found: torch.Tensor = memo[id(tensor)]
    return found


def _by_lot(numbers: torch.Tensor, dim: int | None, places: FakeTensor) -> torch.Tensor:
    """Whole numbers, which are real like others, in place of fakes."""
    return largest(numbers.shape, dim, places.shape) if places.fake_device.type == "cpu" else places


def _is_for_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a new tensor of more than a number is asked for, of floating dtype or bare bytes (which weights are made
    in), and not on the meta device.
    """
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or torch.get_default_dtype()
    on_meta = device is not None and torch.device(device).type == "meta"
    return len(args[0]) > 0 and (dtype.is_floating_point or dtype == torch.uint8) and not on_meta


def _may_be_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether ones are asked for as decoders make them that are given no mask (BART). Attention has a kernel for
    those that hide nothing, and looks.
    """
    return func is _aten.ones.default and len(args[0]) == 2 and math.prod(args[0]) <= _MOST_ONES


@torch.no_grad()
def _answer(collective: Any, args: tuple[Any, ...]) -> None:
    """Fill what others would have sent, as far as it is real: with what this rank has sent itself, or zeros."""
    name, first = collective._schema.name.removeprefix("c10d::"), args[0]
    if name in ("recv_", "recv_any_source_"):
        for tensor in first:
            if not is_fake(tensor):
                tensor.zero_()
    elif name == "allgather_":
        for outputs, own in zip(first, args[1], strict=True):
            for output in outputs:
                if not is_fake(output) and not is_fake(own):
                    output.copy_(own)
    elif name in _WITH_INPUT and not is_fake(first) and not is_fake(args[1]):
        own = args[1].reshape(-1)
        for start in range(0, first.numel(), max(own.numel(), 1)):
            part = first.view(-1)[start : start + own.numel()]
            part.copy_(own[: part.numel()])
