"""Further ways to shard a region, made from the rules that plans and names suggest for it.

fitted          what lies beside the projections of an attention goes along: gates, parameters per head, norms over all
                heads. Tried first
computed_whole  every linear is sharded and hands on whole activations: what is between them is computed alike on all
                ranks, whatever it is. Tried last: it costs gathers and shares out no attention
of_vocabulary   logits gathered where a loss needs them, embedding or head alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch.nn as nn

from .attention import LocalHeads
from .conventions import expert_alternatives
from .head_inputs import DealtRow
from .heads import HeadGeometry
from .hf_plan import Proposal
from .layer.linear import input_size, is_linear, output_size
from .layer.norm import rms_offset
from .patterns import shape_of_name, without_classes
from .rules import Rules
from .splits import EVEN, Heads, Split
from .styles import NAMED, Column, Row, ShardedParameter, Style, VocabEmbedding, VocabHead
from .wide_norm import WideNorm, weight_of


def further(region: Proposal, modules: dict[str, nn.Module]) -> list[Rules]:
    """All alternatives of a region, best first.

    modules     `modules_by_pattern` of the model
    """
    known = region.alternatives
    found = [
        grown
        for rules in known
        if (grown := {**rules, **_beside_heads(rules, modules), **_norms_inside(rules, modules)}) != rules
    ]
    if region.name in modules:  # a plan may say of packed features that they are not
        known = [
            *known,
            *(rules for rules in expert_alternatives(region.name, modules[region.name]) if rules not in known),
        ]
    whole = _computed_whole(known[-1]) if known else None
    if whole is None or whole in known:
        return [*found, *known]
    others = _gathered_beside(known[-1], modules)
    return [*found, *known, *([{**whole, **others}] if others else []), whole]


def _style(style: Style | str) -> Style | None:
    return NAMED.get(style) if isinstance(style, str) else style


def _beside_heads(rules: Rules, modules: dict[str, nn.Module]) -> Rules:
    """Linears that read what the queries read and make as many features as these, or one per head; parameters and
    norms per head or over all heads.
    """
    found: Rules = {}
    for path, style in rules.items():
        module = modules.get(path)
        if not isinstance(style, LocalHeads) or module is None:
            continue
        try:
            geometry = style.geometry or HeadGeometry.of(module)
        except ValueError:
            continue
        widths = _widths(path, rules, modules, geometry)
        for name, child in module.named_children():
            if f"{path}.{name}" in rules:
                continue
            if is_linear(child) and (input_size(child), output_size(child)) in widths:
                found[f"{path}.{name}"] = Column(widths[input_size(child), output_size(child)])
            elif is_linear(child) and _of_all_values(child, widths, geometry):
                found[f"{path}.{name}"] = DealtRow(Heads("kv", style.geometry), outputs=Heads("kv", style.geometry))
            elif (weight := weight_of(child)) is not None and rms_offset(child) is not None:
                splits = {out: split for (_, out), split in widths.items()}
                if weight.shape[0] in splits and weight.shape[0] != _query_width(path, rules, modules, geometry):
                    found[f"{path}.{name}"] = WideNorm(splits[weight.shape[0]])
        for name, param in module.named_parameters(recurse=False):
            kinds = {geometry.num_kv_heads: "kv", geometry.num_heads: "q"}
            if f"{path}.{name}" not in rules and param.shape[0] in kinds:
                split = Heads(kinds[param.shape[0]], style.geometry)  # type: ignore[arg-type]
                found[f"{path}.{name}"] = ShardedParameter(0, split)
        found |= _position_biases(path, modules, style, geometry)
    return found


def _of_all_values(linear: nn.Module, widths: dict[tuple[int, int], Split], geometry: HeadGeometry) -> bool:
    """Whether a linear reads the keys or values of all heads, and makes a number for each head of them."""
    of_keys = {out for (_, out), split in widths.items() if isinstance(split, Heads) and split.kind == "kv"}
    kv_heads = geometry.num_kv_heads
    return output_size(linear) == kv_heads and input_size(linear) in of_keys - {kv_heads}


def _position_biases(path: str, modules: dict[str, nn.Module], style: LocalHeads, geometry: HeadGeometry) -> Rules:
    """What makes one number for each head and each distance of two positions: tables [distances, heads] in the
    attention, in a part of it or in a module beside it; MLPs of distances, whose last linear makes the numbers.
    """
    found: Rules = {}
    around, _, own_name = without_classes(path).rpartition(".")
    holders: list[tuple[str, nn.Module, str | None]] = [(path, modules[path], None)]
    holders += [(f"{path}.{name}", child, "") for name, child in modules[path].named_children()]
    if around in modules:
        beside = path.rpartition(".")[0]
        holders += [
            (f"{beside}.{name}", child, own_name)
            for name, child in modules[around].named_children()
            if name != own_name
        ]
    for holder, module, where in holders:
        split = Heads("q", style.geometry, where)
        for name, param in module.named_parameters(recurse=False):
            if name.endswith("bias_table") and param.shape[-1] == geometry.num_heads:
                found[f"{holder}.{name}"] = ShardedParameter(-1, split)
        if where == "" and isinstance(module, nn.Sequential) and "bias" in holder.rpartition(".")[2]:
            *hidden, (last, linear) = module.named_children()
            if is_linear(linear) and output_size(linear) == geometry.num_heads:
                found |= {f"{holder}.{name}": "replicated" for name, child in hidden if is_linear(child)}
                found[f"{holder}.{last}"] = Column(split)
    return found


def _widths(
    path: str, rules: Rules, modules: dict[str, nn.Module], geometry: HeadGeometry
) -> dict[tuple[int, int], Split]:
    """Input and output features of the projections by heads of an attention -> how the outputs are dealt."""
    found: dict[tuple[int, int], Split] = {}
    for kind, heads in (("kv", geometry.num_kv_heads), ("q", geometry.num_heads)):
        for pattern, style in rules.items():
            style = _style(style)  # type: ignore[assignment]
            if pattern.rpartition(".")[0] != path or not isinstance(style, Column) or pattern not in modules:
                continue
            if isinstance(style.split, Heads) and style.split.kind == kind and is_linear(modules[pattern]):
                for features in (heads, output_size(modules[pattern])):
                    found[input_size(modules[pattern]), features] = style.split
    return found


def _query_width(path: str, rules: Rules, modules: dict[str, nn.Module], geometry: HeadGeometry) -> int:
    """Features of one query head; norms of that width are applied head by head."""
    for pattern, style in rules.items():
        inside = pattern.rpartition(".")[0] == path and pattern in modules and isinstance(style, Column)
        if inside and isinstance(style.split, Heads) and style.split.kind == "q":  # type: ignore[union-attr]
            return output_size(modules[pattern]) // geometry.num_heads
    return 0


def _norms_inside(rules: Rules, modules: dict[str, nn.Module]) -> Rules:
    """Norms of an MLP over the features between its linears."""
    found: Rules = {}
    for pattern, style in rules.items():
        if _style(style) != Row(EVEN) or pattern not in modules:
            continue
        parent = pattern.rpartition(".")[0]
        for name, child in modules[parent].named_children() if parent in modules else ():
            weight = weight_of(child)
            wide = weight is not None and weight.shape[0] == input_size(modules[pattern])
            if wide and rms_offset(child) is not None:
                found[f"{parent}.{name}"] = WideNorm(EVEN)
    return found


def _computed_whole(rules: Rules) -> Rules | None:
    """The linears of a region with whole activations before and behind them; None for a region of other parts."""
    found: Rules = {}
    for pattern, given in rules.items():
        style = _style(given)
        if isinstance(style, Column):
            found[pattern] = Column(gather_output=True)
        elif isinstance(style, Row):
            found[pattern] = Row(split_input=True)
        elif not isinstance(style, LocalHeads | ShardedParameter):
            return None
    return found if any(isinstance(style, Column | Row) for style in found.values()) else None


def _gathered_beside(rules: Rules, modules: dict[str, nn.Module]) -> Rules:
    """Other linears in an attention that is computed whole, as large as its queries (of relative positions)."""
    found: Rules = {}
    for path, style in rules.items():
        if not isinstance(style, LocalHeads) or path not in modules:
            continue
        linears = {f"{path}.{name}": child for name, child in modules[path].named_children() if is_linear(child)}
        sizes = [input_size(child) * output_size(child) for name, child in linears.items() if name in rules]
        for name, child in linears.items():
            if name not in rules and sizes and input_size(child) * output_size(child) >= min(sizes):
                found[name] = Column(gather_output=True)
    return found


def is_computed_whole(rules: Rules) -> bool:
    """Whether the ranks hold parts of the linears, and all compute what is between them."""
    linears = [style for style in map(_style, rules.values()) if isinstance(style, Column | Row)]
    columns = [style.gather_output for style in linears if isinstance(style, Column)]
    rows = [style.split_input for style in linears if isinstance(style, Row)]
    return bool(columns and rows) and all(columns + rows)


def of_vocabulary(rules: Rules) -> list[Rules]:
    """The rules of a vocabulary; with whole logits; the head alone; the embeddings alone."""
    gathered: Rules = {
        pattern: replace(style, gather_output=True) if isinstance(style, VocabHead) else style
        for pattern, style in rules.items()
    }
    parts: list[Rules] = [
        {pattern: style for pattern, style in gathered.items() if isinstance(style, kind)}
        for kind in (VocabHead, VocabEmbedding)
    ]
    found: list[Rules] = []
    for one in (rules, gathered, *parts):
        if one and one not in found:
            found.append(one)
    return found


def tables(model: nn.Module, vocabulary: Rules, taken: set[str]) -> Iterator[Proposal]:
    """Other embeddings that hold as much as half of the vocabulary's: of sounds and shapes of words, of n-grams, of
    words per layer. Those of positions are small where it counts.
    """
    modules = dict(model.named_modules())
    embeddings = [modules[name] for name, style in vocabulary.items() if isinstance(style, VocabEmbedding)]
    least = min((module.weight.numel() for module in embeddings if isinstance(module, nn.Embedding)), default=0) / 2
    seen: set[str] = set()
    for name, module in modules.items():
        shape = shape_of_name(name)
        if not least or not isinstance(module, nn.Embedding) or name in vocabulary or shape in seen | taken:
            continue
        if module.weight.numel() >= least and "pos" not in shape:
            seen.add(shape)
            yield Proposal(shape, [{shape: VocabEmbedding()}])
