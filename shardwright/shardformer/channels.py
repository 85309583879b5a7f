"""Rules for convolutions, and for what mixes pixels' features beside them, that autograd found in a small copy.

Pairs with only channels of their own in between are dealt: nothing travels from the first to the second. What goes with
no other is dealt all the same, where it holds much: its channels are gathered, or its inputs split, whichever sends
less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from .convolution import ChannelNorms, ConvColumn, ConvGroups, ConvRow, OwnDropout, is_dropout
from .feeding import Feeding
from .hf_plan import Proposal
from .layer.convolution import is_convolution, is_grouped
from .layer.linear import input_size, is_linear, output_size
from .patterns import any_of, shape_of_name
from .rules import Rules
from .splits import Even, Packed, Split
from .styles import Column, Row


def channel_rules(feeding: Feeding, small: nn.Module, model: nn.Module, is_literal: bool) -> list[Rules]:
    """Alternatives for what was found in `small`, best first, to be said of `model`.

    is_literal      whether the model has the sizes of the copy; else blocks of several channels are known of it only
                    where they are the groups of a convolution or a norm
    """
    called = feeding.patterns
    together = _together(feeding, called, small, model, is_literal)
    apart: Rules = {}
    for name in (*feeding.columns, *feeding.rows):
        apart |= _alone(called[name], small.get_submodule(name))[0]
    return [together, apart] if together else [apart]


def _together(
    feeding: Feeding, called: Mapping[str, str], small: nn.Module, model: nn.Module, is_literal: bool
) -> Rules:
    """Rules for a pair, or more, between which nothing travels; none where numbers of the model are not known."""
    rules: Rules = {}
    widths = _group_widths(feeding, model)
    for name in called:
        module = small.get_submodule(name)
        if is_dropout(module):
            rules[called[name]] = OwnDropout()
            continue
        dealt = module.get_parameter("weight").shape[0] if name in feeding.columns else _width(module)
        parts = feeding.columns.get(name, 1)
        granule, rest = divmod(dealt, parts * feeding.blocks)
        known = is_literal or (not is_linear(module) and granule in widths)
        if rest or (granule > 1 and (parts > 1 or not known)):
            return {}
        split: Split = Packed(parts) if parts > 1 else Even(granule)
        rules[called[name]] = _style(module, split, name in feeding.columns, name in feeding.rows)
    return rules


def _group_widths(feeding: Feeding, model: nn.Module) -> set[int]:
    """Channels of a group of what is between, where it is the same everywhere in the model."""
    is_between = any_of(feeding.patterns[name] for name in feeding.between)
    widths = {
        _width(module) // int(getattr(module, "groups", None) or module.num_groups)  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if is_between(name) and (is_grouped(module) or isinstance(module, nn.GroupNorm))
    }
    return widths if len(widths) == 1 else set()


def _width(module: nn.Module) -> int:
    """Channels that the module reads."""
    if is_linear(module):
        return input_size(module)
    if is_convolution(module):
        return int(module.in_channels)  # type: ignore[arg-type]
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.ndim)]
    return len(tensors[0])


def _style(module: nn.Module, split: Split, is_column: bool, is_row: bool) -> Any:
    if is_column:
        return Column(split) if is_linear(module) else ConvColumn(split)
    if is_row:
        return Row(split) if is_linear(module) else ConvRow(split)
    return ConvGroups(split) if is_grouped(module) else ChannelNorms(split)


def among_channels(
    model: nn.Module, of_pixels: Collection[str], taken: Callable[[str], bool], least: float
) -> Iterator[Proposal]:
    """Convolutions, and linears on pixels, that no rule deals yet: what goes by one name and holds a share of at least
    `least` of the parameters.
    """
    pixels = any_of(shape_of_name(name) for name in of_pixels)
    modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    dealt = [name for name in modules if taken(name)]
    sizes: Counter[str] = Counter()
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if taken(name) or not (is_convolution(module) or (is_linear(module) and pixels(name))):
            continue
        unlike = [other for other, beside in modules.items() if _kind(beside) != _kind(module)]
        shape = _apart_from(name, [*dealt, *unlike])
        sizes[shape] += module.get_parameter("weight").numel()
        found.setdefault(shape, module)
    total = sum(param.numel() for param in model.parameters())
    owners = Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    for shape, module in found.items():
        if sizes[shape] >= least * total and owners[id(module.weight)] == 1:
            yield Proposal(shape, _alone(shape, module))


def _kind(module: nn.Module) -> tuple[bool, ...]:
    """What tells modules apart that no one style is for."""
    return is_linear(module), is_convolution(module), is_grouped(module)


def _apart_from(name: str, others: Collection[str]) -> str:
    """A pattern for what goes by this name in all layers, with as many numbers of its own as tell it from `others`."""
    parts = name.split(".")
    kept = len(parts)
    while True:
        pattern = ".".join([*(shape_of_name(part) for part in parts[:kept]), *parts[kept:]])
        numbers = [place for place in range(kept) if parts[place].isdigit()]
        if not numbers or not any(map(any_of([pattern]), others)):
            return pattern
        kept = numbers[-1]


def _alone(shape: str, module: nn.Module) -> list[Rules]:
    """Gathering sends the outputs, then sums the gradients of the inputs; splitting sums the outputs, then gathers
    those gradients. A sum sends twice as much.
    """
    if is_linear(module):
        found: list[Any] = [Column(gather_output=True), Row(split_input=True)]
    elif is_grouped(module):
        return [{shape: ConvGroups(gather_output=True)}]
    else:
        found = [ConvColumn(gather_output=True), ConvRow(split_input=True)]
    return [{shape: style} for style in (found if input_size(module) <= output_size(module) else reversed(found))]
