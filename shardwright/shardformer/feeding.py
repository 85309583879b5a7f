"""Which linears and convolutions of a model feed which, found by autograd on a small copy and not by names.

Every call of one is cut off on both sides: its input x counts as an end, its output y as a beginning of its own.
Features are the last dim of what a linear reads and writes, channels that of a convolution. Grouped convolutions are
no ends: like norms over samples they compute channels by themselves, or within groups.
What autograd finds between an output and an input is then one hop, without a linear in it, and a row of its Jacobian,
d x[f] / d y, is zero wherever feature f was not computed from.

    MLP          x = act(a) * b          feature f of x depends on features f of a and b alone
    attention    x = softmax(q k) v      features of one head depend on those of the same head of q, k and v
    channels     x = act(norm(y))        channel f of x depends on channel f of y, or on those of its group
    residual     x = norm(h + y)         every feature depends on every feature

So features fall into blocks that depend on nothing but each other: as many as there are features for an MLP, as there
are key/value heads for an attention, one for what mixes. Linears whose outputs are used within blocks alone, and by
linears alone, may deal the blocks to ranks (column), and those that read them may sum over ranks (row).

A few features of each input are looked at, which is evidence and no proof: the caller tries what comes out of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models.config import parts as config_parts
from ..models.dry_run import call_model
from ..models.example_inputs import loss_of
from ..utils.pytree import tree_leaves
from .convolution import is_by_channel, is_dropout
from .layer.convolution import channel_dim, is_convolution, is_grouped
from .layer.linear import input_size, is_linear, output_size
from .patterns import any_of, home_of, starred

_SAMPLES = 16  # features of an input that are followed
_PARTS = (1, 2, 3, 4)  # that may lie one after the other in one output: q, k and v; gate and up


@dataclass(frozen=True)
class Feeding:
    """Linears that deal features out, and those that alone take them.

    blocks      of features that depend on nothing but each other
    columns     name -> parts of its output that lie one after the other, each of which has all blocks
    rows        names
    between     names of what computes with the features on the way, each block by itself: grouped convolutions, norms,
                dropouts. Of convolutions alone
    """

    blocks: int
    columns: Mapping[str, int]
    rows: tuple[str, ...]
    between: tuple[str, ...] = ()

    @property
    def patterns(self) -> dict[str, str]:
        """Name -> what the linear is called in all layers that are wired so."""
        home = home_of((*self.columns, *self.rows))
        return {name: starred(name, home) for name in (*self.columns, *self.rows, *self.between)}


@dataclass
class Found:
    """What is known about the linears and convolutions of a model.

    feedings    those that were found, each linear in one of them at most
    outputs     linears whose output the model returns, or makes its loss of, as it is
    reasons     name -> why a linear that was called is in none
    of_pixels   linears whose input has more dims than [samples, tokens, features]
    """

    feedings: list[Feeding] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    of_pixels: list[str] = field(default_factory=list)


def is_cut(module: nn.Module) -> bool:
    """Whether it mixes all of its features: a linear, or a convolution in one group."""
    return is_linear(module) or (is_convolution(module) and not is_grouped(module))


def find_feedings(model: nn.Module, batch: Any, taken: Callable[[str], bool]) -> Found:
    """What feeds what in `model`, for the linears that are not `taken`; nothing is changed in it.

    taken   whether something else was decided about the linear of a name
    """
    traced = _Trace(model, batch)
    hops = _Hops(traced, taken)
    found = Found(outputs=sorted(hops.escaping))
    found.of_pixels = [
        name for name, ends in traced.ends.items() if traced.dims[name] == -1 and any(end.ndim > 3 for end in ends)
    ]
    grouped: set[str] = set()
    is_known = any_of(())  # of layers that go by one name the first one speaks for all
    for row in sorted(traced.ends, key=lambda name: -traced.sizes[name][0] * traced.sizes[name][1]):
        if row in grouped or taken(row) or is_known(row):
            continue
        feeding = _feeding_of(row, hops, traced, taken, grouped)
        if feeding is not None:
            found.feedings.append(feeding)
            grouped |= {*feeding.columns, *feeding.rows}
            is_known = any_of(pattern for each in found.feedings for pattern in each.patterns.values())
    for name in traced.ends:
        if name not in grouped and not taken(name) and not is_known(name):
            found.reasons[name] = hops.reason(name)
    order = {name: place for place, name in enumerate(traced.ends)}
    found.feedings.sort(key=lambda feeding: order[feeding.rows[0]])
    return found


def _feeding_of(
    row: str, hops: _Hops, traced: _Trace, taken: Callable[[str], bool], grouped: set[str]
) -> Feeding | None:
    """All linears that belong together with the one of this name, which reads them; None where any of them cannot."""
    rows, columns = [row], []
    for each in rows:  # which grows
        for column in hops.feeding(each):
            if column in columns:
                continue
            if taken(column) or column in grouped or column in hops.escaping or column in rows:
                return None
            columns.append(column)
            rows += [other for other in hops.fed_by(column) if other not in rows]
    if not columns or any(taken(each) or each in grouped or each in columns for each in rows):
        return None
    if any(hops.mixes(each) for each in rows) or any(traced.shared(name) for name in (*rows, *columns)):
        return None
    of_channels = any(traced.dims[each] != -1 for each in (*rows, *columns))
    between = [each for each in traced.passed_between(columns, rows, of_channels) if {*hops.feeding(each)} & {*columns}]
    if any({*hops.feeding(each)} - {*columns} or hops.mixes(each) for each in between):
        return None
    edges = [(each, column, *edge) for each in (*rows, *between) for column, edge in hops.edges(each).items()]
    widths = {traced.sizes[each][0] for each in (*rows, *between)}
    for blocks in (count for count in range(min(widths), 1, -1) if all(width % count == 0 for width in widths)):
        parts = {column: _parts_of(column, blocks, edges, traced) for column in columns}
        if all(parts.values()):
            return Feeding(blocks, {name: part for name, part in parts.items() if part}, tuple(rows), tuple(between))
    return None


def _parts_of(column: str, blocks: int, edges: list[tuple[str, str, Tensor, Tensor]], traced: _Trace) -> int | None:
    """In how many parts the output of `column` lies, each of `blocks` blocks; None where they do not fit."""
    features = traced.sizes[column][1]
    for parts in _PARTS:
        if features % (parts * blocks):
            continue
        of_output = features // (parts * blocks)
        if all(
            torch.equal(
                read // (traced.sizes[row][0] // blocks),
                written % (features // parts) // of_output,
            )
            for row, source, read, written in edges
            if source == column
        ):
            return parts
    return None


class _Trace:
    """One forward of a copy in which every linear and convolution is cut off on both sides.

    sizes       name -> input features, output features
    dims        name -> where the features are
    begins      name -> outputs of its calls, as leaves
    ends        name -> inputs of its calls, as they were computed
    passed      the same for what computes channels by themselves
    returned    what the model returned, with all that a user can ask it to return, and its loss
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        copied = copy.deepcopy(model)
        self.sizes: dict[str, tuple[int, int]] = {}
        self.dims: dict[str, int] = {}
        self.begins: dict[str, list[Tensor]] = {}
        self.ends: dict[str, list[Tensor]] = {}
        self.passed: dict[str, list[Tensor]] = {}
        self._order: dict[str, tuple[int, int]] = {}  # name -> its first and its last call
        self._dropouts: set[str] = set()
        self._owners: dict[int, list[str]] = {}
        for name, module in copied.named_modules(remove_duplicate=False):
            for param in module.parameters(recurse=False):
                self._owners.setdefault(id(param), []).append(name)
        for name, module in copied.named_modules():
            if is_cut(module):
                self.sizes[name] = (input_size(module), output_size(module))
                self.dims[name] = -1 if is_linear(module) else channel_dim(module)
                module.register_forward_pre_hook(self._end(name))
                module.register_forward_hook(self._begin(name))
            elif is_grouped(module) or is_by_channel(module) or is_dropout(module):
                module.register_forward_pre_hook(self._pass(name))
        self._dropouts = {name for name, module in copied.named_modules() if is_dropout(module)}
        self._weights = {name: id(copied.get_submodule(name).weight) for name in self.sizes}
        if any(dim != -1 for dim in self.dims.values()):
            _return_more(copied)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            outputs = call_model(copied, batch)
            loss = loss_of(outputs)
        self.returned = [loss, *(each for each in tree_leaves(outputs) if isinstance(each, Tensor))]

    def shared(self, name: str) -> bool:
        """Whether the weight is that of another module too."""
        return len(self._owners[self._weights[name]]) > 1  # type: ignore[index]

    def passed_between(self, columns: Iterable[str], rows: Iterable[str], of_channels: bool) -> list[str]:
        """What computes channels by themselves and ran after the first of the columns and before the last row;
        dropouts only among channels, as those between linears are seen to by regions.
        """
        first, last = min(self._order[name][0] for name in columns), max(self._order[name][1] for name in rows)
        return [
            name
            for name in self.passed
            if first < self._order[name][0] < last and (of_channels or name not in self._dropouts)
        ]

    def _note_call(self, name: str) -> None:
        now = sum(len(calls) for kind in (self.begins, self.ends, self.passed) for calls in kind.values())
        self._order[name] = (self._order.get(name, (now, now))[0], now)

    def _end(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            # An argument by name is followed into what it was made of, and so is what a layer of another kind with its
            # own forward (Parakeet's head) turns before it reads it.
            if not args or args[0].shape[self.dims[name]] != self.sizes[name][0]:
                return None
            self._note_call(name)
            self.ends.setdefault(name, []).append(args[0])
            return (args[0].detach(), *args[1:])

        return hook

    def _pass(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].ndim > 1:  # [N, C, ...]
                self._note_call(name)
                self.dims[name] = dim = 1 - args[0].ndim
                self.sizes[name] = (args[0].shape[dim], args[0].shape[dim])
                self.passed.setdefault(name, []).append(args[0])

        return hook

    def _begin(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.shape[self.dims[name]] != self.sizes[name][1]:
                return output
            if not args:
                self._note_call(name)
            leaf = output.detach().requires_grad_()
            self.begins.setdefault(name, []).append(leaf)
            return leaf.clone()  # which may be changed in place

        return hook


class _Hops:
    """What lies between the linears of a trace, one hop each.

    escaping    linears whose output reaches what the model returns without another linear
    """

    def __init__(self, traced: _Trace, taken: Callable[[str], bool]) -> None:
        """taken: what is looked at only where something else feeds it too"""
        self._traced = traced
        self._leaves = [leaf for leaves in traced.begins.values() for leaf in leaves]
        self._names = [name for name, leaves in traced.begins.items() for _ in leaves]
        self._edges: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        self._sources: dict[str, list[str]] = {}
        self._mixed: set[str] = set()
        reached = self._reached([each for each in traced.returned if each.requires_grad])
        self.escaping = {name for name, features in reached if len(features)}
        for name in traced.ends:
            if not taken(name):
                self._look(name)

    def _look(self, name: str) -> None:
        traced, sources = self._traced, self._sources.setdefault(name, [])
        width, dim = traced.sizes[name][0], traced.dims[name]
        for feature in {0, width - 1}:
            inputs = [x.select(dim, feature) for x in self._inputs(name) if x.requires_grad]
            for source, features in self._reached(inputs):
                if len(features) and source not in sources:
                    sources.append(source)
                if len(features) and len(features) == traced.sizes[source][1]:
                    self._mixed.add(name)

    def _inputs(self, name: str) -> list[Tensor]:
        return self._traced.ends.get(name) or self._traced.passed[name]

    def feeding(self, row: str) -> list[str]:
        """What feeds a row, or what is between."""
        if row not in self._sources:
            self._look(row)
        return self._sources[row]

    def fed_by(self, column: str) -> list[str]:
        return [row for row in self._traced.ends if column in self.feeding(row)]

    def mixes(self, row: str) -> bool:
        """Whether a feature that `row` reads depends on all features of an output."""
        return row in self._mixed

    def edges(self, row: str) -> dict[str, tuple[Tensor, Tensor]]:
        """For what feeds `row`: (features of the input of `row`, features of the output that they depend on), [E]
        each.
        """
        if row not in self._edges:
            width, dim = self._traced.sizes[row][0], self._traced.dims[row]
            chosen = sorted({round(place * (width - 1) / (_SAMPLES - 1)) for place in range(_SAMPLES)})
            found: dict[str, list[tuple[int, Tensor]]] = {}
            for feature in chosen:
                inputs = [x.select(dim, feature) for x in self._inputs(row) if x.requires_grad]
                for source, features in self._reached(inputs):
                    found.setdefault(source, []).append((feature, features))
            self._edges[row] = {
                source: (
                    torch.cat([torch.full_like(written, feature) for feature, written in pairs]),
                    torch.cat([written for _, written in pairs]),
                )
                for source, pairs in found.items()
            }
        return self._edges[row]

    def reason(self, name: str) -> str:
        """Why a linear is in no feeding, as far as it is known."""
        if self._traced.shared(name):
            return "its weight is that of another module too"
        if name in self.escaping:
            return "what it computes reaches the model's outputs, not only linears"
        rows = self.fed_by(name)
        if not rows:
            return "no other linear reads what it computes"
        mixing = [row for row in rows if self.mixes(row)]
        if mixing:
            return f"all its features are mixed before {mixing[0]} reads them"
        return f"what {rows[0]} reads of it is not in blocks of features that depend on each other alone"

    def _reached(self, ends: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Linears that the tensors were computed from, in one hop, with the features of their outputs that matter."""
        ends = list(ends)
        if not ends or not self._leaves:
            return
        total = torch.stack([_weighed(end) for end in ends]).sum()
        gradients = torch.autograd.grad(total, self._leaves, retain_graph=True, allow_unused=True)
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None:
                used = (gradient != 0).movedim(self._traced.dims[name], -1)
                yield name, used.reshape(-1, used.shape[-1]).any(0).nonzero().flatten()


def _return_more(model: nn.Module) -> None:
    """Let a model of transformers return hidden states, as its users may: they are to be whole on every rank."""
    config = getattr(model, "config", None)
    for part in config_parts(config) if config is not None else ():
        part.output_hidden_states = True


def _weighed(tensor: Tensor) -> Tensor:
    """A sum in which no two elements weigh the same."""
    real = tensor.real if tensor.is_complex() else tensor
    weights = torch.arange(real.numel(), dtype=real.dtype, device=real.device).mul_(0.7).cos_()
    return (real * weights.view(real.shape)).sum() + real.square().sum()
