"""What makes the configs of transformers tiny: fields by their names, and what single configs need besides."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from .special_sizes import HEADS, LAYERS, SPECIAL, VOCABULARY, WIDTH

__all__ = ["HEADS", "LAYERS", "PLACES", "VOCABULARY", "WIDTH", "parts_of", "sizes_of"]

PLACES = range(98, 107)  # ids that stand for images and the like in any tiny config

_NAMES: tuple[tuple[int | float, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size model_dim hidden_dim "
        "encoder_hidden_size encoder_embed_dim decoder_hidden_size attention_hidden_size input_embedding_size "
        "moe_intermediate_size expert_ffn_hidden_size hidden_size_global shared_experts_intermediate_size "
        "adapter_in_dim adapter_out_dim adapter_input_size num_position_embeddings position_embedding_size "
        "downsample_hidden_size indexer_budget out_hidden_size ext_pw_out_channel depthwise_separable_out_channel "
        "nemo_conv_channels projector_hidden_size vision_hidden_size backbone_hidden_size "
        "mm_embed_dim mm_posemb_size output_proj_dims output_channels output_embedding_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads num_hidden_layers n_layer n_layers "
        "num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_experts num_local_experts "
        "n_routed_experts moe_num_experts index_n_heads mamba_n_heads mamba_num_heads swa_num_attention_heads "
        "linear_num_value_heads depth indexer_n_heads layers",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads top_k_experts num_experts_per_tok num_experts_per_token moe_topk "
        "moe_top_k moe_k",
    ),
    (2, "mamba_expand forced_eos_token_id swa_num_key_value_heads linear_num_key_heads zero_expert_num"),
    (2, "indexer_compress_ratio"),
    (
        128,
        "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_size "
        "dense_intermediate_size shared_expert_intermediate_size intermediate_size_mlp mlp_dim dff "
        "shared_intermediate_size dim_ff intermediate_dim block_ff_dim ffn_intermediate_size max_position_embeddings "
        "n_positions n_ctx max_seq_len max_seq_length max_target_positions seq_length context_length "
        "max_sequence_length seq_len mamba_d_ssm d_inner max_encoder_position_embeddings "
        "max_decoder_position_embeddings max_2d_position_embeddings",
    ),
    (VOCABULARY, "vocab_size padded_vocab_size src_vocab_size tgt_vocab_size encoder_hash_byte_group_vocab"),
    (
        16,
        "head_dim d_kv kv_channels v_head_dim qk_nope_head_dim index_head_dim mamba_d_state mamba_chunk_size "
        "ssm_state_size num_mel_bins indexer_head_dim swa_head_dim hc_lowrank linear_key_head_dim "
        "linear_value_head_dim",
    ),
    (32, "kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim image_size max_source_positions"),
    (8, "qk_rope_head_dim rotary_dim patch_size"),
    (1, "first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts mamba_n_groups n_groups"),
    (1, "indexer_kv_heads"),
    (6, "sliding_window"),  # fewer than the tokens of a batch
    (0.05, "initializer_range"),
    # Tokens: the last ones of the vocabulary stand for images and the like.
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id cls_token_id"),
    (2, "eos_token_id"),
    (3, "sep_token_id unk_token_id unk_index"),
    (4, "mask_token_id"),
    (100, "image_token_id image_token_index"),
    (101, "vision_start_token_id"),
    (102, "vision_end_token_id"),
    (103, "video_token_id video_token_index"),
    (104, "audio_token_id audio_token_index"),
    (105, "boi_token_id"),
    (106, "eoi_token_id"),
)
_SIZES = {name: value for value, names in _NAMES for name in names.split()}
# Left at None where that is the default: None means "derived" or "off" there.
_OPTIONAL = {"q_lora_rank", "n_inner", "sliding_window", "rotary_dim", "ffn_hidden_size", "classifier_dropout"}
_OPTIONAL |= {"word_embed_proj_dim"}
# Words in the names of probabilities that make a forward random.
_RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")


def sizes_of(config_class: type) -> dict[str, Any]:
    """Arguments for a config of this class, those of its parts among them."""
    fields = {
        name: kind
        for base in reversed(config_class.__mro__)
        for name, kind in getattr(base, "__annotations__", {}).items()
    }
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        default = getattr(config_class, name, None)
        if isinstance(default, float) and any(word in name for word in _RANDOM):
            values[name] = 0 if kind in (int, "int") else 0.0
        elif name in _SIZES and not isinstance(default, list | tuple) and not (default is None and name in _OPTIONAL):
            values[name] = _as_declared(_SIZES[name], str(kind))
    if "kv_lora_rank" in fields and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # latent attention has a key and a value per head
    own = dict(SPECIAL.get(getattr(config_class, "model_type", ""), {}))
    for name, part, switches in parts_of(config_class):
        # What tells one part from another of its class, as a decoder from an encoder.
        values[name] = part(**{**switches, **sizes_of(part), **own.pop(name, {})})
    return values | own


def _as_declared(size: int | float, kind: str) -> Any:
    """A size for a field of this type: one of several sizes, for height and width or two sorts of layers, gets two."""
    several = re.sub(r"(list|tuple)\[[^\[\]]*\]", r"\1", kind)
    if re.search(r"\b(int|float)\b", several) or not re.search(r"\b(list|tuple)\b", several):
        return size
    return [size, size] if "list" in several else (size, size)


def parts_of(config_class: Any) -> Iterator[tuple[str, Any, dict[str, bool]]]:
    """Names and classes of the configs that one of this class holds, and what it switches on or off in them."""
    known = {**(getattr(config_class, "sub_configs", None) or {})}
    known |= getattr(config_class, "sub_configs_defaults", None) or {}
    for name, part in known.items():
        given = getattr(part, "init_kwargs", None) or {}
        if not isinstance(part, type):  # one of many classes, told by a model type
            transformers: Any = importlib.import_module("transformers")
            part = part.config_class if part.model_type is None else transformers.CONFIG_MAPPING[part.model_type]
        if part.__name__ != "AutoConfig":
            yield name, part, {key: value for key, value in given.items() if isinstance(value, bool)}
