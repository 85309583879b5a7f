"""Tiny configs for every causal language model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto import modeling_auto

from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm import ChatGLMForConditionalGeneration

LAYERS = 4
LARGEST = 20_000_000  # parameters

# Field of a config class -> value. Lists of names share a value.
_NAMES: dict[int | float, str] = {
    64: "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size model_dim hidden_dim "
    "input_embedding_size "
    "decoder_hidden_size attention_hidden_size moe_intermediate_size expert_ffn_hidden_size hidden_size_global "
    "shared_experts_intermediate_size adapter_in_dim adapter_out_dim num_position_embeddings position_embedding_size "
    "downsample_hidden_size adapter_input_size indexer_budget out_hidden_size ext_pw_out_channel "
    "depthwise_separable_out_channel nemo_conv_channels mm_embed_dim mm_posemb_size output_proj_dims output_channels "
    "output_embedding_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads "
    "attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_hidden_layers n_layer n_layers num_layers "
    "encoder_layers decoder_layers "
    "num_decoder_layers num_experts num_local_experts n_routed_experts moe_num_experts index_n_heads mamba_n_heads "
    "mamba_num_heads swa_num_attention_heads linear_num_value_heads depth indexer_n_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k "
    "mamba_expand swa_num_key_value_heads linear_num_key_heads zero_expert_num indexer_compress_ratio",
    128: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_size "
    "dense_intermediate_size "
    "shared_expert_intermediate_size intermediate_size_mlp mlp_dim dff shared_intermediate_size dim_ff "
    "intermediate_dim block_ff_dim d_inner "
    "ffn_intermediate_size max_position_embeddings n_positions n_ctx max_seq_len max_seq_length max_target_positions "
    "seq_length "
    "context_length max_sequence_length seq_len mamba_d_ssm",
    120: "vocab_size padded_vocab_size encoder_hash_byte_group_vocab",
    16: "head_dim d_kv kv_channels v_head_dim qk_nope_head_dim index_head_dim mamba_d_state mamba_chunk_size "
    "ssm_state_size num_mel_bins indexer_head_dim swa_head_dim hc_lowrank linear_key_head_dim linear_value_head_dim",
    32: "kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim image_size max_source_positions",
    8: "qk_rope_head_dim rotary_dim patch_size",
    1: "first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts mamba_n_groups n_groups "
    "indexer_kv_heads",
    0.0: "attention_dropout dropout hidden_dropout_prob attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop "
    "hidden_dropout "
    "activation_dropout dropout_rate resid_dropout embed_dropout embedding_dropout layerdrop encoder_layerdrop "
    "decoder_layerdrop "
    "classifier_dropout drop_path_rate attn_dropout emb_pdrop residual_dropout embedding_dropout_prob ffn_dropout "
    "residual_dropout_prob "
    "hidden_act_dropout router_jitter_noise input_jitter_noise",
    0.05: "initializer_range",
}
_SIZES = {name: value for value, names in _NAMES.items() for name in names.split()} | {"sliding_window": 64}
_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 3,
    "cls_token_id": 1,
}
_TOKENS |= {
    "mask_token_id": 4,
    "unk_token_id": 3,
    "unk_index": 3,
    "image_token_id": 100,
    "audio_token_id": 104,
    "video_token_id": 103,
}
_TOKENS |= {
    "vision_start_token_id": 101,
    "vision_end_token_id": 102,
    "boi_token_id": 105,
    "eoi_token_id": 106,
    "image_token_index": 100,
}
_KEEP_NONE = {
    "q_lora_rank",
    "n_inner",
    "sliding_window",
    "rotary_dim",
    "ffn_hidden_size",
    "classifier_dropout",
    "word_embed_proj_dim",
}
_SLIDING_SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_HALF_SLIDING = ["sliding_attention", "full_attention"] * 2
# What a type's config class wants beside sizes.
_SPECIAL: dict[str, dict[str, Any]] = {
    "chatglm": {"multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "mpt": {"attn_pdrop": 0},
    "mamba2": {"head_dim": 32},
    "xlm": {"n_words": 128, "emb_dim": 64, "n_langs": 1},
    "flaubert": {"n_words": 128, "emb_dim": 64, "n_langs": 1},
    "bailing_hybrid": {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 256,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "lfm2": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "phi4_multimodal_audio": {"num_blocks": 4},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "longcat_flash": {"head_dim": 8},
    "dots3_note_text": {f"swa_{name}": size for name, size in _SLIDING_SIZES.items()},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "layer_types": _HALF_SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _HALF_SLIDING},
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
        "layer_types": _HALF_SLIDING,
        "num_kv_shared_layers": 2,
    },
    "reformer": {
        "is_decoder": True,
        "hash_seed": 0,
        "feed_forward_size": 128,
        "attention_head_size": 16,
        "num_buckets": 4,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ["local", "lsh"] * 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        **dict.fromkeys(("local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob"), 0.0),
    },
    "big_bird": {"attention_type": "original_full"},
    "codegen": {"n_head": 8},
    "cpmant": {"dim_head": 16},
    "gemma3": {"mm_tokens_per_image": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8},
}


def causal_language_models() -> dict[str, str]:
    """model_type -> class, for all that `AutoModelForCausalLM` knows, and those that are written here."""
    own = {ChatGLMConfig.model_type: ChatGLMForConditionalGeneration.__name__}
    return {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **own}


def _arguments(config_class: Any) -> dict[str, Any]:
    """Small sizes for what the class knows of, in it and in the configs of its parts."""
    fields = {
        name: kind
        for base in reversed(config_class.__mro__)
        for name, kind in getattr(base, "__annotations__", {}).items()
    }
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        default = getattr(config_class, name, None)
        if name in _TOKENS:
            values[name] = _TOKENS[name]
        elif name in _SIZES and not isinstance(default, (list, tuple)) and not (default is None and name in _KEEP_NONE):
            values[name] = int(_SIZES[name]) if kind in (int, "int") else _SIZES[name]
    if "kv_lora_rank" in fields and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    for name, part in _parts(config_class):
        values[name] = part(**_settings_of(part))
    return values


def _parts(config_class: Any) -> Iterator[tuple[str, Any]]:
    """Names and classes of the configs that one of this class holds."""
    known = {**(getattr(config_class, "sub_configs", None) or {})}
    known |= getattr(config_class, "sub_configs_defaults", None) or {}
    for name, part in known.items():
        if not isinstance(part, type):  # one of many classes, told by a model type
            part = part.config_class if part.model_type is None else CONFIG_MAPPING[part.model_type]
        if part.__name__ != "AutoConfig":
            yield name, part


def _settings_of(config_class: Any) -> dict[str, Any]:
    return {**_arguments(config_class), **_SPECIAL.get(config_class.model_type, {})}


def config(model_type: str, settings: Mapping[str, Any] | None = None) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**_settings_of(config_class), **(settings or {})})


def build(model_type: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """In double precision and training mode, without dropout; no parameter is left at the zero or one it was
    initialised with.
    """
    made = config(model_type, settings)
    for part in (made, getattr(made, "text_config", None)):
        if part is not None:
            part._experts_implementation = "eager"  # the grouped kernels have no double precision
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    own = [name for name, part in _parts(type(made)) if part is model_class.config_class]
    if own and type(made) is not model_class.config_class:  # the language model of a larger whole
        made = getattr(made, own[0])
    with torch.device("meta"):
        size = sum(param.numel() for param in model_class._from_config(made).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters: a size that the tiny config does not know")
    torch.manual_seed(seed)
    model = model_class._from_config(made)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn_like(param), alpha=0.02)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


def inputs(model: nn.Module) -> dict[str, Any]:
    """Sequences of different lengths, labels for a part of them."""
    generator = torch.Generator().manual_seed(3)
    text: Any = model.config.get_text_config()
    ids = torch.randint(5, min(text.vocab_size, 99), (3, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5] = -100
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    books = getattr(text, "num_codebooks", None)
    if hasattr(model, "lm_heads") and books is not None:  # a row of ids, and a label, for every codebook
        made["input_ids"] = torch.randint(5, 99, (3 * books, 16), generator=generator)
        made["labels"] = made["input_ids"].view(3, books, 16).transpose(1, 2).masked_fill(labels[..., None] < 0, -100)
    if model.config.model_type == "prophetnet":  # adds up lowest numbers, of which double precision has no sum
        del made["attention_mask"]
    if model.config.model_type == "git":  # its labels count from behind the image
        size = model.config.vision_config.image_size
        made["pixel_values"] = torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64)
    return made
