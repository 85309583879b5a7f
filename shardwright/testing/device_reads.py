"""Reads for which the host would wait for a device, found on a CPU that stands for one.

    with DeviceReads() as reads:
        model, optimizer, *_ = booster.boost(model, optimizer)     what is on the device follows from parameters
        step()                                                     warm
        with reads.counting():
            step()
    reads.places                                                   {"masking_utils.py:311 _local_scalar_dense": 1}

On a CPU host and device are one memory, so tensors are followed instead: those of the device are the ones named by
`on_device`, what arrives in messages, what is made on the device of another, and everything computed from or written
with such a tensor. A batch is on the host until it is moved: inside, `shardwright.utils.transfer` makes a copy there,
which is on the device. Tensors of the host say that they are on `cpu:1`, so that the two are not taken for each other.

What travels the other way is waited for as well, unless the copy is `non_blocking`: `torch.tensor(numbers,
device=device)`, `host.to(device)`, `on_device.copy_(host)`, and host memory as an index of what is on the device.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..utils import transfer
from ..utils.pytree import TorchDispatchMode, tree_leaves
from .calls import replaced

_aten = torch.ops.aten
# Operators whose result's shape, or Python's next step, depends on numbers in a tensor.
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.nonzero_static.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten._unique.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim_consecutive.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
_BY_INDICES = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
# Methods that look into memory without an operator on the CPU.
_METHODS = {"tolist", "numpy", "cpu", "__array__"}
_RECEIVING = ("recv_", "recv_any_source_", "irecv")
_FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "new_tensor"}
_MAKERS = {"zeros", "ones", "full", "empty", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"}
_MAKERS |= {"empty_strided", "scalar_tensor", "tril_indices", "triu_indices", "logspace", "range"}
_DEVICE, _HOST = torch.device("cpu"), torch.device("cpu", 1)  # as tensors say here


class DeviceReads:
    """`places` counts reads by file, line and operator, of what the package and transformers call."""

    def __init__(self, on_device: Iterable[torch.Tensor] = ()) -> None:
        self.places: Counter[str] = Counter()
        self._storages: dict[int, StorageWeakRef] = {}
        self._is_counting = False
        self._stack = ExitStack()
        self.add(on_device)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are on the device from now on."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` would be on the device."""
        if tensor.device.type != "cpu":
            return False
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def __enter__(self) -> DeviceReads:
        self._stack.enter_context(transfer.pretended(self._moved))
        self._stack.enter_context(_Operators(self))
        methods = self._stack.enter_context(_Methods(self))
        # torch (2.11 to 2.13) runs backwards, with the hooks in them, inside of what the mode was shown, without it
        self._stack.enter_context(replaced(torch.autograd, "_engine_run_backward", partial(_under, methods)))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.holds(tensor):
            return tensor
        copy = tensor.clone()
        self.add([copy])
        return copy

    def note(self, what: str) -> None:
        if not self._is_counting:
            return
        frames = [frame for frame in traceback.extract_stack() if "testing/device_reads" not in frame.filename]
        own = [frame for frame in frames if "/shardwright/" in frame.filename or "/transformers/" in frame.filename]
        frame = (own or frames)[-1]
        self.places[f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {what}"] += 1


def _under(mode: TorchFunctionMode, run: Callable[..., Any]) -> Callable[..., Any]:
    def under_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    return under_mode


class _Operators(TorchDispatchMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads, given = self._reads, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(map(reads.holds, given))
        if here and _waits(func, args, kwargs, reads.holds):
            reads.note(func.__name__.partition(".")[0])
        result = func(*args, **kwargs)
        if here and func is not _aten._local_scalar_dense.default:
            reads.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            if func._schema.is_mutable and func is not _aten.copy_.default:
                reads.add(_written(func, args, kwargs))
            elif func is _aten.copy_.default and reads.holds(args[1]):
                reads.add(args[:1])
        elif func.namespace == "c10d" and func.__name__.startswith(_RECEIVING):
            reads.add(given)
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name, reads = kwargs or {}, getattr(func, "__name__", ""), self._reads
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        held = first is not None and reads.holds(first)
        if name == "__get__" and first is not None and func == torch.Tensor.device.__get__:
            return _HOST if first.device == _DEVICE and not held else first.device
        given = [*args[first is not None :], *kwargs.values()]
        to_host = any(isinstance(part, str) and part == "cpu" for part in given) or _names(_HOST, given)
        to_device = _names(_DEVICE, given)
        if held and (name in _METHODS or (name == "to" and to_host)):
            reads.note(name)
        travels = not held and to_device and name in ("to", *_FROM_NUMBERS)
        if (travels or (held and _is_filled_from_host(name, given, reads.holds))) and not _is_let_go(given, kwargs):
            reads.note(f"{name} from the host")
        result = func(*_here(args), **dict(zip(kwargs, _here(kwargs.values()), strict=True)))
        if travels and first is not None:
            result = result.clone()
        if travels or (to_device and name in _MAKERS):
            reads.add([result])
        return result


def _names(device: torch.device, given: Iterable[Any]) -> bool:
    return any(isinstance(part, torch.device) and part == device for part in given)


def _here(given: Iterable[Any]) -> list[Any]:
    return [_DEVICE if isinstance(part, torch.device) and part == _HOST else part for part in given]


def _is_let_go(given: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host does not wait for the copy: `non_blocking`, by name or place."""
    return bool(kwargs.get("non_blocking")) or any(part is True for part in given)


def _is_filled_from_host(name: str, given: Sequence[Any], holds: Callable[[torch.Tensor], bool]) -> bool:
    """A number is launched with the kernel that fills, in `x[0] = 1.0` as well."""
    if name not in ("copy_", "__setitem__") or not isinstance(given[-1], torch.Tensor):
        return False
    source = given[0] if name == "copy_" else given[-1]
    return not holds(source) and (name == "copy_" or source.dim() > 0)


def _waits(func: Any, args: Any, kwargs: dict[str, Any], holds: Callable[[torch.Tensor], bool]) -> bool:
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in _WAITING:
        return True
    if func in _BY_INDICES:
        if any(index is not None and index.dim() and not holds(index) for index in args[1]):
            return True  # a list of numbers
        by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        filled = len(args) > 2 and args[2].numel() == 1  # which torch computes as masked_fill
        return by_mask and not filled
    return False


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operator writes to; all of a collective's."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        writes = func.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write)
        if writes:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
