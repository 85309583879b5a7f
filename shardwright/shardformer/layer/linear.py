"""Column- and row-parallel linears.

Shapes, with T tokens in any number of leading dims, O and I the full sizes, o and i this rank's:

    column   x [T, I] replicated      W [o, I]   b [o]    y [T, o], or [T, O] when gathered
    row      x [T, i] this rank's     W [O, i]   b [O]    y [T, O] replicated
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ...comm.quantised_wire import exact_group
from ...ops import compiled
from ...ops.collective import copy_to_group, gather_from_group, reduce_from_group, split_to_group
from ...ops.fp8 import Fp8Products
from ...ops.linear import column_linear, linear, row_linear
from ...spec import ParamSpec
from ...utils.argument_types import is_whole
from ..splits import Even, Packed, Pieces, Split
from .parallel_module import Groups, ParallelGroup, ParallelModule, constructor, own_forward, shard_parameters


def is_conv1d(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as in transformers' Conv1D."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def shape_of(module: nn.Module, parameter: str = "weight") -> tuple[int, ...]:
    """Raises ValueError for a weight that is computed at every access, which has no shards to be dealt out."""
    held = getattr(module, parameter)
    if not isinstance(held, nn.Parameter):
        raise ValueError(
            f"its {parameter} is computed from other parameters (weight_norm or another parametrization), and only a "
            "parameter itself can be sharded; remove it (torch.nn.utils.parametrize.remove_parametrizations, "
            "torch.nn.utils.remove_weight_norm), or use tp_size=1"
        )
    return tuple(held.shape)


def computes_plainly(module: nn.Module) -> bool:
    """Whether a linear's native forward is y = x W^T + b and nothing else, so that the fused operations can stand in
    for it.
    """
    forward = own_forward(module)
    return forward is nn.Linear.forward or getattr(forward, "__qualname__", "") == "Conv1D.forward"


def output_size(module: nn.Module) -> int:
    """Output features of a linear or Conv1D."""
    return shape_of(module)[1 if is_conv1d(module) else 0]


def input_size(module: nn.Module) -> int:
    """Input features of a linear or Conv1D."""
    return shape_of(module)[0 if is_conv1d(module) else 1]


def column_specs(name: str, module: nn.Module, pieces: Pieces) -> dict[str, ParamSpec]:
    """Layout of a linear whose outputs are sharded; `name` is the module's."""
    specs = {"weight": ParamSpec(join_name(name, "weight"), shape_of(module), 1 if is_conv1d(module) else 0, pieces)}
    if module.bias is not None:
        specs["bias"] = ParamSpec(join_name(name, "bias"), shape_of(module, "bias"), 0, pieces)
    return specs


def row_specs(name: str, module: nn.Module, pieces: Pieces) -> dict[str, ParamSpec]:
    """Layout of a linear whose inputs are sharded; every rank holds the whole bias."""
    specs = {"weight": ParamSpec(join_name(name, "weight"), shape_of(module), 0 if is_conv1d(module) else 1, pieces)}
    if module.bias is not None:
        specs["bias"] = ParamSpec(join_name(name, "bias"), shape_of(module, "bias"))
    return specs


class _ParallelLinear(ParallelModule):
    """
    fp8     computes the products, where they are in 8 bits (see `shardformer.fp8`)
    """

    weight: Tensor
    bias: Any
    fp8: Fp8Products | None = None
    _plain: bool

    def _native_forward(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[misc]

    def _computed_alone(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Without communication; `bias` is the module's own, or None for none."""
        if self._plain and torch.compiler.is_compiling():
            return F.linear(x, self.weight.t() if is_conv1d(self) else self.weight, bias)
        if self._plain:
            return linear(x, self.weight, bias, transposed=is_conv1d(self), fp8=self.fp8)
        held, self._parameters["bias"] = self._parameters.get("bias"), bias  # type: ignore[assignment]
        try:
            return self._native_forward(x)
        finally:
            self._parameters["bias"] = held

    def _update_sizes(self) -> None:
        """Sizes that the module tells about itself, those of the shard from now on."""
        if is_conv1d(self):
            self.nx, self.nf = input_size(self), output_size(self)
        else:
            self.in_features, self.out_features = input_size(self), output_size(self)


class ColumnParallel(_ParallelLinear):
    """The sharded forward of linears whose outputs are dealt to the ranks.

    gather_output   hand on [T, O] on every rank instead of this rank's [T, o]
    siblings        linears that may be called with the same input: q, k and v, gate and up
    """

    gather_output: bool
    siblings: tuple[nn.Module, ...] = ()
    _gathered_pieces: Pieces
    _plain: bool
    _group_name: str

    @classmethod
    def shard(
        cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec], gather_output: bool = False
    ) -> Self:
        shard_parameters(module, specs, parallel.rank)
        layer = cls.adopt(module, parallel)
        layer.gather_output = gather_output
        layer._gathered_pieces = specs["weight"].pieces
        layer._plain = computes_plainly(layer)
        layer._group_name = compiled.name_of(parallel.group)
        layer._update_sizes()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        group = self.parallel.group
        if self.in_sum:
            return self._computed_alone(x, self.bias)
        if self._plain and torch.compiler.is_compiling():
            y = compiled.column_linear(x, self.weight, self.bias, self._group_name, is_conv1d(self))
        elif self._plain:
            named = [weight for sibling in self.siblings if (weight := _own_weight(sibling)) is not None]
            y = column_linear(
                x, self.weight, self.bias, group, transposed=is_conv1d(self), siblings=named, fp8=self.fp8
            )
        else:
            y = self._native_forward(copy_to_group(x, group))
        return gather_features(y, self._gathered_pieces, group) if self.gather_output else y


def _own_weight(linear: nn.Module) -> nn.Parameter | None:
    """None for a weight that is computed at every access, as parametrizations do: each time it is another tensor."""
    weight = linear._parameters.get("weight")
    return weight if isinstance(weight, nn.Parameter) else None


class Together:
    """Two row linears whose outputs are only added up, and are reduced together (see `shardformer.side_by_side`)."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor | None] = {}  # the first one's partial sums, by the thread of a running forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        copied = memo[id(self)] = Together()
        return copied

    @property
    def is_running(self) -> bool:
        """Whether a forward of the module around both runs in this thread."""
        return get_ident() in self._held

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = get_ident()
        self._held[thread] = None
        try:
            yield
            if self._held[thread] is not None:
                raise ValueError(
                    "a layer whose attention and MLP are reduced together (SideBySide) ended without its MLP; give a "
                    "policy without that rule"
                )
        finally:
            del self._held[thread]

    def reduced(self, partial: Tensor, group: dist.ProcessGroup, comes_first: bool) -> Tensor:
        """Zeros in the place of the first one's sum, and the sum of both for the last one."""
        thread = get_ident()
        held = self._held[thread]
        if comes_first:
            if held is not None:
                raise ValueError(
                    "SideBySide: its first linear ran twice in one forward; give a policy without that rule"
                )
            self._held[thread] = partial.detach()
            return cast(Tensor, _KeptBack.apply(partial, group))
        if held is None:
            return reduce_from_group(partial, group)
        self._held[thread] = None
        return reduce_from_group(partial + held.view_as(partial), group)


class _KeptBack(torch.autograd.Function):
    """forward y = 0, as x is part of another sum;  backward dx = dy"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (copy_to_group(dy, ctx.group) if torch.is_grad_enabled() else dy), None


class RowParallel(_ParallelLinear):
    """The sharded forward of linears whose inputs are dealt to the ranks.

    split_input     the input arrives whole; keep this rank's features of it
    together        shared with another one whose output is only added to that of this one; `comes_first` of the two
    """

    split_input: bool
    together: Together | None = None
    comes_first = False
    _input_sizes: list[int]
    _plain: bool
    _group_name: str

    @classmethod
    def shard(
        cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec], split_input: bool = False
    ) -> Self:
        shard_parameters(module, specs, parallel.rank)
        layer = cls.adopt(module, parallel)
        layer.split_input = split_input
        layer._input_sizes = [sum(piece.length for piece in pieces) for pieces in specs["weight"].pieces]
        layer._plain = computes_plainly(layer)
        layer._group_name = compiled.name_of(parallel.group)
        layer._update_sizes()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        group = self.parallel.group
        if self.split_input:
            x = split_to_group(x, group, -1, self._input_sizes)
        if self.in_sum:
            y = self._computed_alone(x, None)
            # Once among the ranks. The others multiply with zero, so that all have a gradient for it.
            return y if self.bias is None else y + (self.bias * (self.parallel.rank == 0)).to(y.dtype)
        if self.together is not None and not torch.compiler.is_compiling() and self.together.is_running:
            y = self.together.reduced(self._computed_alone(x, None), group, self.comes_first)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if self._plain and torch.compiler.is_compiling():
            return compiled.row_linear(x, self.weight, self.bias, self._group_name, is_conv1d(self))
        if self._plain:
            return row_linear(x, self.weight, self.bias, group, transposed=is_conv1d(self), fp8=self.fp8)
        y = reduce_from_group(self._computed_alone(x, None), group)
        return y if self.bias is None else y + self.bias


def gather_features(y: Tensor, pieces: Pieces, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Whole features in their order from every rank's pieces of them; padding is dropped.

    [T, o] -> [T, O], or likewise along another `dim`; backward hands every rank its own slice, the consumers being
    replicated.
    """
    sizes = [sum(piece.length for piece in rank) for rank in pieces]
    gathered = gather_from_group(y, exact_group(group), dim, sizes)
    runs, offset = [], 0
    for rank in pieces:
        for piece in rank:
            if not piece.is_padding:
                runs.append((piece.start, offset, piece.length))
            offset += piece.length
    runs.sort()
    position, chosen = 0, []
    for start, offset, length in runs:  # runs that several ranks hold are taken once
        if start == position:
            chosen.append((offset, length))
            position += length
    if chosen == [(0, gathered.shape[dim])]:
        return gathered
    return torch.cat([gathered.narrow(dim, offset, length) for offset, length in chosen], dim)


class Linear1D_Col(ColumnParallel, nn.Linear):
    """A linear whose output features are sharded.

    Linear1D_Col(in_features, out_features, bias=True, process_group=..., gather_output=False) builds one;
    `from_native_module` shards one that exists. The result holds weight [out/n, in] and bias [out/n].
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        gather_output: bool = False,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, gather_output=gather_output)

    @classmethod
    def _from_native(
        cls, module: nn.Module, parallel: ParallelGroup, *, split: Split | None = None, gather_output: bool = False
    ) -> nn.Module:
        return shard_column(module, parallel, split or Even(), gather_output)


class Linear1D_Row(RowParallel, nn.Linear):
    """A linear whose input features are sharded; the result holds weight [out, in/n] and the whole bias.

    parallel_input  whether the input already is this rank's slice; if not, it is split first
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        *,
        parallel_input: bool = True,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, parallel_input=parallel_input)

    @classmethod
    def _from_native(
        cls, module: nn.Module, parallel: ParallelGroup, *, split: Split | None = None, parallel_input: bool = True
    ) -> nn.Module:
        require_linear(module, cls.__name__)
        specs = row_specs("", module, (split or Even()).pieces(input_size(module), parallel.size, module))
        return row_class(module).shard(module, parallel, specs, split_input=not parallel_input)


class FusedLinear1D_Col(Linear1D_Col):
    """A column-parallel linear whose output is several parts one after the other (q, k, v; gate, up), each sharded for
    itself.

    split_sizes     the size of every part
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        split_sizes: list[int],
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        gather_output: bool = False,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, split_sizes=split_sizes, gather_output=gather_output)

    @classmethod
    def _from_native(  # type: ignore[override]
        cls, module: nn.Module, parallel: ParallelGroup, *, split_sizes: list[int], gather_output: bool = False
    ) -> nn.Module:
        return shard_column(module, parallel, parts_of_sizes(split_sizes), gather_output)


class FusedLinear1D_Row(Linear1D_Row):
    """A row-parallel linear whose input is several parts one after the other, each sharded for itself.

    split_sizes     the size of every part
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        split_sizes: list[int],
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        *,
        parallel_input: bool = True,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        type(self).from_native_module(self, process_group, split_sizes=split_sizes, parallel_input=parallel_input)

    @classmethod
    def _from_native(  # type: ignore[override]
        cls, module: nn.Module, parallel: ParallelGroup, *, split_sizes: list[int], parallel_input: bool = True
    ) -> nn.Module:
        split = parts_of_sizes(split_sizes)
        return super()._from_native(module, parallel, split=split, parallel_input=parallel_input)


def parts_of_sizes(split_sizes: Sequence[int]) -> Packed:
    if not isinstance(split_sizes, list | tuple) or not split_sizes or not all(map(is_whole, split_sizes)):
        raise ValueError(f"split_sizes={split_sizes!r} must be the sizes of the parts, such as [64, 64, 64]")
    return Packed(tuple(split_sizes))


def shard_column(
    module: nn.Module,
    parallel: ParallelGroup,
    split: Split,
    gather_output: bool,
    layer_class: type[ColumnParallel] | None = None,
) -> nn.Module:
    require_linear(module, (layer_class or Linear1D_Col).__name__)
    specs = column_specs("", module, split.pieces(output_size(module), parallel.size, module))
    return (layer_class or column_class(module)).shard(module, parallel, specs, gather_output)


def column_class(module: nn.Module) -> type[ColumnParallel]:
    """Plain linears become `Linear1D_Col`, sub-classes and Conv1D a subclass of their own class."""
    return Linear1D_Col if type(module) is nn.Linear else ColumnParallel


def row_class(module: nn.Module) -> type[RowParallel]:
    return Linear1D_Row if type(module) is nn.Linear else RowParallel


def require_linear(module: nn.Module, style: str) -> None:
    if not is_linear(module):
        raise ValueError(
            f"{style} shards nn.Linear (and subclasses) and transformers' Conv1D, not {type(module).__name__}"
        )


def join_name(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter
