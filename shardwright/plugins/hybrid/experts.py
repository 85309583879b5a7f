"""What the plugin does with `ep_size`: experts are spread over data-parallel ranks (see `shardformer.experts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import comb
from typing import Any, cast

from torch import nn

from ...cluster.mesh import ParallelMesh
from ...models.config import EXPERTS_PER_TOKEN, first_int, text_config
from ...ops.expert_exchange import NUMBER, packed_size
from ...shardformer.experts import cut_experts, expert_specs, find_experts, let_tokens_travel
from ...shardformer.layer.parallel_module import ParallelGroup
from ...shardformer.same_weights import require_same_weights
from ...spec import ParamSpec
from .resolved import Traffic
from .traffic import Tokens, features_of


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


def expert_traffic(
    model: nn.Module, positions: Sequence[Sequence[str]], mesh: ParallelMesh, tokens: Tokens, recomputes: bool
) -> list[Traffic]:
    """What travels to experts and back, at the pipeline position (names of its parameters) with most of them: per layer
    and microbatch the counts, two all-to-alls of rows forward and two backward.
    """
    ranks, spread = mesh.size("ep"), require_experts(model, mesh)
    if not spread:
        return []
    owners = [{name.rpartition(".")[0] for name in names} for names in positions]
    chosen = first_int(text_config(model), EXPERTS_PER_TOKEN)
    sizes = max(
        ([_sent_by_token(spread[n], chosen, ranks, tokens) for n in spread.keys() & held] for held in owners), key=sum
    )
    rounds = None if tokens.microbatches is None else 5 * len(sizes) * tokens.microbatches * tokens.slices
    known = chosen is not None and tokens.tokens is not None
    what = "tokens to experts and back, all-to-all, if all experts are chosen alike" + (
        " (without those that are recomputed)" if recomputes else ""
    )
    return [Traffic("ep", what, rounds, int(cast(int, tokens.tokens) * sum(sizes)) if known else None)]


def _sent_by_token(experts: Any, chosen: int | None, ranks: int, tokens: Tokens) -> Fraction:
    """Bytes that leave a rank for a token of its own and, going back, for as many of other ranks, in a layer's forward
    and backward: times the other ranks that hold an expert which it chose, when every choice is as likely as any other.
    """
    width, size, choices = features_of(experts), tokens.itemsize, chosen or 1
    there, back = packed_size(width * size, choices * size), width * size
    row = there + packed_size(choices * NUMBER) + back + back + there
    experts, here = experts.num_experts, experts.num_experts // ranks
    return (ranks - 1) * row * (1 - Fraction(comb(experts - here, choices), comb(experts, choices)))


def expert_notes(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    spread = require_experts(model, mesh)
    if not spread:
        return []
    module: Any = next(iter(spread.values()))
    ranks, same = mesh.size("ep"), mesh.size("expert_dp")
    copies = f"{same} ranks hold the same ones" if same > 1 else "no other rank holds the same ones"
    held = f"{module.num_experts // ranks} of the {module.num_experts} experts of a layer"
    return [f"ep_size={ranks}: every rank has {held}; {copies}"]
