"""A small copy of a model, to try a plan on: the same architecture and options, few layers, narrow, random weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn as nn

from ..attention.register import on_a_cpu
from ..models.config import EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, KEY_VALUE_HEADS, LAYERS, QUERY_HEADS, parts
from .layer.parallel_module import native_class

SMALL_ENOUGH = 3_000_000  # parameters; a model below is copied as it is
_DEPTH = 4
_LAYERS = (*LAYERS, "encoder_layers", "decoder_layers", "num_decoder_layers")
_HEADS = (*QUERY_HEADS, "encoder_attention_heads", "decoder_attention_heads")
_HIDDEN = (
    *HIDDEN,
    *("embed_dim", "encoder_hidden_size", "pooler_hidden_size", "projection_size", "output_channels"),
    *("lru_width", "attention_hidden_size"),
)
_WIDTHS = {
    **dict.fromkeys((*_HIDDEN, "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 96
    ),
    "shared_expert_intermediate_size": 96,
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(EXPERTS_PER_TOKEN, 2),
    **dict.fromkeys(("rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "qk_rope_head_dim": 8,
}
# Layers of a state space: their heads, the features of one; all heads together are as wide as the layer inside.
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))
# Heads of linear attention: of keys, and of values, several of which may share a key.
_LINEAR_HEADS = (("linear_num_heads", "linear_num_heads"), ("linear_num_key_heads", "linear_num_value_heads"))
# What goes with the widths of stages, and would have to change with them.
_BESIDE_STAGES = {"groups_width", "num_groups", "width_factor", "stage_out_channels", "embed_dim"}
# What inputs have to fit.
_VOCABULARY, _PIXELS = 128, 64
_LENGTHS = {"max_position_embeddings": 64, "n_positions": 64, "max_source_positions": 32}


def small_copies(model: nn.Module, ranks: int, keep_inputs: bool = False) -> Iterator[nn.Module]:
    """Models of the same class in evaluation mode and double precision, the smallest first; none where none can be
    built.

    Equal on every rank: the weights come from a fixed seed. The caller's random state is left alone.

    keep_inputs     let the copies take the batches of the model: its vocabulary, its images, its lengths
    """
    size = sum(param.numel() for param in model.parameters())
    for narrow in (True, False) if size > SMALL_ENOUGH else (False,):
        copied = build_small(native_class(model), copy.deepcopy(model.config), size, ranks, narrow, keep_inputs)
        if copied is not None:
            yield copied


def build_small(
    native: type[nn.Module], config: Any, size: int, ranks: int, narrow: bool = True, keep_inputs: bool = False
) -> nn.Module | None:
    """See `small_copies`, for a model of `size` parameters; changes `config`.

    narrow      whether layers lose width too, and not only their number
    """
    if size > SMALL_ENOUGH:
        _shrink(config, ranks, narrow, keep_inputs)
    for part in parts(config):
        part._experts_implementation = "eager"  # the grouped kernels have no double precision
        had = getattr(part, "_attn_implementation", None)
        if on_a_cpu(had) != had:
            part._attn_implementation = on_a_cpu(had)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            if size > SMALL_ENOUGH:
                with torch.device("meta"):
                    if sum(param.numel() for param in native(copy.deepcopy(config)).parameters()) > 10 * SMALL_ENOUGH:
                        return None
            copied = native(config).double().eval()
        except Exception:  # whatever a foreign constructor makes of an unusual config
            return None
        with torch.no_grad():
            for param in copied.parameters():
                param.add_(torch.randn_like(param), alpha=0.05)
    return copied


def take_own_functions(model: nn.Module, copied: nn.Module) -> None:
    """Let a copy compute its loss as `model` was told to, of which the config does not know."""
    if "_loss_function" in vars(model):
        copied._loss_function = model._loss_function


def _shrink(config: Any, ranks: int, narrow: bool, keep_inputs: bool) -> None:
    for part in parts(config):
        _shorten(part)
        if not keep_inputs:
            _shrink_inputs(part)
            _shrink_crops(part)
        if narrow:
            _narrow(part, ranks)


def _shorten(config: Any) -> None:
    values = vars(config)
    if any(values.get(name) for name in ("backbone_out_indices", "_out_indices", "out_indices")):
        return  # another part of the model reads layers of this one by their numbers
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), None)
    depths = values.get("depths")
    if isinstance(depths, list | tuple):  # stages of different widths; their number stays
        config.depths = [min(depth, 2) for depth in depths]
    if depths is not None:
        return
    of_layers = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    kept = _of_every_kind(layers or 0, of_layers.values())
    for name, value in of_layers.items():
        setattr(config, name, [value[index] for index in kept])
    for name, number in list(values.items()):
        if name in _LAYERS and isinstance(number, int):
            setattr(config, name, len(kept) if number == layers else min(number, _DEPTH))


def _of_every_kind(layers: int, lists: Collection[list[Any]]) -> list[int]:
    """Few layers, by index, with which every word of the lists, which have one for each layer, remains: a model may
    have another kind of layer further behind.
    """
    known: set[tuple[int, str]] = set()
    kept = []
    for index in range(layers):
        words = {(place, of[index]) for place, of in enumerate(lists) if isinstance(of[index], str)}
        if not known.issuperset(words):
            known |= words
            kept.append(index)
    others = [index for index in range(min(layers, _DEPTH)) if index not in kept]
    return sorted([*kept, *others[: max(0, _DEPTH - len(kept))]])


def _shrink_inputs(config: Any) -> None:
    """Fewer words, positions and pixels. Ids that stand for images and the like stay apart from each other."""
    spare = _VOCABULARY - 1
    for name, value in list(vars(config).items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name.endswith(("_token_id", "_token_index")) and value >= _VOCABULARY:
            is_place = name.startswith(("image", "video", "audio"))
            setattr(config, name, spare if is_place else 0)
            spare -= is_place
        elif name in ("vocab_size", "padded_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"):
            setattr(config, name, min(value, _VOCABULARY))
        elif name in _LENGTHS:
            setattr(config, name, min(value, _LENGTHS[name]))
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(size, int) and size > _PIXELS and _has_stages_of_convolutions(config):
        config.image_size = _PIXELS
    # windows need enough patches
    elif isinstance(size, int) and isinstance(patch, int) and size > _PIXELS and not hasattr(config, "depths"):
        config.image_size = max(_PIXELS // patch, 2) * patch
        if hasattr(config, "image_embedding_size"):
            config.image_embedding_size = config.image_size // patch


def _shrink_crops(config: Any) -> None:
    """Let large images have as many crops of the tower's size as before (LLaVA-NeXT): 2 x 1 where the least had so."""
    sizes, tower = getattr(config, "image_grid_pinpoints", None), getattr(config, "vision_config", None)
    crop = getattr(tower, "image_size", None)
    if sizes and isinstance(crop, int):
        least = min(min(size) for size in sizes)  # one crop high or wide
        config.image_grid_pinpoints = [[crop * round(side / least) for side in size] for size in sizes]


def _has_stages_of_convolutions(config: Any) -> bool:
    """Stages of different widths without heads or windows, each of which halves the image."""
    return isinstance(getattr(config, "hidden_sizes", None), list | tuple) and not any(
        hasattr(config, name) for name in (*_HEADS, "window_size", "sr_ratios")
    )


def _narrow(config: Any, ranks: int) -> None:
    values = vars(config)
    if _has_stages_of_convolutions(config) and not _BESIDE_STAGES & values.keys():
        factor = max(1, min(config.hidden_sizes) // (8 * ranks))
        if not any(size % factor for size in config.hidden_sizes):
            config.hidden_sizes = [size // factor for size in config.hidden_sizes]
    heads = 2 * ranks
    ratio = 1
    for name in _HEADS:
        if isinstance(values.get(name), int):
            grouped = next((values[kv] for kv in KEY_VALUE_HEADS if isinstance(values.get(kv), int)), values[name])
            ratio = 1 if grouped == values[name] else (heads if grouped == 1 else 2)
            break
    stages = values.get("num_heads")
    latent = values.get("qk_rope_head_dim") is not None and values.get("head_dim") == values["qk_rope_head_dim"]
    for name, value in list(values.items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name in _HEADS:
            setattr(config, name, heads)
        elif name in KEY_VALUE_HEADS:
            setattr(config, name, heads // ratio)
        elif name in _WIDTHS and value > _WIDTHS[name]:
            setattr(config, name, 16 * heads if name in _HIDDEN else _WIDTHS[name])
    if latent:  # the size of a head is that of its rotary part, by another name
        config.head_dim = config.qk_rope_head_dim
    _narrow_states(config)
    _narrow_linear_attention(config, heads)
    # sine and cosine of every feature make a channel
    if hasattr(config, "output_channels") and hasattr(config, "num_pos_feats"):
        config.num_pos_feats = config.output_channels // 2
    if isinstance(stages, list | tuple):  # the width doubles from stage to stage
        config.num_heads = [heads] * len(stages)
        if hasattr(config, "hidden_size") and hasattr(config, "embed_dim"):
            config.embed_dim = min(config.embed_dim, 8 * heads)
            config.hidden_size = config.embed_dim * 2 ** (len(stages) - 1)


def _narrow_states(config: Any) -> None:
    values = vars(config)
    expand = values.get("mamba_expand", values.get("expand"))
    hidden = values.get("hidden_size")
    if not isinstance(expand, int) or not isinstance(hidden, int):
        return
    for heads, features in _STATE_HEADS:
        if isinstance(values.get(heads), int) and isinstance(values.get(features), int):
            setattr(config, heads, max(1, expand * hidden // 16))
            setattr(config, features, expand * hidden // getattr(config, heads))
            if isinstance(values.get("mamba_d_ssm"), int):
                config.mamba_d_ssm = expand * hidden
            return


def _narrow_linear_attention(config: Any, heads: int) -> None:
    """Also output projections in groups of heads, of which none may be a part of a head."""
    values = vars(config)
    for keys, of_values in _LINEAR_HEADS:
        before = values.get(keys)
        if isinstance(before, int) and isinstance(values.get(of_values), int) and before > heads:
            ratio = values[of_values] // before
            setattr(config, keys, heads)
            setattr(config, of_values, heads * ratio)
    if isinstance(values.get("o_groups"), int):
        config.o_groups = min(config.o_groups, heads)
