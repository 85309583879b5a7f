"""The process groups that gradients are reduced over.

With expert parallelism there are two of each: ranks along ep share all layers but hold different experts, so that
experts are reduced and sharded over those ranks alone that hold the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from ..comm.quantised_wire import quantised_group
from ..spec import EXPERT_AXES, ParamSpec
from .layout import Family, Shards


@dataclass(frozen=True)
class Groups:
    """Process groups of gradient reduction; None stands for a group of one.

    shard    the ZeRO sub-group
    replica  across sub-groups
    everyone shard x replica: all ranks that hold the same parameters
    axes     model axes (name -> group), for partial gradients and shared rows
    tied     tied group name -> group of the ranks with a copy
    experts  shard, replica and everyone of experts, where these are spread over ranks
    """

    shard: dist.ProcessGroup | None
    replica: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    axes: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    tied: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    experts: Groups | None = None

    def of(self, family: Family) -> Groups:
        return self.experts if self.experts is not None and family.experts else self

    def of_spec(self, spec: ParamSpec | None) -> Groups:
        return self.experts if self.experts is not None and spec is not None and spec.is_of_experts else self

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The sub-group, where it has several ranks."""
        return self.shard if self.num_shards > 1 else None

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else dist.get_world_size(self.shard)

    @property
    def shards(self) -> Shards:
        return Shards(self.num_shards, (self.experts or self).num_shards)

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard is None else dist.get_rank(self.shard)

    def after_scatter(self, family: Family) -> list[dist.ProcessGroup]:
        """The groups that a shard is all-reduced over."""
        groups = [self.axes[axis] for axis in family.partial]
        if family.tied is not None and family.tied in self.tied:
            groups.append(self.tied[family.tied])
        replica = self.of(family).replica
        if replica is not None:
            groups.append(replica)
        return [group for group in groups if dist.get_world_size(group) > 1]


def zero_groups(
    mesh: ParallelMesh,
    stage: int,
    tied: Mapping[str, dist.ProcessGroup] = MappingProxyType({}),
    quantised: bool = False,
) -> Groups:
    """The groups of a ZeRO stage. With `quantised` those along data parallelism send in 8 bits."""

    def group(axis: str) -> dist.ProcessGroup | None:
        return mesh.group(axis) if mesh.size(axis) > 1 else None

    def data_group(axis: str) -> dist.ProcessGroup | None:
        found = group(axis)
        return quantised_group(found) if quantised and found is not None else found

    experts = None
    if mesh.size("ep") > 1:
        experts = Groups(
            shard=data_group("expert_zero") if stage > 0 else None,
            replica=data_group("zero_replica") if stage > 0 else data_group("expert_dp"),
            everyone=group("expert_dp"),
        )
    return Groups(
        shard=data_group("zero") if stage > 0 else None,
        replica=data_group("zero_replica") if stage > 0 else data_group("dp_sp"),
        everyone=group("dp_sp"),
        axes={axis: mesh.group(axis) for axis in ("tp", "sp", *(EXPERT_AXES if experts is not None else ()))},
        tied=dict(tied),
        experts=experts,
    )
