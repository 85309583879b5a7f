"""Styles: what a rule of a plan does to the module or parameter that it names.

A style works in two phases. `specs` says how the parameters will be laid out: it is asked for every rule of the plan
before anything is touched, so that a plan with a mistake leaves the model as it was. `convert` then shards and changes
the module. Styles are values without state; everything they need comes from the site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn as nn

from ..ops.collective import copy_all_to_group, copy_to_group, reduce_from_group
from ..spec import ParamSpec
from .layer.dropout import DropoutForParallelInput
from .layer.embedding import (
    HiddenParallel,
    LogitsParallel,
    VocabParallel,
    head_class,
    hidden_class,
    hidden_specs,
    require_embedding,
    vocab_class,
    vocab_specs,
)
from .layer.linear import (
    ColumnParallel,
    RowParallel,
    column_class,
    column_specs,
    input_size,
    output_size,
    require_linear,
    row_class,
    row_specs,
    shape_of,
)
from .layer.norm import FusedLayerNorm, FusedRMSNorm, RMSNorm
from .layer.parallel_module import ParallelGroup, ParallelModule, shard_parameters
from .splits import EVEN, Heads, Packed, Pieces, Split, Vocabulary


@dataclass(frozen=True)
class Site:
    """Where a rule applies.

    name        full name of the module, or of the parameter when `parameter` is set
    module      the module, or the parameter's owner
    parameter   local name of the parameter that the rule names, or None
    parent      the module above `module` (`module` itself for a parameter)
    parallel    the group to shard over
    above       the module above `parent`, where there is one
    """

    name: str
    module: nn.Module
    parameter: str | None
    parent: nn.Module
    parallel: ParallelGroup
    above: nn.Module | None = None

    def pieces(self, split: Split, size: int) -> Pieces:
        parent = self.parent
        if isinstance(split, Heads) and split.beside is not None and self.above is not None:
            parent = self.above.get_submodule(split.beside)
        return split.pieces(size, self.parallel.size, parent)


Role = Literal["opens", "closes", "inside", "sums", "unknown"]


class Style:
    """Base of all styles; by itself it decides that the parameters of a module stay whole on every rank."""

    @property
    def role(self) -> Role | None:
        """What the module does to the activations (see `shardformer.regions`); None for those that neither read nor
        write sharded ones.

        opens     its output is sharded
        closes    its input is sharded, its output whole
        inside    it meets sharded activations only
        sums      it opens and closes by itself
        unknown   a layer of the user's, of which nothing is known
        """
        return None

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        """Layout of the parameters that this style decides on, by their local names; ValueError says why it cannot."""
        if site.parameter is not None:
            return {site.parameter: self._whole(site.name, site.module.get_parameter(site.parameter))}
        return {name: self._whole(f"{site.name}.{name}", param) for name, param in site.module.named_parameters()}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        """Shard the parameters and change the module. `specs` is what `specs` returned."""
        shard_parameters(site.module, specs, site.parallel.rank)

    def _whole(self, name: str, param: nn.Parameter) -> ParamSpec:
        return ParamSpec(name, tuple(param.shape))


@dataclass(frozen=True)
class Replicated(Style):
    """Every rank holds the module whole and computes the same with it."""


@dataclass(frozen=True)
class PartialGradient(Style):
    """Every rank holds the module whole but applies it to its own shard of the activations (norms of q and k per head).

    The gradients must be summed over the ranks after backward: see `shardwright.ops.shared_grads`.
    """

    def _whole(self, name: str, param: nn.Parameter) -> ParamSpec:
        return ParamSpec(name, tuple(param.shape), partial=("tp",))


@dataclass(frozen=True)
class Column(Style):
    """Linear whose output features are dealt to the ranks.

    split           how they are dealt
    gather_output   whether every rank gets the whole output
    """

    split: Split = EVEN
    gather_output: bool = False

    @property
    def role(self) -> Role | None:
        return None if self.gather_output else "opens"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        require_linear(module, "a colwise style")
        return column_specs(site.name, module, site.pieces(self.split, output_size(module)))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        column_class(site.module).shard(site.module, site.parallel, dict(specs), self.gather_output)


@dataclass(frozen=True)
class Row(Style):
    """Linear whose input features are dealt to the ranks; the outputs are summed.

    split_input     whether the input arrives whole
    """

    split: Split = EVEN
    split_input: bool = False

    @property
    def role(self) -> Role | None:
        return "closes"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        require_linear(module, "a rowwise style")
        return row_specs(site.name, module, site.pieces(self.split, input_size(module)))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        row_class(site.module).shard(site.module, site.parallel, dict(specs), self.split_input)


@dataclass(frozen=True)
class VocabEmbedding(Style):
    """Embedding whose rows are dealt to the ranks, padded to a multiple of `multiple` rows per rank."""

    multiple: int = 1

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        require_embedding(module, "vocab_embedding")
        return vocab_specs(site.name, module, site.pieces(Vocabulary(self.multiple), shape_of(module)[0]))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        vocab_class(site.module).shard(site.module, site.parallel, dict(specs))


@dataclass(frozen=True)
class HiddenEmbedding(Style):
    """Embedding whose columns are dealt to the ranks: one per attention head (relative position bias), or the hidden
    size.
    """

    split: Split = EVEN
    gather_output: bool = False

    @property
    def role(self) -> Role | None:
        return None if self.gather_output else "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        require_embedding(module, "hidden_embedding")
        return hidden_specs(site.name, module, site.pieces(self.split, shape_of(module)[1]))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        hidden_class(site.module).shard(site.module, site.parallel, dict(specs), self.gather_output)


@dataclass(frozen=True)
class VocabHead(Style):
    """Linear over the vocabulary, dealt like `VocabEmbedding`; gathered, or left sharded for the vocabulary-parallel
    loss.
    """

    multiple: int = 1
    gather_output: bool = False

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        require_linear(module, "vocab_head")
        return column_specs(site.name, module, site.pieces(Vocabulary(self.multiple), output_size(module)))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        head_class(site.module).shard(site.module, site.parallel, dict(specs), self.gather_output)


@dataclass(frozen=True)
class ShardedParameter(Style):
    """A parameter by itself, dealt along one dim (attention sinks, expert weights, a bias that is tied to a sharded
    one).
    """

    dim: int = 0
    split: Split = EVEN

    @property
    def role(self) -> Role | None:
        return "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is None:
            raise ValueError(
                f"the style shards a parameter, but the rule names a {type(site.module).__name__}; name the parameter"
            )
        param = site.module.get_parameter(site.parameter)
        dim = self.dim % param.ndim
        return {
            site.parameter: ParamSpec(site.name, tuple(param.shape), dim, site.pieces(self.split, param.shape[dim]))
        }


@dataclass(frozen=True)
class PartialSum(Style):
    """A module that every rank runs on its own shards of the parameters (which other rules shard) from whole inputs,
    and whose outputs are the ranks' parts of a sum: experts whose intermediate features are dealt to the ranks.

    The gradients of all floating-point inputs are summed, and so is the output, or the first of several; the others
    (router logits) are alike on all ranks.

    once    parameters that every rank holds and that only the first may add (biases of the outputs), by their names in
            the module; the style decides on these
    """

    once: tuple[str, ...] = ()

    @property
    def role(self) -> Role | None:
        return "sums"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _module(site, self)
        shapes = {name: tuple(module.get_parameter(name).shape) for name in self.once}
        return {name: ParamSpec(f"{site.name}.{name}", shape, partial=("tp",)) for name, shape in shapes.items()}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _PartialSumForward.adopt(site.module, site.parallel).once = self.once


class _PartialSumForward(ParallelModule):
    once: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = self.once if self.parallel.rank else ()
        owners = [(self.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2]) for name in names]
        held: list[Any] = [of[name] for of, name in owners]
        for (of, name), param in zip(owners, held, strict=True):
            of[name] = _zeros_of(param)
        try:
            return self._summed(*args, **kwargs)
        finally:
            for (of, name), param in zip(owners, held, strict=True):
                of[name] = param

    def _summed(self, *args: Any, **kwargs: Any) -> Any:
        group = self.parallel.group
        if self.in_sum:
            return super().forward(*args, **kwargs)
        values = [*args, *kwargs.values()]
        places = [
            place for place, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        for place, value in zip(places, copy_all_to_group([values[place] for place in places], group), strict=True):
            values[place] = value
        output = super().forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        if not isinstance(output, tuple):
            return reduce_from_group(output, group)
        first, *others = output
        return (reduce_from_group(first, group), *others)


def _zeros_of(param: Any) -> Any:
    """Zeros with a gradient of zeros for `param`: where no gradient arose, optimizers would leave this rank's copy."""
    return torch.where(param.new_zeros((), dtype=torch.bool), param, torch.zeros_like(param))


@dataclass(frozen=True)
class LatentKeyValue(Style):
    """The down projection of latent attention, whole on every rank: [latent | rotary key shared by all heads].

    The latent part goes on through sharded linears, which sum its gradient; the rotary part meets the rank's own heads
    at once, so its gradient is summed here.

    rotary_dim  features of the rotary part, the last ones
    """

    rotary_dim: int

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        require_linear(_module(site, self), "latent_key_value")
        return super().specs(site)

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _LatentForward.adopt(site.module, site.parallel).rotary_dim = self.rotary_dim


class _LatentForward(ParallelModule):
    rotary_dim: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent, rotary = super().forward(x).split([shape_of(self)[0] - self.rotary_dim, self.rotary_dim], -1)  # type: ignore[operator]
        return torch.cat([latent, copy_to_group(rotary, self.parallel.group)], -1)


@dataclass(frozen=True)
class Custom(Style):
    """A function of a policy that changes a module after its parameters have been decided on; it decides on none
    itself.
    """

    change: Callable[[nn.Module, ParallelGroup], None] = field(compare=False)

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        _module(site, self)
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        self.change(site.module, site.parallel)


@dataclass(frozen=True)
class Replaced(Style):
    """A layer class of a policy in the place of a module: one that no style stands for, which shards the module as it
    sees fit.

    target  class with `from_native_module(module, process_group, **kwargs)`
    """

    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def role(self) -> Role | None:
        kind = self.target if isinstance(self.target, type) else object
        if issubclass(kind, LogitsParallel | VocabParallel | FusedLayerNorm | FusedRMSNorm | RMSNorm | nn.Dropout):
            return None
        return "opens" if issubclass(kind, ColumnParallel) else "closes" if issubclass(kind, RowParallel) else "unknown"

    @property
    def is_sharding(self) -> bool:
        """Whether the layer is known to hold parts of its parameters."""
        layers = (VocabParallel, HiddenParallel, ColumnParallel, RowParallel)
        return isinstance(self.target, type) and issubclass(self.target, layers)

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        _module(site, self)
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        made = self.target.from_native_module(site.module, site.parallel.group, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"{getattr(self.target, '__name__', self.target)}.from_native_module returned {made!r}; it must return "
                "the module that takes the place of the one it is given"
            )
        if isinstance(made, DropoutForParallelInput):
            made.in_region = True
        setattr(site.parent, site.name.rpartition(".")[2], made)


@dataclass(frozen=True)
class Decision:
    """A rule at the place it applies to."""

    rule: str
    style: Style
    site: Site
    specs: dict[str, ParamSpec]


def _module(site: Site, style: Style) -> nn.Module:
    if site.parameter is not None:
        raise ValueError(
            f"{type(style).__name__} applies to a module, but the rule names a parameter; name its module, or use "
            "ShardedParameter"
        )
    return site.module


# Styles that need no arguments, by the names that plans use.
NAMED: dict[str, Style] = {
    "colwise": Column(),
    "rowwise": Row(),
    "colwise_gathered": Column(gather_output=True),
    "rowwise_split": Row(split_input=True),
    "packed_colwise": Column(Packed(2)),
    "query_heads": Column(Heads("q")),
    "key_value_heads": Column(Heads("kv")),
    "output_heads": Row(Heads("q")),
    "vocab_embedding": VocabEmbedding(),
    "vocab_head": VocabHead(),
    "hidden_embedding": HiddenEmbedding(),
    "replicated": Replicated(),
    "partial_gradient": PartialGradient(),
    "partial_sum": PartialSum(),
}
