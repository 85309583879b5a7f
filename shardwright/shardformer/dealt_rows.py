"""Modules that compute each of their rows by itself, and of which a rank has some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from ..spec import ParamSpec
from .layer.linear import join_name
from .splits import EVEN, Split
from .styles import Role, Site, Style

_GROUPS = ("groups", "n_groups")  # where modules keep how many groups of rows they have
_ROWS = ("in_channels", "out_channels", "out_features")


@dataclass(frozen=True)
class DealtRows(Style):
    """A module whose parameters are all dealt along their first dim, as it computes for each row, or for each group of
    rows, by itself:

        a convolution along tokens      whose channels read one of the inputs each, or those of their head
        a linear in groups              weights [groups * outputs, inputs], each group of its own inputs
        any other linear                of whose weight the forward around makes its own use
    """

    split: Split = EVEN

    @property
    def role(self) -> Role | None:
        return "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = site.module
        if site.parameter is not None:
            raise ValueError(f"{type(self).__name__} applies to a module, but the rule names a parameter")
        if isinstance(module, nn.Conv1d) and (module.in_channels != module.out_channels or module.groups == 1):
            raise ValueError("the style deals the channels of a grouped nn.Conv1d with as many inputs as outputs")
        specs = {
            name: ParamSpec(join_name(site.name, name), tuple(param.shape), 0, site.pieces(self.split, param.shape[0]))
            for name, param in module.named_parameters()
        }
        self._check(site, specs)
        return specs

    def _check(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        rows = _rows_of_group(site.module)
        for piece in (piece for spec in specs.values() for rank in spec.pieces for piece in rank):
            if piece.length % rows or (piece.start % rows and not piece.is_padding):
                raise ValueError(f"groups of {rows} channels cannot be divided")

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module: Any = site.module
        rows = _rows_of_group(module)
        super().convert(site, specs)
        own = module.weight.shape[0]
        counts = {**dict.fromkeys(_ROWS, own), **dict.fromkeys(_GROUPS, own // rows)}
        for name, count in counts.items():
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, count)


def _rows_of_group(module: nn.Module) -> int:
    """Rows of the weight that are computed together."""
    groups = next((count for name in _GROUPS if isinstance(count := getattr(module, name, None), int)), None)
    return module.get_parameter("weight").shape[0] // groups if groups else 1
