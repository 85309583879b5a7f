"""Layers of every stage of a model, as the cut of a pipeline deals them (`pipeline.cut.partition`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from ..models.config import hidden_size, visited_share
from ..models.layer_chain import Unit
from ..pipeline.cut.balance import ChainCosts, balance
from ..pipeline.cut.partition import BYTE, CHEAP_BYTES, EMBEDDING_SHARE, lookup_tables
from ..pipeline.planning.placement import Placement
from ..zero.lookups import only_looks_up


class Ends(NamedTuple):
    """Costs in those of a mean layer's forward: of what lies before the layers, of what lies behind them, and of what
    of a layer is no product; and of every layer, where they differ.
    """

    before: float
    behind: float
    cheap: float
    layers: tuple[float, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[Unit]) -> Ends:
        """As `partition.chain_costs` counts them."""
        tables, visited = lookup_tables(model), visited_share(model)
        again = looked_up_again(model, units)
        unit_of = {unit.layer: index for index, unit in enumerate(units)}
        layers = [EMBEDDING_SHARE * again.get(index, 0.0) for index in range(len(units))]
        before = behind = 0.0
        counted = set[int]()
        for name, param in model.named_parameters(remove_duplicate=False):
            size = float(param.numel())
            own = next((index for layer, index in unit_of.items() if name.startswith(f"{layer}.")), None)
            if own is not None:
                layers[own] += size * (visited if ".experts" in name else 1.0)
            elif name not in tables:
                behind += size
            elif id(param) not in counted:
                before += size * EMBEDDING_SHARE
                counted.add(id(param))
        mean = sum(layers) / len(units)
        cheap = min(CHEAP_BYTES * BYTE * (hidden_size(model) or 0), mean)
        uneven = max(layers) - min(layers) > 1e-6 * mean
        return cls(before / mean, behind / mean, cheap / mean, tuple(each / mean for each in layers) if uneven else ())


def looked_up_again(model: nn.Module, units: Sequence[Unit]) -> dict[int, float]:
    """Elements of a table that the first of a later stack of layers looks up, too, as a decoder's does behind an
    encoder, by that layer.
    """
    tables, firsts = lookup_tables(model), dict[str, int]()
    for index, unit in enumerate(units):
        firsts.setdefault(unit.layer.rpartition(".")[0].rpartition(".")[0], index)
    found = dict[int, float]()
    seen = set[int]()
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in tables:
            continue
        stack = next((home for home in firsts if home and name.startswith(f"{home}.")), "")
        index = firsts.get(stack, 0)
        if index and id(param) in seen:
            found[index] = found.get(index, 0.0) + param.numel()
        seen.add(id(param))
    return found


def table_size(model: nn.Module) -> float:
    """Elements of what is looked up and trained."""
    tables = lookup_tables(model)
    return float(
        sum(param.numel() for name, param in model.named_parameters() if name in tables and param.requires_grad)
    )


def reads_tables(model: nn.Module) -> bool:
    """Whether a backward reads what has been looked up, as of embeddings that are scaled by their own size."""
    homes = {name.rpartition(".")[0] for name in lookup_tables(model)}
    return not all(only_looks_up(model.get_submodule(home)) for home in homes)


def is_tied(model: nn.Module) -> bool:
    """Whether what is looked up is used elsewhere, too: as the head."""
    tables = lookup_tables(model)
    named = list(model.named_parameters(remove_duplicate=False))
    looked_up = {id(param) for name, param in named if name in tables}
    return any(id(param) in looked_up and name not in tables for name, param in named)


@lru_cache(maxsize=1024)
def dealt(layers: int, ends: Ends, placement: Placement, whole: float, selective: float) -> tuple[int, ...]:
    """Layers by stage."""
    own = ends.layers or (1.0,) * layers
    forward = [own[0] + ends.before, *own[1:], ends.behind]
    costs = ChainCosts(forward, ends.before, whole, selective, [min(ends.cheap, each) for each in own])
    first, last = int(not ends.before), layers + (ends.behind > 0)
    return tuple(len(stage) for stage in balance(costs, range(first, last), placement))
