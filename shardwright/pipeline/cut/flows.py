"""What every tensor of a dry run was made of: followed by storage, operator by operator, below autograd.

An *atom* is something that a tensor can be made of (a parameter, what a unit returned, what was made inside of a
layer), and a mask is a set of atoms, a bit each. For an operator that reads tensors x and makes y

    mask(y)           = union of mask(x)                              , and the atom of the layer that it runs in
    mask(written x)   = union of mask(x), with its own before         , the same

where a mask belongs to a storage: `detach()`, `.data`, views, lists of tensors and what `torch.vmap` runs are seen like
everything else. Operators that look at shapes alone (`zeros_like`) make nothing of what they are given.

What leaves tensors for Python (`.item()`, `if x.any()`, `x[mask].shape`) may turn everything that comes later: such
masks are those of the `Region` in which it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...utils import pytree
from ..operators import PAST_OPERATORS, SHAPES_FOLLOW_DATA, may_write, reads_data, tensors_in, written_by

_aten = torch.ops.aten

# The result depends on the shape, dtype and device of what they get first, not on what is in it.
_LIKE_FIRST = frozenset(
    [f"aten::{what}_like" for what in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")]
    + [f"aten::new_{what}" for what in ("zeros", "ones", "empty", "empty_strided", "full")]
)
_OVERWRITES = frozenset(["aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_"])
# Those that read every tensor of a list as a number, below all modes.
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class _Kind(NamedTuple):
    """Of an operator."""

    is_view: bool = False
    is_higher: bool = False
    may_write: bool = False
    may_ask: bool = False  # whether it may tell Python what is in a tensor
    overwrites: bool = False
    first_read: int = 0  # number of the first tensor whose contents matter


_kinds: dict[int, _Kind] = {}  # by id: operators stay


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator of higher order
        kind = _Kind(is_higher=True)
    else:
        kind = _Kind(
            is_view=func.is_view,
            may_write=may_write(func),
            may_ask=func is _aten.index.Tensor or any(tag in func.tags for tag in SHAPES_FOLLOW_DATA),
            overwrites=schema.name in _OVERWRITES,
            first_read=int(schema.name in _LIKE_FIRST),
        )
    _kinds[id(func)] = kind
    return kind


@dataclass
class Region:
    """A part of the forward that runs.

    atom      of what is made in it; 0: it leaves no mark
    on_write  of what is written in it, besides
    numbers   what it has read off tensors, which turns what comes later in it
    reaches_out  whether it has written to what was there before it
    """

    atom: int = 0
    on_write: int = 0
    numbers: int = 0
    reaches_out: bool = False
    start: int = 0


class Flows(pytree.TorchDispatchMode):
    """While active, knows the mask of every storage. It has to be the innermost of all dispatch modes."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._bits: dict[Hashable, int] = {}
        self._atoms: list[Hashable] = []
        self._masks: dict[int, int] = {}  # by storage
        self._born: dict[int, int] = {}
        self._clock = 0
        self._kept: list[StorageWeakRef] = []  # so that no storage gets the address of another one
        self._regions: list[Region] = [Region()]
        self._inner = self._on_write = 0
        self._paused = False
        self._python = _PastOperators(self)
        self._aliases: dict[int, list[tuple[int, int]]] = {}
        self.written: set[int] = set()  # storages
        self._added_to: set[int] = set()  # those in which there is something made of what was there before

    # Atoms and masks -------------------------------------------------------------------------------------------------

    def bit(self, atom: Hashable) -> int:
        if atom not in self._bits:
            self._bits[atom] = 1 << len(self._atoms)
            self._atoms.append(atom)
        return self._bits[atom]

    def atoms(self, mask: int) -> Iterator[Any]:
        while mask:
            lowest = mask & -mask
            yield self._atoms[lowest.bit_length() - 1]
            mask ^= lowest

    def mask(self, tensor: torch.Tensor) -> int:
        return self._masks.get(self._key(tensor), 0)

    def union(self, tensors: Iterable[torch.Tensor]) -> int:
        found = 0
        for tensor in tensors:
            found |= self.mask(tensor)
        return found

    def set(self, tensor: torch.Tensor, mask: int) -> None:
        self._masks[self._key(tensor, self._clock)] = mask

    def add(self, tensor: torch.Tensor, mask: int) -> None:
        key = self._key(tensor)
        self._masks[key] = self._masks.get(key, 0) | mask

    def is_written(self, tensor: torch.Tensor) -> bool:
        return self._key(tensor) in self.written

    def is_added_to(self, tensor: torch.Tensor) -> bool:
        """Whether what was written to it is made of what it held."""
        return self._key(tensor) in self._added_to

    def is_new(self, tensor: torch.Tensor, region: Region) -> bool:
        """Whether its memory came into being in the region."""
        return self._born.get(self._key(tensor), -1) >= region.start

    def is_one(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether they are of the same memory."""
        return self._key(one) == self._key(other)

    def share(self, one: torch.Tensor, other: torch.Tensor, atom: int) -> None:
        """Both are one in the model's own forward: who reads one depends on what is written to the other, and on
        `atom`.
        """
        first, second = self._key(one), self._key(other)
        self._aliases.setdefault(first, []).append((second, atom))
        self._aliases.setdefault(second, []).append((first, atom))

    def _key(self, tensor: torch.Tensor, born: int = 0) -> int:
        """born: when it came into being, if it is not known; what operators have not made was there before."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse: it has none
            self._kept.append(tensor)  # type: ignore[arg-type]
            return id(tensor)
        key: int = storage._cdata
        if key not in self._born:
            self._born[key] = born
            self._kept.append(StorageWeakRef(storage))
        return key

    # Regions ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def enter(self, region: Region) -> Region:
        self._clock += 1
        region.start = self._clock
        self._regions.append(region)
        self._sum_up()
        return region

    def leave(self, region: Region) -> None:
        """With all that an error has left open in it."""
        while self._regions.pop() is not region:
            pass
        self._sum_up()

    def _sum_up(self) -> None:
        self._inner = self._on_write = 0
        for region in self._regions:
            self._inner |= region.atom
            self._on_write |= region.on_write

    @property
    def numbers(self) -> int:
        """What turns what comes now, in all regions that run."""
        found = 0
        for region in self._regions:
            found |= region.numbers
        return found

    def note_numbers(self, mask: int) -> None:
        """The forward reads numbers off what has this mask."""
        self._regions[-1].numbers |= mask

    # Operators -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Flows:
        self._python.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._python.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(id(func)) or _kind_of(func)
        if kind.is_view or self._paused:
            if func is _aten.lift_fresh.default:  # torch.tensor(...): made outside of operators
                self._key(args[0], self._clock)
            return func(*args, **kwargs)
        if kind.is_higher:
            read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        else:
            read = list(tensors_in(args))
            if kwargs:
                read += tensors_in(kwargs.values())
        given = [self._key(tensor) for tensor in read]
        mask = 0
        for key in given[kind.first_read :]:
            mask |= self._masks.get(key, 0)
        if kind.may_ask and reads_data(func, args):
            self.note_numbers(self._shape_mask(func, args, mask))
        written = list(written_by(func, args, kwargs)) if kind.may_write else ()
        output = func(*args, **kwargs)
        mask |= self._inner
        for tensor in written:
            self._write(tensor, mask, kind, args)
        for tensor in (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and (key := self._key(tensor, self._clock)) not in given:
                self._masks[key] = self._masks.get(key, 0) | mask
        return output

    def _write(self, tensor: torch.Tensor, mask: int, kind: _Kind, args: tuple[Any, ...]) -> None:
        key = self._key(tensor)
        if not kind.overwrites or self.union(tensors_in(args[1:])) & self._masks.get(key, 0):
            self._added_to.add(key)
        if kind.overwrites and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            mask = self.union(tensors_in(args[1:])) | self._inner
        else:
            mask |= self._masks.get(key, 0)
        self._masks[key] = mask | self._on_write
        self.written.add(key)
        for region in self._regions:
            region.reaches_out |= self._born[key] < region.start
        for other, atom in self._aliases.get(key, ()):
            self._masks[other] = self._masks.get(other, 0) | self._masks[key] | atom

    def _shape_mask(self, func: Any, args: tuple[Any, ...], mask: int) -> int:
        """What decides about the number, or the shape, that the operator gives."""
        if func is _aten.index.Tensor:
            return self.union(tensors_in(args[1]))
        if func is _aten.masked_select.default:
            return self.mask(args[1])
        return mask


class _PastOperators(TorchFunctionMode):
    """Sees what is read past operators."""

    def __init__(self, flows: Flows) -> None:
        super().__init__()
        self._flows = flows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PAST_OPERATORS and not self._flows._paused:
            self._flows.note_numbers(self._flows.mask(args[0]))
        if func in _FROM_NUMBERS and args and isinstance(args[0], list | tuple) and not self._flows._paused:
            self._flows.note_numbers(self._flows.union(tensors_in(args[0])))
        return func(*args, **(kwargs or {}))
