"""One reduction for a block whose output is the sum of what its parts return: routed experts and a shared expert.

    y = experts(x, router(x)) + sigmoid(gate(x)) * shared_expert(x)

Reduced each for itself, the parts take an all-reduce each, forward and backward. But the block is linear in them, so
every rank computes y from its own partial sums, and y is reduced once, when the block returns.

[Note: gradients inside a block that sums]

The gradient of y is whole on every rank. What every rank computes from its own partial sums is not: of the gate's
output, of the routing weights, and of x itself each rank has a part, as they meet the rank's own shards. So inside of
the block all gradients are parts, those of replicated modules too, whose backward is linear in what arrives. x and the
block's replicated parameters go in through one node (`copy_all_to_group`), whose backward sums all of their gradients
by one all-reduce. Parameters outside of it see whole gradients and need to know nothing of this.

What leaves the block by another way than its output (router logits, which transformers records with a hook and makes
an auxiliary loss of) comes back with a whole gradient on every rank. It counts on the first rank alone, so that the sum
over the ranks is right (`_Shown`).

Nothing of this is assumed: `linearity` follows partial sums through the block's own forward, and `check_sums` looks at
what else the plan does inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..comm.compat import runs_backward
from ..ops.collective import copy_all_to_group, gather_for_shards, reduce_from_group, reduce_scatter_to_group
from ..ops.compiled_sequence import no_graph
from ..spec import ParamSpec, get_spec
from ..utils.pytree import tree_leaves
from ..utils.tensors import map_tensors
from .adapters import has_adapters
from .layer.linear import input_size, is_linear
from .layer.parallel_module import ParallelModule
from .layer.sequence import Stack
from .linearity import why_no_sum
from .styles import Column, Custom, Decision, PartialSum, Replicated, Row, ShardedParameter, Site, Style


@dataclass(frozen=True)
class SumAtExit(Style):
    """A block in which all that is sharded ends in `parts`, and whose output is linear in what these return.

    parts   names below the block: row linears and experts, which have rules of their own
    """

    parts: tuple[str, ...]

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is not None:
            raise ValueError("SumAtExit applies to a module, but the rule names a parameter; name its module")
        if (reason := why_not(site.module, self.parts)) is not None:
            raise ValueError(
                f"SumAtExit({list(self.parts)}): the output is no sum that could be reduced once: {reason}; leave the "
                "rule out, and every part is reduced for itself"
            )
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        block = _SumForward.adopt(site.module, site.parallel)
        for module in block.modules():
            if module is not block:
                module.in_sum = True  # type: ignore[assignment]
        for name, child in block.named_children():
            if not any(f"{part}.".startswith(f"{name}.") for part in self.parts):
                _Shown.adopt(child, site.parallel)


def why_not(block: nn.Module, parts: Sequence[str]) -> str | None:
    """What keeps `block` from being summed at its exit, None for nothing."""
    known = dict(block.named_modules())
    if missing := [part for part in parts if part not in known]:
        return f"it has no {', '.join(missing)}"
    closing = [name for part in parts for name in _closing(part, known[part])]
    widths = [input_size(module) for name, module in known.items() if is_linear(module) and name not in closing]
    if not widths:
        return "it has no linear that says how wide its input is"
    return why_no_sum(block, closing, widths[0])


def disproven(decisions: Sequence[Decision]) -> set[str]:
    """The rules for blocks that are no sums any more, since a policy has changed them."""
    return {
        each.rule
        for each in decisions
        if isinstance(each.style, SumAtExit) and why_not(each.site.module, each.style.parts) is not None
    }


def check_sums(decisions: Sequence[Decision]) -> None:
    """ValueError for what is decided about modules of a block that sums and that would communicate inside."""
    for block in decisions:
        if not isinstance(block.style, SumAtExit):
            continue
        for inside in decisions:
            name = inside.site.name.removeprefix(f"{block.site.name}.")
            if name == inside.site.name or inside is block:
                continue
            style = inside.style
            closes = isinstance(style, Row | PartialSum)
            stays = isinstance(style, Replicated | ShardedParameter | Custom | PartialSum)
            stays |= isinstance(style, Column) and not style.gather_output
            stays |= isinstance(style, Row) and not style.split_input
            if not stays or (closes and not any(f"{name}.".startswith(f"{part}.") for part in block.style.parts)):
                what = "is none of its parts" if stays else f"has the style {type(style).__name__}"
                raise ValueError(
                    f"{block.site.name} ({type(block.site.module).__name__}), rule {block.rule!r}: "
                    f"SumAtExit({list(block.style.parts)}) reduces once for all that is sharded inside, but "
                    f"{inside.site.name}, rule {inside.rule!r}, {what}; name it among the parts, or leave the rule out"
                )


def _closing(name: str, part: nn.Module) -> Iterator[str]:
    """Of a linear with adapters those of its linears that take sharded features."""
    if not has_adapters(part):
        yield name
        return
    yield f"{name}.base_layer"
    for adapter in cast(Any, part).lora_A:
        yield f"{name}.lora_A.{adapter}"


class _SumForward(ParallelModule):
    """
    stack   of layers between whose modules sequences are split, which then are gathered here and dealt out again
    """

    stack: Stack | None = None
    _reduced = False  # whether this forward has run, where an instance has one of its own in front

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in vars(self):
            return super().__call__(*args, **kwargs)
        self._reduced = False
        returned = super().__call__(*args, **kwargs)
        if not self._reduced:
            raise ValueError(
                f"{type(self).__name__}.forward was replaced after sharding, but the block is reduced once, in the "
                "forward that was replaced: every rank would go on with its own part. Replace it before sharding (or "
                "with a policy's method_replacement), let the new one call the old one, or give a policy without "
                "SumAtExit"
            )
        return returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(self):
            self._reduced = True
        group = self.parallel.group
        sizes = None if self.stack is None else self.stack.sizes(self.parallel.size)
        values: list[Any] = [*args, *kwargs.values()]
        if sizes is not None:  # the gradients are summed as they are dealt out
            first = next(place for place, value in enumerate(values) if isinstance(value, Tensor))
            whole = gather_for_shards(values[first], group, 1, sizes)
            values[first] = None
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        params = list(self._whole_parameters()) if torch.is_grad_enabled() else []
        opened = copy_all_to_group([values[place] for place in places] + [param for _, _, param in params], group)
        for place, value in zip(places, opened, strict=False):
            values[place] = value
        if sizes is not None:
            values[first] = whole
        for (owner, name, _), value in zip(params, opened[len(places) :], strict=True):
            owner._parameters[name] = cast(Any, value)
        try:
            output = super().forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        finally:
            for owner, name, param in params:
                owner._parameters[name] = param
        return reduce_from_group(output, group) if sizes is None else reduce_scatter_to_group(output, group, 1, sizes)

    def _whole_parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Trained parameters that every rank holds and whose gradient is not summed elsewhere."""
        for owner in self.modules():
            for name, param in owner._parameters.items():
                if param is not None and param.requires_grad:
                    spec = get_spec(param)
                    if spec is None or not (spec.is_sharded or spec.partial):
                        yield owner, name, param


class _Shown(ParallelModule):
    """A replicated module of a block that sums. Hooks see inputs and outputs whose gradient counts on the first rank
    alone, the block those whose gradient is a part of a sum.
    """

    _outputs: tuple[Any, Any] | None = None
    _inputs: tuple[Any, Any] | None = None
    _is_shown = False  # whether hooks look at outputs; what a graph can look at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._inputs = None
        is_shown = bool(self._forward_hooks)
        if is_shown != self._is_shown:
            self._is_shown = is_shown
        if self._forward_pre_hooks:
            inside = (args, kwargs)
            args, kwargs = map_tensors(lambda tensor: _once(tensor, self.parallel.group), inside)
            self._inputs = inside, (args, kwargs)
        returned = super().__call__(*args, **kwargs)
        if self._outputs is None:
            return returned
        (inside, shown), self._outputs = self._outputs, None
        if returned is not shown:
            raise ValueError(
                f"a forward hook changes what {type(self).__name__} returns, inside of a block that is reduced once; "
                "remove the hook, or give a policy without SumAtExit"
            )
        return inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and (self._is_shown or self._inputs is not None):
            no_graph("hooks look at a module of a block that is reduced once")
        if self._inputs is not None:
            ((inside_args, inside_kwargs), shown), self._inputs = self._inputs, None
            given, left = tree_leaves((args, kwargs)), tree_leaves(shown)
            if len(given) != len(left) or any(one is not other for one, other in zip(given, left, strict=True)):
                raise ValueError(
                    f"a forward pre-hook changes what {type(self).__name__} is given, inside of a block that is "
                    "reduced once; remove the hook, or give a policy without SumAtExit"
                )
            args, kwargs = inside_args, inside_kwargs
        if not torch.compiler.is_compiling() and runs_backward() and any(map(_is_leaf, tree_leaves((args, kwargs)))):
            raise ValueError(
                f"{type(self).__name__} is recomputed by itself by a reentrant checkpoint, inside of a block that is "
                "reduced once: the gradients of its parameters would be this rank's part. Use "
                "checkpoint(..., use_reentrant=False), checkpoint the whole block, or give a policy without SumAtExit"
            )
        inside = super().forward(*args, **kwargs)
        if not self._is_shown:
            return inside
        shown = map_tensors(lambda tensor: _once(tensor, self.parallel.group), inside)
        self._outputs = inside, shown
        return shown


def _is_leaf(value: Any) -> bool:
    """Whether a reentrant checkpoint has made this input, which it cuts from the graph around."""
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Once.apply(x, group.rank() == 0)) if x.requires_grad else x


class _Once(torch.autograd.Function):
    """forward y = x;  backward dx = dy on the first rank, zero on the others"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.counts, None
