"""Rules for the parts that transformers are made of, as dicts that a plan is put together from.

Plan({**attention_rules("layers.*.self_attn"), **mlp_rules("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj")})
"""

from __future__ import annotations

from typing import Any

from .attention import LocalHeads
from .heads import HeadGeometry
from .splits import Heads, Packed
from .styles import Column, LatentKeyValue, Row, ShardedParameter, Style

Rules = dict[str, Style | str]


def attention_rules(
    path: str,
    q: str | None = "q_proj",
    k: str = "k_proj",
    v: str = "v_proj",
    o: str = "o_proj",
    *,
    fused: str | None = None,
    layout: str = "packed",
    geometry: HeadGeometry | None = None,
    **local: Any,
) -> Rules:
    """Rules for the attention module at `path`: projections by head, output projection, local head counts.

    fused       name of a projection that is q, k and v in one; `layout` says how ("packed", "interleaved")
    local       passed to `LocalHeads`
    """
    rules: Rules = {path: LocalHeads(geometry, **local)}
    if fused is not None:
        rules[f"{path}.{fused}"] = Column(Heads(layout, geometry))  # type: ignore[arg-type]
    else:
        rules[f"{path}.{q}"] = Column(Heads("q", geometry))
        rules[f"{path}.{k}"] = Column(Heads("kv", geometry))
        rules[f"{path}.{v}"] = Column(Heads("kv", geometry))
    rules[f"{path}.{o}"] = Row(Heads("q", geometry))
    return rules


def latent_attention_rules(path: str, heads: int, rotary_dim: int, query_rank: int | None) -> Rules:
    """Rules for multi-head latent attention: down projections whole on every rank, up projections by head.

    query_rank  of the low-rank query projection, None when there is only `q_proj`
    """
    geometry = HeadGeometry(heads, heads)
    by_heads = Column(Heads("q", geometry))
    query: Rules = {f"{path}.q_proj": by_heads}
    if query_rank is not None:
        query = {f"{path}.q_a_proj": "replicated", f"{path}.q_a_layernorm": "replicated", f"{path}.q_b_proj": by_heads}
    return {
        path: LocalHeads(geometry),
        **query,
        f"{path}.kv_a_proj_with_mqa": LatentKeyValue(rotary_dim),
        f"{path}.kv_a_layernorm": "replicated",
        f"{path}.kv_b_proj": by_heads,
        f"{path}.o_proj": Row(Heads("q", geometry)),
    }


def expert_rules(path: str) -> Rules:
    """Rules for fused experts, [E, 2I, H] (gate, up) and [E, I, H]: every rank has its intermediate features of
    every expert.
    """
    return {
        f"{path}.gate_up_proj": ShardedParameter(1, Packed(2)),
        f"{path}.down_proj": ShardedParameter(2),
        path: "partial_sum",
    }


def mlp_rules(path: str, up: str | tuple[str, ...], down: str) -> Rules:
    """Rules for an MLP: column-parallel `up` projections, row-parallel `down`."""
    ups = (up,) if isinstance(up, str) else up
    return {**{f"{path}.{name}": "colwise" for name in ups}, f"{path}.{down}": "rowwise"}
