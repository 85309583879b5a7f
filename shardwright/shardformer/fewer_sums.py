"""What the rules of a model without a policy of its own can reduce together: the parts of a block with experts, or an
attention and an MLP side by side.

Both are proposals: `linearity` and `side_by_side` prove them on the model at hand, and the generic policy tries on its
small copy what is left of them. Names are whole names, since layers of one list may differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn as nn

from .layer.parallel_module import ParallelGroup
from .patterns import patterns_of
from .plan import Plan
from .regions import list_element
from .rules import Rules
from .side_by_side import SideBySide
from .styles import PartialSum, Row, Style
from .sum_at_exit import SumAtExit, why_not


def summed_together(model: nn.Module, rules: Rules, parallel: ParallelGroup) -> Rules:
    """Rules to add to `rules`, none where nothing is reduced together."""
    rows = _matched(model, rules, Row, "rowwise")
    blocks = _blocks(model, rules, rows)
    outside = [name for name in rows if not name.startswith(tuple(f"{block}." for block in blocks))]
    return {**blocks, **_layers(model, rules, outside, parallel)}


def _blocks(model: nn.Module, rules: Rules, rows: list[str]) -> Rules:
    """Blocks that add up what experts and row linears return."""
    found: Rules = {}
    for experts in _matched(model, rules, PartialSum, "partial_sum"):
        block = experts.rpartition(".")[0]
        parts = [name.removeprefix(f"{block}.") for name in (experts, *rows) if name.startswith(f"{block}.")]
        free = block and not {block, *patterns_of(model, block)} & rules.keys()
        if free and len(parts) > 1 and why_not(model.get_submodule(block), parts) is None:
            found[block] = SumAtExit(tuple(parts))
    return found


def _layers(model: nn.Module, rules: Rules, rows: list[str], parallel: ParallelGroup) -> Rules:
    """Layers that do no more with the outputs of two row linears than to add them."""
    of_layers: dict[str, list[str]] = {}
    for name in rows:
        layer = list_element(model, name)
        if layer and not {layer, *patterns_of(model, layer)} & rules.keys():
            of_layers.setdefault(layer, []).append(name.removeprefix(f"{layer}."))
    pairs = {layer: names for layer, names in of_layers.items() if len(names) == 2}
    claimed: Rules = {layer: SideBySide(first, last) for layer, (first, last) in pairs.items()}
    if not claimed:
        return {}
    decisions = Plan({**rules, **claimed}).decide(model, parallel, complete=False)
    proven = {each.site.name for each in decisions if isinstance(each.style, SideBySide)}
    return {layer: style for layer, style in claimed.items() if layer in proven}


def _matched(model: nn.Module, rules: Mapping[str, Style | str], style: type[Style], named: str) -> list[str]:
    """Names of modules whose rule has the style, in the order of the model."""
    patterns = {
        pattern
        for pattern, given in rules.items()
        if given == named or (isinstance(given, style) and given.role != "inside")
    }
    return [name for name, _ in model.named_modules() if patterns_of(model, name) & patterns]
