"""Reads for which the host would wait for a device, found on a CPU that stands for one.

    with DeviceReads() as reads:
        model, optimizer, *_ = booster.boost(model, optimizer)     what is on the device follows from parameters
        step()                                                     warm
        with reads.counting():
            step()
    reads.places                                                   {"masking_utils.py:311 _local_scalar_dense": 1}

On a CPU host and device are one memory, so tensors are followed instead: those of the device are the ones named by
`on_device`, what arrives in messages, and everything computed from or written with such a tensor. A batch is on the
host until it is moved: inside, `shardwright.utils.transfer` makes a copy there, which is on the device.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..utils import transfer
from ..utils.pytree import TorchDispatchMode, tree_leaves

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
        self._stack.enter_context(_Methods(self))
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
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and self._reads.holds(args[0]):
            to_host = name == "to" and any(
                isinstance(part, str) and part == "cpu" for part in (*args[1:], *kwargs.values())
            )
            if to_host or name in _METHODS:
                self._reads.note(name)
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: dict[str, Any], holds: Callable[[torch.Tensor], bool]) -> bool:
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in _WAITING:
        return True
    if func in _BY_INDICES:
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
