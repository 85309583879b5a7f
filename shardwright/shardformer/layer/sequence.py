"""Layers whose activations are split along the sequence: what modules do where they meet them.

Between the modules of a layer a rank holds [B, s_k, H], its part of the S positions as `torch.tensor_split` deals them.

    first layer         splits what it is given, [B, S, H] -> [B, s_k, H], or several streams of it, [N, B, S, H]
    any layer           splits what it is given for every token besides
    gathering module    an attention, an MLP: gathers its first argument, [B, s_k, H] -> [B, S, H]; what else it is
                        given (masks, positions, an encoder's states) is whole
    gathering column    the same for one column linear, where the modules around it see parts of sequences
    scattering row      deals the sum of the ranks' outputs out along the sequence
    whole module        one that every rank computes alike from whole sequences; its output is split again
    last layer          gathers what it returns

How many positions there are is a fact of the running forward (`utils.carried`), left by the first layer, or by whoever
runs a part of the layers. Without it nothing is split: a layer that is called by itself computes what it always did,
and so does one that generates a token at a time.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
import torch.nn as nn
from torch import Tensor

from ...comm.collectives import even_sizes
from ...ops import compiled, compiled_products, compiled_sequence
from ...ops.collective import gather_from_group, reduce_scatter_to_group, split_to_group
from ...ops.compiled_numbers import BEGIN, CLOSE, END, OPEN, at_first, switch_numbers
from ...ops.compiled_sequence import no_graph, traced
from ...ops.linear import row_linear
from ...ops.sequence import gather_sequence
from ...ops.sequence_ring import finish, scattered_linear
from ...ops.weight_grad import deferral_possible
from ...utils.carried import facts
from ..rng import SHARED, sharded_rng, uses_dropout
from .linear import ColumnParallel, RowParallel, is_conv1d
from .parallel_module import ParallelGroup, ParallelModule, native_class

_GATHERED = "_shardwright_gathered"
# Arguments of layers that are made for every token before them, and read by no attention (Gemma 4, Zamba, Inkling 2,
# Mllama), and along which dim these have the tokens.
_BY_TOKEN = {
    "per_layer_input": 1,
    "original_hidden_states": 1,
    "block_states": 1,
    "full_text_row_masked_out_mask": 2,
}


@dataclass(frozen=True)
class Stack:
    """A list of layers through which one sequence goes.

    name    of the list in the model
    again   gather inputs of column linears once more in backward, and keep this rank's part alone
    ring    gather and scatter in parts, while products of others are computed
    trains  whether parameters that are applied to parts of sequences are trained: their gradients are summed over the
            ranks, also after a forward that did not split
    dim     along which layers have positions; their modules have them along dim 1
    """

    name: str
    again: bool = False
    ring: bool = False
    trains: bool = True
    dim: int = 1

    def begin(self, x: Tensor, ranks: int) -> bool:
        """Note how long the sequences of x [B, S, ...] are; whether they are split."""
        if x.dim() < self.dim + 2:
            raise ValueError(
                f"{self.name}: layers are given {list(x.shape)}, but sequences that are split over tp_size={ranks} "
                "ranks must be [batch, length, ..., hidden]; use enable_sequence_parallelism=False"
            )
        length = x.shape[self.dim]
        told = facts().get(self._told)
        if told is not None and told != length:
            raise ValueError(
                f"{self.name}: sequences are {length} long where the batch has {told}; stages of a pipeline take the "
                "length from input_ids, inputs_embeds, decoder_input_ids or labels; use pp_size=1, or "
                "enable_sequence_parallelism=False"
            )
        if length >= ranks:
            self.note(length)
            return True
        self.forget()
        self._require_no_training(length, ranks)
        return False

    def _require_no_training(self, length: int, ranks: int) -> None:
        if self.trains and torch.is_grad_enabled():
            raise ValueError(
                f"{self.name}: sequences of {length} cannot be split over tp_size={ranks} ranks, each of which needs "
                f"a position; use sequences of at least {ranks}, or enable_sequence_parallelism=False; evaluate under "
                "torch.no_grad()"
            )

    def note(self, length: int) -> None:
        facts()[self._key] = length

    def forget(self) -> None:
        facts().pop(self._key, None)

    def tell(self, length: int, ranks: int) -> None:
        """Note what a stage of a pipeline is told."""
        facts()[self._told] = length
        if length >= ranks:
            self.note(length)
        else:
            self._require_no_training(length, ranks)

    def sizes(self, ranks: int) -> list[int] | None:
        """Positions of every rank; None while nothing is split."""
        if torch.compiler.is_compiling():
            no_graph("a module that sums at its exit, or gathers tokens in one dim, is in the layer")
        length = facts().get(self._key)
        return None if length is None else even_sizes(length, ranks)

    @property
    def _key(self) -> tuple[str, str]:
        return "sequence", self.name

    @property
    def _told(self) -> tuple[str, str]:
        return "sequence of the batch", self.name


class _InStack(ParallelModule):
    stack: Stack
    _group_name: str

    @classmethod
    def adopt(cls, module: nn.Module, parallel: ParallelGroup) -> Self:
        adopted = super().adopt(module, parallel)
        adopted._group_name = compiled.name_of(parallel.group)
        return adopted

    @property
    def _sizes(self) -> list[int] | None:
        return self.stack.sizes(self.parallel.size)

    def split_length(self) -> int | None:
        """For graphs that this module is in (`ops.layer_graphs`)."""
        sizes = self._sizes
        return None if sizes is None else sum(sizes)

    def _gather_in_graph(self, x: Tensor) -> Tensor:
        assert traced.length is not None
        return compiled_sequence.gather_sequence(
            x, self._group_name, 1, traced.length, self.stack.again, self.stack.ring
        )


class SplitLayer(_InStack):
    """A layer of a stack. Outside of modules that see whole sequences, ranks draw random numbers of their own."""

    is_first = False
    is_last = False
    draws = False
    by_token: Mapping[str, int] = {}
    compiled_method = "run_layer"  # see `ops.layer_graphs`: what is split and gathered around it is not compiled

    @classmethod
    def of(cls, layer: nn.Module, parallel: ParallelGroup, stack: Stack, is_first: bool, is_last: bool) -> None:
        split = cls.adopt(layer, parallel)
        split.stack, split.is_first, split.is_last = stack, is_first, is_last
        split.draws = uses_dropout(layer)
        names = list(inspect.signature(native_class(layer).forward).parameters)[1:]
        split.by_token = {name: names.index(name) for name in _BY_TOKEN if name in names}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group, dim = self.parallel.group, self.stack.dim
        if self.is_first and self.stack.begin(first_tensor(args, kwargs), self.parallel.size):
            args, kwargs = with_first(lambda x: split_to_group(x, group, dim, self._sizes), args, kwargs)
        sizes = self._sizes
        if sizes is not None:

            def part(x: Tensor, dim: int) -> Tensor:
                # else it is one already
                return split_to_group(x, group, dim, sizes) if x.shape[dim] == sum(sizes) else x

            for name, place in self.by_token.items():
                args, kwargs = _with_part(name, place, args, kwargs, partial(part, dim=_BY_TOKEN[name]))
        if self.draws and self.training and sizes is not None:
            with sharded_rng(group).fork():
                output = self.run_layer(*args, **kwargs)
        else:
            output = self.run_layer(*args, **kwargs)
        if not self.is_last or sizes is None:
            return output
        output = of_first(lambda y: gather_from_group(y, group, dim, sizes), output)
        self.stack.forget()
        return output

    def run_layer(self, *args: Any, **kwargs: Any) -> Any:
        """On this rank's part of the sequence."""
        return super().forward(*args, **kwargs)


class _OpensNumbers(_InStack):
    """A column linear behind which ranks draw numbers of their own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.training:
            return output
        if torch.compiler.is_compiling():
            return output if traced.length is None else at_first(output, self._group_name, OPEN)
        if self._sizes is not None:
            sharded_rng(self.parallel.group).open()
        return output


class GatheringModule(_InStack):
    """
    readers     the column linears that may be called with what is gathered
    """

    readers: tuple[nn.Module, ...] = ()
    draws = False

    @classmethod
    def of(cls, module: nn.Module, parallel: ParallelGroup, stack: Stack, readers: tuple[nn.Module, ...]) -> None:
        gathering = cls.adopt(module, parallel)
        gathering.stack, gathering.draws = stack, uses_dropout(module)
        # a tuple, so that they are no children
        gathering.readers = tuple(reader for reader in readers if isinstance(reader, ColumnParallel))
        if gathering.draws:
            for reader in gathering.readers:
                _OpensNumbers.adopt(reader, parallel).stack = stack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if traced.length is None:
                return super().forward(*args, **kwargs)
            args, kwargs = with_first(self._gather_in_graph, args, kwargs)
            if not (self.draws and self.training):
                return super().forward(*args, **kwargs)
            args, kwargs = with_first(lambda x: switch_numbers(x, self._group_name, BEGIN + SHARED), args, kwargs)
            output = super().forward(*args, **kwargs)
            for to in (CLOSE, END + SHARED):
                output = at_first(output, self._group_name, to)
            return output
        sizes = self._sizes
        if sizes is None:
            return super().forward(*args, **kwargs)
        weights = [cast(Tensor, reader.weight) for reader in self.readers]
        kept = []

        def gather(x: Tensor) -> Tensor:
            check_part(x.shape[1], sizes, self)
            whole, alive = gather_sequence(
                x, self.parallel.group, 1, sizes, weights, again=self.stack.again, in_parts=self.stack.ring
            )
            kept.append(alive)
            return whole

        args, kwargs = with_first(gather, args, kwargs)
        try:
            if not (self.draws and self.training):
                return super().forward(*args, **kwargs)
            # Whole sequences are the same on all ranks up to the column linears, behind which activations never are.
            rng = sharded_rng(self.parallel.group)
            with rng.replicated():
                try:
                    return super().forward(*args, **kwargs)
                finally:
                    rng.close()
        finally:
            finish(first_tensor(args, kwargs))


class GatheringColumn(_InStack):
    """x [B, s_k, I], or [B s_k, I]; columns that are called with the same x gather it once."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and (x.dim() > 2 or traced.length is None):
            return super().forward(x if traced.length is None else self._gather_in_graph(x))  # type: ignore[misc,no-any-return]
        sizes = self._sizes
        if sizes is None:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        reference, version = getattr(x, _GATHERED, (None, 0))
        whole = reference() if reference is not None and version == x._version else None
        alive = None
        if whole is None:
            column = cast(Any, self)
            dim, sizes = token_sizes(x, sizes, sizes[self.parallel.rank])
            check_part(x.shape[dim], sizes, self)
            weights = [column.weight, *(sibling.weight for sibling in column.siblings)]
            whole, alive = gather_sequence(
                x, self.parallel.group, dim, sizes, weights, again=self.stack.again, in_parts=self.stack.ring
            )
            setattr(x, _GATHERED, (weakref.ref(whole), x._version))
        y: Tensor = super().forward(whole)  # type: ignore[misc]
        if y.grad_fn is not None:
            cast(Any, y.grad_fn).gathered = whole, alive  # for the columns that come
        return y


class ScatteringRow(_InStack):
    """
    by_rank     whether tokens in one dim come by the rank that holds them, and not by their sample
    """

    by_rank = False

    def forward(self, x: Tensor) -> Tensor:
        row = cast(RowParallel, self)
        if torch.compiler.is_compiling():
            return self._in_graph(x, row)
        sizes = self._sizes
        if sizes is None or row.in_sum:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        group = self.parallel.group
        if row.split_input:
            x = split_to_group(x, group, -1, row._input_sizes)
        flat = x.dim() == 2 and not self.by_rank
        if x.dim() == 2 and self.by_rank:
            dim, sizes = token_sizes(x, sizes, sum(sizes))
        else:
            dim = 1
        if flat or not row._plain:
            summand = row._computed_alone(x, None)
            summand = summand.unflatten(0, (-1, sum(sizes))) if flat else summand
            y = reduce_scatter_to_group(summand, group, dim, sizes)
            y = y.flatten(0, 1) if flat else y
            return y if row.bias is None else y + row.bias.to(y.dtype)
        if self.stack.ring and not deferral_possible() and not torch.compiler.is_compiling() and not _is_cast(x):
            weight = row.weight.t() if is_conv1d(row) else row.weight
            y = scattered_linear(x, weight, group, dim, sizes)
            return y if row.bias is None else y + row.bias.to(y.dtype)
        return row_linear(
            x,
            row.weight,
            row.bias,
            group,
            transposed=is_conv1d(row),
            scatter_dim=dim,
            scatter_sizes=sizes,
            fp8=row.fp8,
        )

    def _in_graph(self, x: Tensor, row: RowParallel) -> Tensor:
        length = traced.length
        if length is None or row.in_sum:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        if row.split_input or (x.dim() == 2 and self.by_rank):
            no_graph("a row linear of sequences that are split takes whole features, or tokens in one dim")
        if self.stack.ring and row._plain and x.dim() > 2 and not _is_cast(x):
            weight = row.weight.t() if is_conv1d(row) else row.weight
            y = compiled_products.scattered_linear(x, weight, self._group_name, 1)
            return y if row.bias is None else y + row.bias.to(y.dtype)
        summand = row._computed_alone(x, None)
        if x.dim() == 2:
            y = compiled_sequence.scatter_sequence(summand.unflatten(0, (-1, length)), self._group_name, 1)
            y = y.flatten(0, 1)
        else:
            y = compiled_sequence.scatter_sequence(summand, self._group_name, 1)
        return y if row.bias is None else y + row.bias.to(y.dtype)


class WholeModule(_InStack):
    """Every rank gathers the sequence and keeps its part of the result: gradients of the parameters are whole. A module
    that is given no tensor sees no sequence: what it makes (a bias by relative position) is whole.

    every   whether all that it returns with these positions is split, and not the hidden states alone, which come first
    """

    every = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._in_graph(args, kwargs)
        sizes, group = self._sizes, self.parallel.group
        if sizes is None or not has_tensor(args, kwargs):
            return super().forward(*args, **kwargs)
        args, kwargs = with_first(lambda x: gather_from_group(x, group, 1, sizes), args, kwargs)

        def split(y: Tensor) -> Tensor:
            if y.dim() > 2:
                return split_to_group(y, group, 1, sizes)
            tokens = y.unflatten(0, (-1, sum(sizes)))  # by their sample
            return split_to_group(tokens, group, 1, sizes).flatten(0, 1)

        return self._of_output(split, super().forward(*args, **kwargs), sum(sizes))

    def _of_output(self, split: Callable[[Tensor], Tensor], output: Any, length: int) -> Any:
        output = of_first(split, output)
        if not self.every or isinstance(output, Tensor):
            return output
        others = (
            split(one) if isinstance(one, Tensor) and one.dim() > 2 and one.shape[1] == length else one
            for one in output[1:]
        )
        return type(output)((output[0], *others))

    def _in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        length, name = traced.length, self._group_name
        if length is None or not has_tensor(args, kwargs):
            return super().forward(*args, **kwargs)
        args, kwargs = with_first(lambda x: compiled_sequence.gather_sequence(x, name, 1, length), args, kwargs)

        def split(y: Tensor) -> Tensor:
            if y.dim() > 2:
                return compiled_sequence.split_sequence(y, name, 1)
            return compiled_sequence.split_sequence(y.unflatten(0, (-1, length)), name, 1).flatten(0, 1)

        return self._of_output(split, super().forward(*args, **kwargs), length)


class DrawsAlike(ParallelModule):
    """A module that sees whole sequences within a layer that does not."""

    _numbers: str

    @classmethod
    def adopt(cls, module: nn.Module, parallel: ParallelGroup) -> Self:
        adopted = super().adopt(module, parallel)
        adopted._numbers = sharded_rng(parallel.group).name
        return adopted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            name = self._numbers
            args, kwargs = with_first(lambda x: switch_numbers(x, name, BEGIN + SHARED), args, kwargs)
            return at_first(super().__call__(*args, **kwargs), name, END + SHARED)
        with sharded_rng(self.parallel.group).replicated():
            return super().__call__(*args, **kwargs)


def _is_cast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer, or of a module of one."""
    place = _place(args, kwargs)
    value = args[place] if isinstance(place, int) else kwargs[place]
    return cast(Tensor, value)


def has_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def with_first(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states, wherever these are given: some attentions are given them as queries, keys
    and values (CTRL, CPM-Ant).
    """
    hidden = first_tensor(args, kwargs)
    changed = change(hidden)
    return (
        tuple(changed if value is hidden else value for value in args),
        {name: changed if value is hidden else value for name, value in kwargs.items()},
    )


def _with_part(
    name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another value of one of them, where it is a tensor."""
    if isinstance(kwargs.get(name), Tensor):
        return args, {**kwargs, name: change(kwargs[name])}
    if place < len(args) and isinstance(args[place], Tensor):
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
    return args, kwargs


def of_first(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """What a module returns with other hidden states, which come first."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))


def _place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return index
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return "hidden_states"
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor))


def token_sizes(x: Tensor, sizes: list[int], positions: int) -> tuple[int, list[int]]:
    """Along which dim x holds tokens, and how many each rank has of them; `positions` of x in every sample."""
    if x.dim() > 2:
        return 1, sizes
    samples = x.shape[0] // positions
    return 0, [size * samples for size in sizes]


def check_part(length: int, sizes: list[int], module: ParallelModule) -> None:
    if length != sizes[module.parallel.rank]:
        raise ValueError(
            f"{type(module).__name__} is given {length} positions of a sequence where this rank's part has "
            f"{sizes[module.parallel.rank]}: the model does not hand on what its layers return as it is; use "
            "enable_sequence_parallelism=False"
        )
