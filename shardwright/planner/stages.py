"""Layers of every stage of a model of equal layers, as the cut of a pipeline deals them (`pipeline.cut.partition`)."""

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


class Ends(NamedTuple):
    """Costs in those of a layer's forward: of what lies before the layers, of what lies behind them, and of what of a
    layer is no product.
    """

    before: float
    behind: float
    cheap: float

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[Unit]) -> Ends:
        """As `partition.chain_costs` counts them."""
        tables, visited = lookup_tables(model), visited_share(model)
        prefixes = tuple(f"{unit.layer}." for unit in units)
        layers = before = behind = 0.0
        for name, param in model.named_parameters(remove_duplicate=False):
            size = float(param.numel())
            if name.startswith(prefixes):
                layers += size * (visited if ".experts" in name else 1.0)
            elif name in tables:
                before += size * EMBEDDING_SHARE
            else:
                behind += size
        layer = layers / len(units)
        cheap = min(CHEAP_BYTES * BYTE * (hidden_size(model) or 0), layer)
        return cls(before / layer, behind / layer, cheap / layer)


def table_size(model: nn.Module) -> float:
    """Elements of what is looked up and trained."""
    tables = lookup_tables(model)
    return float(
        sum(param.numel() for name, param in model.named_parameters() if name in tables and param.requires_grad)
    )


def is_tied(model: nn.Module) -> bool:
    """Whether what is looked up is used elsewhere, too: as the head."""
    tables = lookup_tables(model)
    named = list(model.named_parameters(remove_duplicate=False))
    looked_up = {id(param) for name, param in named if name in tables}
    return any(id(param) in looked_up and name not in tables for name, param in named)


@lru_cache(maxsize=1024)
def dealt(layers: int, ends: Ends, placement: Placement, whole: float, selective: float) -> tuple[int, ...]:
    """Layers by stage."""
    forward = [1.0 + ends.before, *[1.0] * (layers - 1), ends.behind]
    costs = ChainCosts(forward, ends.before, whole, selective, [ends.cheap] * layers)
    first, last = int(not ends.before), layers + (ends.behind > 0)
    return tuple(len(stage) for stage in balance(costs, range(first, last), placement))
