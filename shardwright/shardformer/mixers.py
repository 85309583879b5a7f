"""Kinds of token mixers that are no attention, described by the names of their parts.

Families share these kinds: a gated delta net is one in Qwen3-Next, in OLMo Hybrid and in Kimi Linear. A module of which
all parts of a kind are found is proposed to the generic policy as one, which tries it on a small copy of the model, as
it does with everything that goes by names. Where heads or channels cannot be dealt, the mixer stays whole, by name.

Every kind deals heads or channels, so that a rank computes its own from the projections to the output projection, whose
parts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch.nn as nn

from ..spec import ParamSpec
from .attention import LocalHeads
from .dealt_rows import DealtRows
from .layer.linear import input_size, is_linear, output_size
from .mixer_styles import (
    ByHeads,
    HalfOfHeads,
    LocalSizes,
    OwnOutput,
    SharedOutput,
    of_heads,
)
from .patterns import has_all
from .rules import Rules
from .splits import Heads, Packed
from .state_space import state_space_rules
from .styles import Column, Row, ShardedParameter, Site, Style
from .wide_norm import WideNorm


@dataclass(frozen=True)
class Mixer:
    """A kind of mixers.

    parts       name below the module -> style; "" is the module itself. All of these are there.
    optional    the same for what only some of the kind have
    """

    parts: Mapping[str, Style | str]
    optional: Mapping[str, Style | str] = field(default_factory=dict)

    def rules(self, name: str, module: nn.Module) -> Rules | None:
        """Rules for the module, None where it is none of the kind."""
        if not has_all(module, filter(None, self.parts)):
            return None
        there = {part: style for part, style in self.optional.items() if has_all(module, [part])}
        return {f"{name}.{part}".removesuffix("."): style for part, style in {**self.parts, **there}.items()}


def _columns(split: ByHeads, *names: str) -> dict[str, Style | str]:
    return dict.fromkeys(names, Column(split))


def _gated_delta_net() -> Iterator[Mixer]:
    """Key heads, each with its value heads; the decay is one number for each value head."""
    heads = "num_k_heads"
    qkv = ByHeads(heads, ("key_dim", "key_dim", "value_dim"))
    one = ByHeads(heads)
    common: dict[str, Style | str] = {
        "": LocalSizes(heads, ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")),
        "conv1d": DealtRows(qkv),
        "A_log": of_heads(heads),
        "dt_bias": of_heads(heads),
    }
    # per key head: its query, its key, its values, their gates
    yield Mixer(
        {
            **common,
            **_columns(one, "in_proj_qkvz", "in_proj_ba"),
            "norm": "partial_gradient",
            "out_proj": Row(one),
        }
    )
    yield Mixer(
        {
            **common,
            **_columns(one, "in_proj_z", "in_proj_b", "in_proj_a"),
            "in_proj_qkv": Column(qkv),
            "norm": "partial_gradient",
            "out_proj": Row(one),
        }
    )
    yield Mixer(
        {
            **common,
            **_columns(one, "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
            "o_norm": "partial_gradient",
            "o_proj": Row(one),
        }
    )


def _kimi_delta_attention() -> Mixer:
    """A delta net whose decay is one number for each channel, made by a module of its own."""
    heads = "num_heads"
    one, gate = ByHeads(heads), LocalSizes(heads, ("num_heads", "qkv_dim"))
    return Mixer(
        {
            "": LocalSizes(heads, ("num_heads", "qkv_dim", "conv_dim")),
            **_columns(one, "q_proj", "k_proj", "v_proj", "b_proj"),
            "conv1d": DealtRows(ByHeads(heads, ("qkv_dim",) * 3)),
            "forget_gate": gate,
            "forget_gate.dt_bias": of_heads(heads),
            "forget_gate.A_log": _DecayOfHeads(0, one),
            "o_norm": "partial_gradient",
            "o_proj": Row(one),
        },
        {
            **_columns(one, "g_proj", "g_b_proj", "forget_gate.f_proj", "forget_gate.f_b_proj"),
            **dict.fromkeys(("g_a_proj", "forget_gate.f_a_proj"), "replicated"),
        },
    )


@dataclass(frozen=True)
class _DecayOfHeads(ShardedParameter):
    """One number for each head, in a parameter whose other dims are 1: [H] or [1, 1, H, 1]."""

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        assert site.parameter is not None
        shape = site.module.get_parameter(site.parameter).shape
        dim = max(range(len(shape)), key=shape.__getitem__)
        return ShardedParameter(dim, self.split).specs(site)


def _lightning_attention() -> Mixer:
    """Linear attention with a fixed decay for each head, and a norm over the features of all heads."""
    heads = "num_attention_heads"
    one = ByHeads(heads)
    return Mixer(
        {
            "": LocalSizes(
                heads,
                (heads,),
                buffers=(("slope_rate", 0), ("query_decay", 0), ("key_decay", 0), ("diagonal_decay", 1)),
            ),
            **_columns(one, "qkv_proj", "output_gate"),
            "norm": WideNorm(one),
            "out_proj": Row(one),
        }
    )


def _recurrent_block() -> Mixer:
    """A gated linear recurrent unit, whose gates are block-diagonal: channels of one block belong together."""
    heads = "rg_lru.num_attention_heads"
    one, inner = ByHeads(heads), "num_attention_heads"
    return Mixer(
        {
            "": LocalSizes(heads, ("lru_width", "hidden_size")),
            **_columns(one, "linear_x", "linear_y"),
            "conv_1d": DealtRows(one),
            "rg_lru": LocalSizes(inner, (inner,)),
            "rg_lru.recurrent_param": of_heads(inner),
            **{f"rg_lru.{kind}_gate_{part}": of_heads(inner) for kind in ("input", "recurrent") for part in _AFFINE},
            "linear_out": Row(one),
        }
    )


_AFFINE = ("weight", "bias")


def _xlstm() -> Iterator[Mixer]:
    """Matrix memory: a state for each head, gates of one number for each, a norm for each."""
    heads = "config.num_heads"
    one = ByHeads(heads)
    inner = "num_heads"
    common: dict[str, Style | str] = {
        "": LocalSizes(heads, ("qk_dim", "v_dim"), config=("num_heads",), state="state"),
        "multihead_norm": LocalSizes(inner, (inner, "num_features")),
        "multihead_norm.weight": of_heads(inner),
        "out_proj": Row(one),
    }
    biased: dict[str, Style | str] = {"multihead_norm.bias": of_heads(inner)}
    yield Mixer({**common, **_columns(one, "q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")}, biased)
    fused = ByHeads(heads, ("qk_dim", "qk_dim", "v_dim", "v_dim"))
    gates = ByHeads(heads, (heads, heads))
    yield Mixer({**common, "qkv_opreact": Column(fused), "ifgate_preact": Column(gates)}, biased)


def _rwkv() -> Iterator[Mixer]:
    """Time mixing, in which every channel has its own state, and channel mixing."""
    channels = "attention_hidden_size"
    one = ByHeads(channels)
    yield Mixer(
        {
            "": LocalSizes(channels, (channels,), state="state", first=2),
            **_columns(one, "key", "value", "receptance"),
            **dict.fromkeys(("time_decay", "time_first"), of_heads(channels)),
            **dict.fromkeys(("time_mix_key", "time_mix_value", "time_mix_receptance"), "replicated"),
            "output": Row(one),
        }
    )
    yield Mixer(
        {
            "key": "colwise",
            "value": "rowwise",
            "receptance": "colwise_gathered",
            **dict.fromkeys(("time_mix_key", "time_mix_receptance"), "replicated"),
        }
    )


def _compressed_convolutions() -> Mixer:
    """Attention whose queries and keys pass two convolutions; of the features of all value heads the first half are of
    this token, the second half of the one before.
    """
    q, kv, both = Heads("q"), Heads("kv"), Heads("qk")
    return Mixer(
        {
            "": LocalHeads(),
            "qkv_proj": LocalHeads(),
            "qkv_proj.q_proj": Column(q),
            "qkv_proj.k_proj": Column(kv),
            "qkv_proj.v_proj_current": OwnOutput(HalfOfHeads(second=False)),
            "qkv_proj.v_proj_delayed": OwnOutput(HalfOfHeads(second=True)),
            "qkv_proj.conv_qk_depthwise": DealtRows(both),
            "qkv_proj.conv_qk_grouped": DealtRows(both),
            "qk_norm.temp": ShardedParameter(0),
            "o_proj": Row(q),
        }
    )


def _shared_latent_attention() -> Mixer:
    """Attention with one head of keys and values for all queries, and an output projection in groups of heads."""
    heads = "config.o_groups"
    one = ByHeads(heads)
    return Mixer(
        {
            "": LocalSizes(heads, ("num_heads", "num_key_value_groups"), config=("o_groups",)),
            **dict.fromkeys(("q_a_proj", "q_a_norm", "kv_proj"), "replicated"),
            "q_b_proj": Column(one),
            "sinks": of_heads(heads),
            "kv_norm": SharedOutput(),
            "o_a_proj": DealtRows(one),
            "o_b_proj": Row(one),
        },
        {"compressor": SharedOutput()},
    )


def _short_convolution(name: str, module: nn.Module) -> Rules | None:
    """Two gates and what is convolved, B, C, x: every channel for itself."""
    three, out = getattr(module, "in_proj", None), getattr(module, "out_proj", None)
    if not isinstance(three, nn.Module) or not isinstance(out, nn.Module) or not is_linear(three) or not is_linear(out):
        return None
    if output_size(three) != 3 * input_size(out):
        return None
    return Mixer({"in_proj": Column(Packed(3)), "conv": DealtRows(), "out_proj": "rowwise"}).rules(name, module)


# Every kind that is known, best first.
_KINDS: tuple[Callable[[str, nn.Module], Rules | None], ...] = (
    *(kind.rules for kind in _gated_delta_net()),
    _kimi_delta_attention().rules,
    _lightning_attention().rules,
    _recurrent_block().rules,
    *(kind.rules for kind in _xlstm()),
    *(kind.rules for kind in _rwkv()),
    _compressed_convolutions().rules,
    _shared_latent_attention().rules,
    state_space_rules,
    _short_convolution,
)


def mixer_rules(name: str, module: nn.Module) -> list[Rules]:
    """Rules for a module that is a mixer of a known kind, best first; none for others."""
    return [rules for recognise in _KINDS if (rules := recognise(name, module))]
