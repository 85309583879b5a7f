"""What the plugin does with `ep_size`: experts are spread over data-parallel ranks (see `shardformer.experts`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...cluster.mesh import ParallelMesh
from ...shardformer.experts import cut_experts, expert_specs, find_experts, let_tokens_travel
from ...shardformer.layer.parallel_module import ParallelGroup
from ...shardformer.same_weights import require_same_weights
from ...spec import ParamSpec


def require_experts(model: nn.Module, mesh: ParallelMesh) -> Mapping[str, nn.Module]:
    """Experts by name, none without expert parallelism; ValueError for a model whose experts cannot be spread."""
    ranks = mesh.size("ep")
    return find_experts(model, ranks) if ranks > 1 else {}


def specs_of_experts(model: nn.Module, known: Mapping[int, ParamSpec], mesh: ParallelMesh) -> dict[int, ParamSpec]:
    """Layouts by `id` of the parameters, on a model that has not been changed; `known` are those over tp."""
    spread = require_experts(model, mesh)
    return expert_specs(model, spread, known, mesh.size("ep"), mesh.size("tp")) if spread else {}


def spread_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Before layers are sharded: experts take the tokens of all ranks along ep."""
    spread = require_experts(model, mesh)
    if spread:
        require_same_weights(nn.ModuleList(spread.values()), mesh.group("ep"))
        let_tokens_travel(spread, ParallelGroup(mesh.group("ep")))


def keep_own_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Behind it: the parameters of experts keep those of this rank."""
    if mesh.size("ep") > 1:
        cut_experts(model, ParallelGroup(mesh.group("ep")), mesh.size("tp"))
