"""Regions that keep what is dear and recompute what is cheap: the outputs of products and of attention, and the results
of collectives.

A region is a call under `torch.utils.checkpoint` whose forward and recomputation run under a pair of dispatch modes,
below autograd:

    region = Region(selection)
    checkpoint(layer, x, use_reentrant=False, context_fn=region.contexts)

In the forward the outputs of chosen operators are kept. In the recomputation these operators do not run: they return
what was kept, autograd records them with their recomputed inputs, and so backward has all that it would have without a
checkpoint.

[Note: what is kept]
What counts is how many operations the recomputation of a byte takes. An output element of a product costs two for every
element of the contraction, those of elementwise operators, norms, softmax, rotary embeddings and dropout about one, and
all of them have to be written to memory, which on a GPU takes as long as some hundred operations. So kept are the
outputs of

    products      linears, batched and grouped products, convolutions, if an output has no more than MOST_PER_OPERAND
                  elements for every element of its two operands: one that has more comes from a short contraction, as
                  the scores of eager attention over long sequences do (head size), and the second product of LoRA
                  (rank)
    attention     fused kernels, whatever their library

and everything else is recomputed. A user's own choice is a function of the operator's name, or a list of names
("aten.mm").

[Note: what is needed]
Of the outputs of chosen operators only those are kept that autograd saves, or that an operator reads which is
recomputed before the last tensor that autograd saves, where a recomputation ends. The last product of a block, which is
added to the residual stream, is neither. In the recomputation memory without values stands for it. What no operator
reads in the region may be read by something that is none, a kernel of somebody's own or `Tensor.numpy`, or be looked at
later where a module has kept it: if the recomputation gets there, it is kept.

[Note: in-place]
A kept output is the same memory that the forward goes on with. Where an operator writes to it, it is copied before. A
collective in place (`keep_result(..., into=)`) is the exception: what is kept then is its result, and the product
returns that at once. What is edited after the region has returned is found by its version, and refused.

[Note: collectives]
`keep_result` runs a collective once: the recomputation takes its result. Collectives that do not come through it (in
modules of a script's own) run again, in the same order on every rank. c10d operators do not say which arguments they
write to, so all of theirs count.

[Note: random numbers]
An operator that drew random numbers and does not run again must leave the generator as it did: its state is kept with
the output.

A second backward through a region (`retain_graph=True`) recomputes everything: what was kept has been given away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..comm.compat import alias, saved_tensors_hooks_in_use, schema_of
from ..utils.pytree import TorchDispatchMode

MOST_PER_OPERAND = 8
ATTENTION = "aten._scaled_dot_product_flash_attention"

_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_addmm_activation", "_int_mm", "_scaled_mm", "mkldnn_linear"}
)
# return the memory that they are given, but do not say so
_WITHOUT_DATA = frozenset({"_unsafe_view", "_reshape_alias"})

EDITED = (
    "an output of {name} that a selectively recomputed layer keeps was edited in place after the layer had returned, "
    "so that the backward pass would compute with other values; edit a copy of what the layer returns, or recompute "
    "the whole layer (num_ckpt_layers_per_stage=)"
)


class _Facts(NamedTuple):
    """What has to be known about an operator.

    name      namespace and name
    chosen    its outputs are candidates
    reads     it computes with the values of its arguments
    hides     it returns the memory of its argument, but as a tensor that knows nothing of the argument's edits, nor it
              of theirs
    written   positions and names of the arguments that it writes to; None: all of them
    dropout   position and name of the argument that says whether it draws random numbers; (-1, ""): it always does;
              None: it never does
    """

    name: str
    chosen: bool
    reads: bool
    hides: bool
    written: tuple[tuple[int, str], ...] | None
    dropout: tuple[int, str] | None


class Selection:
    """Which operators' outputs are kept: by cost, or those whose names `chosen` accepts. Views and what writes in
    place never are.
    """

    def __init__(self, chosen: Callable[[str], bool] | Collection[str] | None = None) -> None:
        self._by_cost = chosen is None
        self._chosen = is_dear if chosen is None else chosen if callable(chosen) else frozenset(chosen).__contains__
        self._facts: dict[Any, _Facts] = {}

    def keeps(self, name: str) -> bool:
        return self._chosen(name)

    def facts(self, func: Any) -> _Facts:
        found = self._facts.get(func)
        if found is None:
            found = self._facts[func] = self._look_up(func)
        return found

    def is_worth_it(self, facts: _Facts, args: Any, out: Any) -> bool:
        """Whether to keep this output of a chosen operator; see the note above."""
        short = facts.name.rpartition(".")[2]
        if not self._by_cost or not (short in _PRODUCTS or "grouped_mm" in short):
            return True
        first = 1 if "add" in short else 0  # what the product is added to stands before its operands
        return bool(out.numel() <= MOST_PER_OPERAND * sum(operand.numel() for operand in args[first : first + 2]))

    def _look_up(self, func: Any) -> _Facts:
        schema = schema_of(func)
        if schema is None:  # a higher-order operator, such as flex attention
            return _Facts(str(func), self._chosen(str(func)), True, False, (), None)
        namespace, _, short = schema.name.partition("::")
        name = f"{namespace}.{short}"
        returns = [value.alias_info for value in schema.returns]
        is_view = short in _WITHOUT_DATA or (
            bool(returns) and all(info is not None and not info.is_write for info in returns)
        )
        written = tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        dropout = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [argument.name for argument in schema.arguments]
            dropout = (names.index("dropout_p"), "dropout_p") if "dropout_p" in names else (-1, "")
        if namespace == "c10d":
            return _Facts(name, False, True, False, None, None)
        chosen = not written and not is_view and self._chosen(name)
        return _Facts(name, chosen, not is_view, short in _WITHOUT_DATA, written, dropout)


def is_dear(name: str) -> bool:
    """Whether an operator is a product or attention, by its name: "aten.mm", "flash_attn._flash_attn_forward"."""
    if "backward" in name or "bwd" in name:
        return False
    short = name.rpartition(".")[2]
    return (
        short in _PRODUCTS or "grouped_mm" in short or "convolution" in short or "attention" in name or "attn" in name
    )


class _Value:
    """One tensor that was kept.

    tensor   an alias of it; None where its values are not needed
    shape    of it: size, strides, dtype, device
    needed   known to be
    read_at  how many tensors autograd had saved when a recomputed operator read it last; -1: none did
    made_at  how many when it was made
    is_read  an operator has read it, be it one that does not run again
    views    other tensors of its memory whose edits it would not see
    """

    __slots__ = ("is_read", "made_at", "needed", "read_at", "shape", "tensor", "versions", "views")

    def __init__(self, tensor: Tensor, made_at: int) -> None:
        self.tensor: Tensor | None = alias(tensor)
        self.shape = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.needed, self.read_at, self.made_at, self.is_read = False, -1, made_at, False
        self.views: list[Tensor] = []
        self.versions: list[int] = []

    def edits(self) -> list[int]:
        """How often each tensor of its memory has been edited."""
        assert self.tensor is not None
        return [self.tensor._version, *(view._version for view in self.views)]

    def take(self, name: str) -> Tensor:
        if self.tensor is None:
            size, stride, dtype, device = self.shape
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        if self.edits() != self.versions:
            raise ValueError(EDITED.format(name=name))
        return self.tensor


@dataclass(slots=True)
class _Output:
    """What one chosen operator or collective returned; `values` stand in `structure` for its tensors, None: it was
    not kept.
    """

    name: str
    structure: Any = None
    states: list[tuple[torch.device, Tensor]] | None = None  # of generators, behind it


class Region:
    """One call and what it keeps, from its forward to the first recomputation."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.replaying = False
        self.quiet = False  # inside of a collective, or of a recomputation that the forward itself asked for
        self._outputs: list[_Output] = []
        self._next = 0
        self._values: list[_Value] = []
        self._met: dict[int, tuple[torch.UntypedStorage, list[_Value]]] = {}  # by memory
        self._num_saved = 0
        self.closed = False  # the forward has returned

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of the forward and of the recomputation."""
        return self.recording(), _Replaying(self)

    def recording(self) -> AbstractContextManager[Any]:
        return _Recording(self)

    def tensors(self) -> list[Tensor]:
        """What is kept, when the forward has returned."""
        return [value.tensor for value in self._values if value.tensor is not None]

    # Forward ---------------------------------------------------------------------------------------------------------

    def add(self, name: str, result: Any, states: list[tuple[torch.device, Tensor]] | None = None) -> None:
        self._outputs.append(_Output(name, _map(Tensor, self._value, result), states))

    def add_nothing(self, name: str) -> None:
        self._outputs.append(_Output(name))

    def _value(self, tensor: Tensor) -> _Value:
        value, storage = _Value(tensor, self._num_saved), tensor.untyped_storage()
        self._values.append(value)
        self._met.setdefault(id(storage), (storage, []))[1].append(value)
        return value

    def note_saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`."""
        self._num_saved += 1
        for value in self._of(tensor):
            value.needed = True

    def note_read(self, args: Any, again: bool = True) -> None:
        """An operator computes with these, and `again` when it is recomputed."""
        if self._met:
            for tensor in _tensors(args):
                for value in self._of(tensor):
                    value.is_read = True
                    if again:
                        value.read_at = self._num_saved

    def note_view(self, tensor: Tensor) -> None:
        """A tensor of the same memory as what it was made from, with a count of edits of its own."""
        for value in self._of(tensor):
            value.views.append(alias(tensor))

    def copy_before_write(self, args: Any) -> None:
        for tensor in _tensors(args):
            for value in self._of(tensor):
                assert value.tensor is not None
                value.tensor, value.needed, value.views = value.tensor.clone(), True, []
            self._met.pop(id(tensor.untyped_storage()), None)

    def _of(self, tensor: Tensor) -> list[_Value]:
        if not self._met or tensor.layout is not torch.strided:
            return []
        found = self._met.get(id(tensor.untyped_storage()))
        return [] if found is None else found[1]

    def close(self) -> None:
        """The forward has returned: let go of what the recomputation does not read."""
        for value in self._values:
            reader = value.read_at if value.is_read else value.made_at
            if value.needed or 0 <= reader < self._num_saved:
                value.versions = value.edits()
            else:
                value.tensor, value.views = None, []
        self._met.clear()
        self.closed = True

    # Recomputation ---------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Begin a recomputation. From here on only outputs that have not been taken are kept."""
        self._next = 0
        self._values.clear()

    def take(self, name: str) -> _Output | None:
        """The next output; None where it has to be computed."""
        if self._next >= len(self._outputs) or self._outputs[self._next].name != name:
            there = self._outputs[self._next].name if self._next < len(self._outputs) else "nothing"
            raise ValueError(
                f"a selectively recomputed layer called {name} where its forward had called {there}: it computes "
                "something else when it runs again; let it depend on nothing but its inputs, or leave it out of the "
                "recomputation"
            )
        output = self._outputs[self._next]
        self._outputs[self._next] = _Output(name)  # given away
        self._next += 1
        return output if output.structure is not None else None


class _Here(threading.local):
    """Of a thread, as dispatch modes are: a forward and a recomputation may be under way on one each."""

    def __init__(self) -> None:
        self.regions: list[Region] = []  # innermost last


_here = _Here()
_COLLECTIVE = "a collective"


def num_active() -> int:
    """Dispatch modes of regions that are in effect."""
    return len(_here.regions)


def keep_result(compute: Callable[[], Any], into: Tensor | None = None, name: str = _COLLECTIVE) -> Any:
    """The result of `compute`, which in the recomputation of a region is not called: tensors, in tuples or not.

    into   the tensor in whose memory the result lies, which is returned; nobody else may hold it
    name   of the operator that this is, for the user's choice
    """
    if not _here.regions:
        return compute()
    region = _here.regions[-1]
    if name is not _COLLECTIVE and not region.selection.keeps(name):
        return compute()
    if region.quiet:
        return compute()
    if not region.replaying:
        region.quiet = True
        try:
            result = compute()
        finally:
            region.quiet = False
        region.add(name, result)
        return result
    output = region.take(name)
    if output is None:
        return compute()
    kept = _map(_Value, lambda value: value.take(name), output.structure)
    if into is None:
        return kept
    if kept.untyped_storage() is not into.untyped_storage():
        into.copy_(kept)
    return into


class _Recording(TorchDispatchMode):
    """The forward of a region."""

    supports_higher_order_operators = True

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._exit = ExitStack()

    def __enter__(self) -> Any:
        region = self._region
        outer = saved_tensors_hooks_in_use()
        pack, unpack = outer if outer is not None else (_same, _same)

        def note(tensor: Tensor) -> Any:
            region.note_saved(tensor)
            return pack(tensor)

        self._exit.enter_context(saved_tensors_hooks(note, unpack))
        _here.regions.append(region)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        assert _here.regions.pop() is self._region
        self._exit.close()
        self._region.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        region, kwargs = self._region, kwargs or {}
        if region.quiet:
            region.note_read((args, kwargs), again=False)
            return func(*args, **kwargs)
        facts = region.selection.facts(func)
        if facts.written is None:
            region.copy_before_write((args, kwargs))
        elif facts.written:
            region.copy_before_write(list(_chosen_arguments(facts.written, args, kwargs)))
        out = func(*args, **kwargs)
        if facts.chosen:
            if not torch.is_inference_mode_enabled() and region.selection.is_worth_it(facts, args, out):
                region.note_read((args, kwargs), again=False)
                region.add(facts.name, out, _states_behind(facts, args, kwargs))
                return out
            region.add_nothing(facts.name)
        if facts.reads:
            region.note_read((args, kwargs))
        elif facts.hides:
            region.note_view(out)
        return out


class _Replaying(TorchDispatchMode):
    """The recomputation of a region."""

    supports_higher_order_operators = True

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._within_forward = False

    def __enter__(self) -> Any:
        region = self._region
        self._within_forward = not region.closed
        if self._within_forward:
            region.quiet = True
        else:
            region.rewind()
            region.replaying = True
        _here.regions.append(region)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        assert _here.regions.pop() is self._region
        if self._within_forward:
            self._region.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._within_forward:
            return func(*args, **(kwargs or {}))
        facts = self._region.selection.facts(func)
        output = self._region.take(facts.name) if facts.chosen else None
        if output is None:
            return func(*args, **(kwargs or {}))
        for device, state in output.states or ():
            _generators(device).set_rng_state(state)
        return _map(_Value, lambda value: value.take(facts.name), output.structure)


def _states_behind(facts: _Facts, args: Any, kwargs: Any) -> list[tuple[torch.device, Tensor]] | None:
    """States of the generators behind an operator that drew from them."""
    if facts.dropout is None:
        return None
    if facts.dropout[1] and not any(_chosen_arguments((facts.dropout,), args, kwargs)):
        return None
    devices = {tensor.device for tensor in _tensors((args, kwargs))}
    return [(device, _generators(device).get_rng_state()) for device in devices if device.type != "meta"]


def _generators(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _chosen_arguments(places: tuple[tuple[int, str], ...], args: Any, kwargs: Any) -> Iterator[Any]:
    for place, name in places:
        if place < len(args):
            yield args[place]
        elif name in kwargs:
            yield kwargs[name]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _map(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    return type(value)(_map(kind, change, part) for part in value) if isinstance(value, list | tuple) else value


def _same(tensor: Tensor) -> Tensor:
    return tensor
