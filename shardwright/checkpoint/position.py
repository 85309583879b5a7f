"""Where a rank stands among those that save and load together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..spec import ParamSpec


@dataclass(frozen=True)
class Position:
    """What a plugin tells about this rank.

    rank, world_size  among all processes that take part
    coordinates       position along the axes "dp_sp" (ranks with the same parameters), "dp" (ranks with other samples),
                      "pp", "tp", "sp", and where experts are spread "ep", "ep_tp" and "expert_dp" (ranks with the same
                      experts); an axis that is not listed has size 1
    sizes             of these axes
    copies            names of tied parameters of which this rank holds a copy, but not the first one
    """

    rank: int = 0
    world_size: int = 1
    coordinates: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()

    def coordinate(self, axis: str) -> int:
        return self.coordinates.get(axis, 0)

    def writes(self, spec: ParamSpec) -> bool:
        """Whether this rank, of all that hold the same part of a parameter, is the one to save it."""
        if spec.name in self.copies or self.coordinate("expert_dp" if spec.is_of_experts else "dp_sp"):
            return False
        return spec.is_sharded or self.coordinate(spec.axis) == 0

    @staticmethod
    def data_parallel(rank: int, world_size: int) -> Position:
        """Every rank holds everything."""
        return Position(rank, world_size, {"dp": rank, "dp_sp": rank}, {"dp": world_size, "dp_sp": world_size})
