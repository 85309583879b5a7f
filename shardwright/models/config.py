"""What the config of a transformers model says, under whatever name its family has for it.

A config of a model of several parts (text and images) is a tree: `parts` are all of its nodes, `text_config` is the one
of the layers that read or write text, which for most models is the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head", "multi_query_group_num")
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window")


def native_model(model: nn.Module) -> nn.Module:
    """The transformers model inside of peft's wrappers, or `model` itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    return get_base_model() if hasattr(model, "peft_config") and callable(get_base_model) else model


def config_of(model: nn.Module) -> Any:
    """None for models without one."""
    return getattr(model, "config", None)


def text_config(model: nn.Module) -> Any:
    """The config of the model's text part; None for models without a config."""
    return text_part(config_of(model))


def text_part(config: Any) -> Any:
    """The part of a config that is about text; the whole where no part is, or where several are."""
    get_text_config = getattr(config, "get_text_config", None)
    try:
        return get_text_config() if callable(get_text_config) else config
    except ValueError:  # several, of which transformers does not choose one
        return config


def parts(config: Any) -> Iterator[Any]:
    """The config and those of its parts, at any depth."""
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            yield from parts(part)
    yield config


def layer_configs(config: Any, layers: int) -> list[Any]:
    """One for each layer. That of a model whose layers differ refuses to be asked for all of them; where it is about
    another number of layers, its first one stands for them.
    """
    if not getattr(config, "is_heterogeneous", False):  # transformers has it since 5.23
        return [config] * layers
    own = list(config.per_layer_config)
    return own if len(own) == layers else [own[0]] * layers


def follows_length(part: Any) -> bool:
    """Whether rotary frequencies of this part depend on the greatest position in a batch."""
    rope = getattr(part, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if isinstance(each, dict))]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def shorten_windows(part: Any, most: int) -> None:
    """Let no window of attention be longer than `most`, so that short sequences reach beyond it."""
    for name in _WINDOWS:
        if isinstance(getattr(part, name, None), int) and getattr(part, name) > most:
            setattr(part, name, most)


def first_int(holder: Any, names: Sequence[str]) -> int | None:
    """The first of these attributes of a config or a module that is a positive whole number."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def hidden_size(model: nn.Module) -> int | None:
    """Features of a token between layers; None where the config does not say."""
    return first_int(text_config(model), HIDDEN)


def num_experts(model: nn.Module) -> int | None:
    """Of every layer that has some; None for models without experts."""
    return first_int(text_config(model), EXPERTS)


def has_experts(model: nn.Module) -> bool:
    """Whether tokens choose between some."""
    return (num_experts(model) or 1) > 1


def visited_share(model: nn.Module) -> float:
    """Share of the experts that one token visits; 1 for models without experts."""
    experts, chosen = num_experts(model), first_int(text_config(model), EXPERTS_PER_TOKEN)
    return 1.0 if experts is None or chosen is None else min(1.0, chosen / experts)


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(config_of(model), "is_encoder_decoder", False))
