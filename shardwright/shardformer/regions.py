"""Regions: the parts of a model in which activations are sharded, found once from what was decided about its modules.

A region is the module around sharded ones, an attention or an MLP. It opens with the column linears, whose outputs are
the first sharded activations, and closes with the row linears, whose outputs are whole again; where they sit in
different modules (BERT's `intermediate` and `output`), one region opens and another closes. What the regions are for:
dropout between opening and closing draws per rank, a parameter in between must be decided on, because its gradient is a
partial sum, and what opens must close.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.nn as nn

from ..models.config import QUERY_HEADS, first_int
from .layer.linear import input_size, is_linear, output_size
from .styles import Decision, Replaced


@dataclass(frozen=True)
class Region:
    """A part of a model in which activations are sharded.

    name        of `module` in the model
    module      the module around the sharded ones; or one that opens and closes by itself, which then is all of `opens`
                and `closes`
    opens       modules whose outputs are the first sharded activations
    closes      modules whose outputs are whole again
    undecided   names of parameters that no rule decided on and that may be applied to sharded activations
    """

    name: str
    module: nn.Module
    opens: tuple[nn.Module, ...]
    closes: tuple[nn.Module, ...]
    undecided: tuple[str, ...] = ()


def find_regions(model: nn.Module, decisions: Sequence[Decision]) -> list[Region]:
    """In the order of the decisions; the model is still whole. The vocabulary is no region: what surrounds it is
    replicated.
    """
    inside = [decision for decision in decisions if decision.style.role is not None]
    around = {id(decision.site.parent): decision.site.parent for decision in inside}
    names = {id(module): name for name, module in model.named_modules()}
    decided = _decided(decisions)
    regions = []
    for parent in around.values():
        own = [decision for decision in inside if decision.site.parent is parent]
        opens = tuple(decision.site.module for decision in own if decision.style.role == "opens")
        closes = tuple(decision.site.module for decision in own if decision.style.role == "closes")
        undecided = (
            ()
            if isinstance(parent, nn.ModuleList)
            else _undecided(model, parent, names, decided, around, (opens, closes))
        )
        regions.append(Region(names[id(parent)], parent, opens, closes, undecided))
        for decision in own:
            if decision.style.role == "sums":
                itself = (decision.site.module,)
                regions.append(Region(decision.site.name, decision.site.module, itself, itself))
    return regions


def undecided_parameters(regions: Iterable[Region]) -> list[str]:
    return list(dict.fromkeys(name for region in regions for name in region.undecided))


def unclosed(model: nn.Module, regions: Sequence[Region], decisions: Sequence[Decision]) -> Region | None:
    """A region that opens and that nothing closes: what comes out of it is taken for whole and is not."""
    return next((region for region, around in ends(model, regions, decisions) if around is None), None)


def ends(model: nn.Module, regions: Sequence[Region], decisions: Sequence[Decision]) -> list[tuple[Region, str | None]]:
    """Where regions end that open and have no closing modules of their own: the name of the smallest module around
    such a region that closes what is inside, or that holds one that closes without opening, within one element of a
    list of layers. None where there is none; its own name where a layer of the user's is near by, which may close it.
    """
    unknown = {decision.site.name for decision in decisions if decision.style.role == "unknown"}
    closing = {
        region.name: {input_size(module) for module in region.closes}
        for region in regions
        if region.closes and not region.opens
    }
    lists = _lists(model)
    whole = {region.name for region in regions if region.opens and region.closes}
    taken: set[str] = set()
    found: list[tuple[Region, str | None]] = []
    for region in sorted(regions, key=lambda region: -region.name.count(".")):
        if not region.opens or region.closes:
            continue
        widths = {output_size(module) for module in region.opens}
        end = None
        for around in _ancestors(region.name, lists):
            if any(is_within(name, around) for name in unknown):
                end = region.name
                break
            if around in whole:
                end = around
                break
            near = [
                name for name in closing if is_within(name, around) and (name not in taken or closing[name] & widths)
            ]
            if near:
                taken.add(min(near, key=lambda name: name in taken))
                end = around
                break
        found.append((region, end))
    return found


def list_element(model: nn.Module, name: str) -> str:
    """The element of a list of layers that the module is in, by name; the model itself where it is in none."""
    lists = _lists(model)
    return list(_ancestors(name, lists))[-1]


def _lists(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def _ancestors(name: str, lists: set[str]) -> Iterable[str]:
    """The module itself and those around it, up to the element of a list that it is in."""
    while True:
        yield name
        parent = name.rpartition(".")[0]
        if not name or parent in lists:
            return
        name = parent


def is_within(name: str, around: str) -> bool:
    return not around or name == around or name.startswith(f"{around}.")


def _decided(decisions: Sequence[Decision]) -> set[int]:
    decided = {id(decision.site.module.get_parameter(name)) for decision in decisions for name in decision.specs}
    for decision in decisions:
        if isinstance(decision.style, Replaced):
            params = list(decision.site.module.parameters())
            # norms are replaced wherever they are, and nothing is said about them by that
            if any(param.ndim > 1 for param in params):
                decided |= {id(param) for param in params}
    return decided


def _undecided(
    model: nn.Module,
    region: nn.Module,
    names: dict[int, str],
    decided: set[int],
    around: dict[int, nn.Module],
    edges: tuple[Sequence[nn.Module], Sequence[nn.Module]],
) -> tuple[str, ...]:
    opens, closes = edges
    widths = {input_size(module) for module in opens} | {output_size(module) for module in closes}
    sharded = {output_size(module) for module in opens} | {input_size(module) for module in closes}
    found: dict[str, None] = {}
    for name, param in _parameters(model, region, around):
        if id(param) in decided:
            continue
        owner = region.get_submodule(name.rpartition(".")[0])
        if not _is_outside(owner, region, widths, sharded):
            found[f"{names[id(region)]}.{name}".removeprefix(".")] = None
    return tuple(found)


def _parameters(
    model: nn.Module, region: nn.Module, around: dict[int, nn.Module]
) -> Iterable[tuple[str, nn.Parameter]]:
    """All of the region's. Where the model itself is the region, children with regions of their own lie between
    regions, not in this.
    """
    if region is not model:
        yield from region.named_parameters()
        return
    yield from region.named_parameters(recurse=False)
    for name, child in region.named_children():
        if not any(id(module) in around for module in child.modules()):
            yield from ((f"{name}.{local}", param) for local, param in child.named_parameters())


def _is_outside(owner: nn.Module, region: nn.Module, widths: set[int], sharded: set[int]) -> bool:
    """Whether a module next to sharded ones can only meet whole activations: norms and embeddings as wide as what
    enters or leaves the region, which a shard never is, and linears that read it and whose output does not go
    together with sharded features. Not in attentions, where features are viewed as heads.

    widths      features of what enters or leaves the region
    sharded     features in between, of all ranks
    """
    if first_int(region, QUERY_HEADS) is not None:
        return False
    if isinstance(owner, nn.Embedding):
        return owner.embedding_dim in widths
    if is_linear(owner):
        return input_size(owner) in widths and output_size(owner) not in {1, *sharded}
    return all(param.ndim == 1 and param.shape[0] in widths for param in owner.parameters(recurse=False))
