"""A small copy of a model, to try a plan on: the same architecture and options, few layers, narrow, random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn

SMALL_ENOUGH = 3_000_000  # parameters; a model below is copied as it is
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "qk_rope_head_dim": 8,
    "vocab_size": 128,
}


def small_copy(model: nn.Module, ranks: int) -> nn.Module | None:
    """A model of the same class in evaluation mode and double precision, or None when none can be built.

    Equal on every rank: the weights come from a fixed seed. The caller's random state is left alone.
    """
    return build_small(native_class(model), copy.deepcopy(model.config), sum(param.numel() for param in model.parameters()), ranks)


def native_class(model: nn.Module) -> type[nn.Module]:
    return getattr(type(model), "native_class", type(model))


def build_small(native: type[nn.Module], config: Any, size: int, ranks: int) -> nn.Module | None:
    """See `small_copy`, for a model of `size` parameters; changes `config`."""
    if size > SMALL_ENOUGH:
        _shrink(config, ranks)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part._experts_implementation = "eager"  # the grouped kernels have no double precision
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            copied = native(config).double().eval()
        except Exception:  # whatever a foreign constructor makes of an unusual config
            return None
        if sum(param.numel() for param in copied.parameters()) > 10 * SMALL_ENOUGH:
            return None
        with torch.no_grad():
            for param in copied.parameters():
                param.add_(torch.randn_like(param), alpha=0.05)
    return copied


def _shrink(config: Any, ranks: int) -> None:
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            _shrink(getattr(config, name), ranks)
    values = vars(config)
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), None)
    heads = 2 * ranks
    ratio = 1
    for name in _HEADS:
        if isinstance(values.get(name), int):
            grouped = next((values[kv] for kv in _KV_HEADS if isinstance(values.get(kv), int)), values[name])
            ratio = 1 if grouped == values[name] else (heads if grouped == 1 else 2)
            break
    for name, value in list(values.items()):
        if isinstance(value, list) and layers is not None and len(value) == layers:
            setattr(config, name, value[: min(layers, 4)])
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name.endswith(("_token_id", "_token_index")) and value >= _WIDTHS["vocab_size"]:
            setattr(config, name, 0)
        elif name in _LAYERS:
            setattr(config, name, min(value, 4))
        elif name in _HEADS:
            setattr(config, name, heads)
        elif name in _KV_HEADS:
            setattr(config, name, heads // ratio)
        elif name in _WIDTHS and value > _WIDTHS[name]:
            setattr(config, name, _WIDTHS[name] if name not in ("hidden_size", "d_model", "n_embd") else 16 * heads)
