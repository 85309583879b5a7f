"""Bytes of tensors that are alive, counted by what torch's operators are given and return: the same on every device,
and without what an allocator keeps beside them.

    with LiveBytes() as live:
        model, optimizer = ...
        kept, most = live.of_steps(step)       between steps, and the most within one
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.lazy_logits import LazyLogits
from ..utils.streams import makes_host_memory
from .fakes import has_memory
from .gradient_sums import GradientSums

_DEVICE = torch.ops.prim.device.default


class Point(NamedTuple):
    """grown   bytes of memory that an operator was the first to touch
    filled  bytes by which known memory has become larger since the point before
    held    bytes by label, behind it"""

    grown: int
    filled: int
    held: Counter[Hashable]


class _Met:
    """A memory that was met.

    size     bytes when it was looked at last; it may be emptied and filled
    label    where it was met first
    on_host  whether it is host memory that does not count
    """

    __slots__ = ("label", "on_host", "reference", "size")

    def __init__(self, reference: StorageWeakRef, size: int, label: Hashable, on_host: bool) -> None:
        self.reference, self.size, self.label, self.on_host = reference, size, label, on_host

    def now(self) -> int | None:
        """Bytes; None where it is gone."""
        # checked on torch 2.13: StorageWeakRef says by itself only whether it has expired
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return None if storage is None else storage.nbytes()


class LiveBytes(GradientSums):
    """Every memory that an operator of this block was given or has returned, and that is still there.

    given      whether memory counts that operators were given and have not made here
    host       whether host memory counts: what `host_memory` has made, and operators from it alone
    looked_at  bytes of a new memory that make it worth while to look whether there have never been more
    label      called for new memory, where it is wanted what holds the most
    most       bytes, since it was set last
    by_label   bytes at that moment, with `label`
    during     what `moment` returned then
    points     None, or a list to which is added what there is behind every operator that makes large memory
    """

    def __init__(
        self,
        looked_at: int = 0,
        given: bool = True,
        label: Callable[[], Hashable] | None = None,
        moment: Callable[[], str] | None = None,
        host: bool = True,
    ) -> None:
        super().__init__()
        self._given = given
        self._host = host
        self._label = label
        self._moment = moment
        self._met: dict[int, _Met] = {}
        self._looked_at = looked_at
        self._bound = 0  # there are no more than this now
        self._filled = 0  # since the last point
        self.most = 0
        self.by_label: Counter[Hashable] = Counter()
        self.during = ""
        self.points: list[Point] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = self.unwatched(func, args)
        result = func(*args, **(kwargs or {}))
        if func is _DEVICE:
            return result
        before = self._bound
        large = self._look(result, made_of=(args, kwargs or {}))
        if self._given:
            large |= self._look(args)
            if kwargs:
                large |= self._look(kwargs)
        if large and self.points is not None:
            grown, held = self._bound - before, self.holdings()
            self.points.append(Point(grown, self._filled, held))
            self._bound, self._filled = sum(held.values()), 0
        elif large and self._bound > self.most:
            now = self.bytes()
            if now > self.most:
                self.most = now
                if self._label is not None:
                    self.by_label = self.holdings()
                if self._moment is not None:
                    self.during = self._moment()
        return result

    def _look(self, tree: Any, made_of: Any = None) -> bool:
        """Note the memory of all tensors in nested lists; whether any of it is large and new. `made_of`: what an
        operator was given that has returned them.
        """
        if isinstance(tree, torch.Tensor):
            return self._note(tree, made_of)
        if isinstance(tree, list | tuple):
            found = False
            for part in tree:
                found |= self._look(part, made_of)
            return found
        return isinstance(tree, dict) and self._look(list(tree.values()), made_of)

    def _note(self, tensor: torch.Tensor, made_of: Any) -> bool:
        if isinstance(tensor, LazyLogits) or not has_memory(tensor):
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        met = self._met.get(storage._cdata)
        if met is not None and not met.reference.expired():
            if not met.on_host:
                self._bound += max(size - met.size, 0)
                self._filled += max(size - met.size, 0)
            met.size = size
            return False
        label = self._label() if self._label is not None else None
        on_host = not self._host and made_of is not None and (makes_host_memory() or self._are_on_host(made_of))
        self._met[storage._cdata] = _Met(StorageWeakRef(storage), size, label, on_host)
        if on_host:
            return False
        self._bound += size
        return size > self._looked_at

    def _are_on_host(self, tree: Any) -> bool:
        """Whether there are tensors in nested lists, and all of them, single numbers apart, are in host memory."""
        found = list(self._places(tree))
        return bool(found) and all(found)

    def _places(self, tree: Any) -> Iterator[bool]:
        if isinstance(tree, torch.Tensor):
            if tree.dim() and not isinstance(tree, LazyLogits) and has_memory(tree):
                met = self._met.get(tree.untyped_storage()._cdata)
                yield met is not None and met.on_host
        elif isinstance(tree, list | tuple | dict):
            for part in tree.values() if isinstance(tree, dict) else tree:
                yield from self._places(part)

    def bytes(self) -> int:
        """Now."""
        total = 0
        for key, met in list(self._met.items()):
            size = met.now()
            if size is None:
                del self._met[key]
            else:
                met.size = size
                total += 0 if met.on_host else size
        self._bound = total
        return total

    def holdings(self) -> Counter[Hashable]:
        """Bytes now, by label."""
        found: Counter[Hashable] = Counter()
        for key, met in list(self._met.items()):
            size = met.now()
            if size is None:
                del self._met[key]
            elif not met.on_host:
                found[met.label] += size
                self._filled += max(size - met.size, 0)
                met.size = size
        return found

    def relabel(self, label: Hashable) -> None:
        """Give all that is there now another label."""
        for met in self._met.values():
            met.label = label

    def of_steps(self, step: Callable[[], None]) -> tuple[int, int]:
        """Bytes kept between steps, and the most within one; the first makes what lasts."""
        step()
        gc.collect()
        self.most = kept = self.bytes()
        step()
        return kept, self.most
