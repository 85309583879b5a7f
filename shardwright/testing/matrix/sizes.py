"""What makes the configs of transformers tiny: fields by their names, and what single configs need besides."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

WIDTH, LAYERS, HEADS, VOCABULARY = 64, 4, 4, 120
PLACES = range(98, 107)  # ids that stand for images and the like in any tiny config

_NAMES: tuple[tuple[int | float, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size model_dim hidden_dim "
        "encoder_hidden_size encoder_embed_dim decoder_hidden_size attention_hidden_size input_embedding_size "
        "moe_intermediate_size expert_ffn_hidden_size hidden_size_global shared_experts_intermediate_size "
        "adapter_in_dim adapter_out_dim adapter_input_size num_position_embeddings position_embedding_size "
        "downsample_hidden_size indexer_budget out_hidden_size ext_pw_out_channel depthwise_separable_out_channel "
        "nemo_conv_channels mm_embed_dim mm_posemb_size output_proj_dims output_channels output_embedding_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads num_hidden_layers n_layer n_layers "
        "num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_experts num_local_experts "
        "n_routed_experts moe_num_experts index_n_heads mamba_n_heads mamba_num_heads swa_num_attention_heads "
        "linear_num_value_heads depth indexer_n_heads",
    ),
    (2, "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
    (2, "mamba_expand forced_eos_token_id swa_num_key_value_heads linear_num_key_heads zero_expert_num"),
    (2, "indexer_compress_ratio"),
    (
        128,
        "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_size "
        "dense_intermediate_size shared_expert_intermediate_size intermediate_size_mlp mlp_dim dff "
        "shared_intermediate_size dim_ff intermediate_dim block_ff_dim ffn_intermediate_size max_position_embeddings "
        "n_positions n_ctx max_seq_len max_seq_length max_target_positions seq_length context_length "
        "max_sequence_length seq_len mamba_d_ssm d_inner",
    ),
    (VOCABULARY, "vocab_size padded_vocab_size encoder_hash_byte_group_vocab"),
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
    (103, "video_token_id"),
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
_STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 2, 1], "image_size": 64}
_SCALED = {"layer_scale_init_value": 0.5}
_WAVES: dict[str, Any] = {
    "vocab_size": 32,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 4],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 24,
}
_MOBILE: dict[str, Any] = {
    "image_size": 64,
    "width_coefficient": 0.25,
    "depth_coefficient": 1.0,
    "kernel_sizes": [3, 5, 3],
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 40],
    "strides": [1, 2, 2],
    "num_block_repeats": [1, 2, 2],
    "expand_ratios": [1, 4, 4],
    "hidden_dim": 320,
}
_SIGHT = {"vision_start_token_id": 101, "vision_end_token_id": 102}
# By the model type of the config, or of one of its parts.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bit": {"hidden_sizes": [32, 64, 64, 96], "depths": [1, 2, 1, 1], "embedding_size": 32, "num_groups": 8},
    "convnext": _STAGES | _SCALED,
    "convnextv2": _STAGES,
    "poolformer": _STAGES | _SCALED,
    "resnet": {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 2, 1, 1], "embedding_size": 16},
    "regnet": {"hidden_sizes": [32, 48, 64, 80], "depths": [1, 2, 1, 1], "embedding_size": 16, "groups_width": 16},
    "hgnet_v2": {
        "embedding_size": 16,
        "hidden_sizes": [32, 48, 64, 96],
        "depths": [1, 1, 2, 1],
        "stem_channels": [3, 16, 24],
        "stage_in_channels": [24, 32, 48, 64],
        "stage_mid_channels": [16, 16, 24, 24],
        "stage_out_channels": [32, 48, 64, 96],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [3, 3, 3, 3],
    },
    "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 64},
    **dict.fromkeys(("efficientnet", "align_vision_model"), _MOBILE),
    "pp_lcnet": {"scale": 0.25, "class_expand": 64},
    "swiftformer": {"embed_dims": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "image_size": 64, **_SCALED},
    "mobilevit": {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 64], "image_size": 64},
    "mobilevitv2": {"width_multiplier": 0.25, "image_size": 64, "n_attn_blocks": [1, 2, 1]},
    "levit": {
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 2, 1],
        "key_dim": [8, 8, 8],
        "image_size": 64,
        "patch_size": 16,
    },
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": 64, "patch_size": 4, "layerscale_value": 0.5},
    **dict.fromkeys(
        ("hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "sew", "sew-d", "wav2vec2-conformer"),
        _WAVES,
    ),
    "chatglm": {"multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "mpt": {"attn_pdrop": 0},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 32},
    "mluke": {"entity_vocab_size": 10, "entity_emb_size": 32},
    "esmc": {"num_key_value_heads": HEADS},
    "funnel": {"block_sizes": [2, 2]},
    "xglm": {"activation_dropout": 0.0},
    "mamba2": {"head_dim": 32},
    "xlm": {"n_words": VOCABULARY, "emb_dim": WIDTH, "n_langs": 1},
    "flaubert": {"n_words": VOCABULARY, "emb_dim": WIDTH, "n_langs": 1},
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
    "phi4_multimodal_audio": {"num_blocks": 4, "input_size": 16, "bias_max_distance": 6, "audio_token_id": 104},
    "phi4_multimodal_vision": {"crop_size": 32},
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
        "axial_pos_shape": (3, 4),  # the tokens of a batch
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ["local", "lsh"] * 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        **dict.fromkeys(("local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob"), 0.0),
    },
    "textnet": {"image_size": (64, 64), "stem_out_channels": 16, "hidden_sizes": (16, 16, 32, 32, 64)},
    "pvt_v2": {"hidden_sizes": [16, 32, 64, 64], "num_attention_heads": [1, 2, 4, 4], "depths": [1, 1, 2, 1]},
    "segformer": {"hidden_sizes": [16, 32, 64, 64], "num_attention_heads": [1, 2, 4, 4], "depths": [1, 1, 2, 1]},
    "vjepa2": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "pred_hidden_size": 48,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
        "num_pooler_layers": 2,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": WIDTH,
        "num_self_attends_per_block": LAYERS,
        "num_self_attention_heads": HEADS,
        "num_cross_attention_heads": HEADS,
        "max_position_embeddings": 12,  # words of an output, whatever the input has
    },
    # The projector reads four tokens of the tower at once.
    "glmasr_encoder": {"intermediate_size": 4 * WIDTH},
    "voxtral_encoder": {"intermediate_size": 4 * WIDTH},
    "qwen3_asr_encoder": {"output_dim": WIDTH, "n_window_infer": 100},
    "vibevoice_acoustic_tokenizer_encoder": {
        "num_filters": 2,
        "downsampling_ratios": (5, 8, 10),
        "depths": (1, 1, 1, 1),
        "layer_scale_init_value": 0.5,
    },
    "big_bird": {"attention_type": "original_full"},
    # Layers of both kinds: a cache of keys and values without attention has no length.
    "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    "xlstm": {"qk_dim_factor": 1.0},  # states are as wide as a multiple of 64, queries as wide as this makes them
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}},
    # Its blocks have fewer parameters than the text's layers, as at real sizes.
    "qwen2_5_vl_vision": {"window_size": 16, "fullatt_block_indexes": [1, 3], "intermediate_size": WIDTH},
    "kimi_k25": {"projection_hidden_size": 64},
    "kimi_k25_vision": {"pos_emb_height": 3, "pos_emb_width": 3},
    # The adapter's first linear reads four tokens of the tower at once.
    "llama4_vision_model": {
        "intermediate_size": 4 * WIDTH,
        "vision_output_dim": WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
    },
    "glm_ocr_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}},
    "qwen2_5_omni_thinker": _SIGHT,
    "qwen3_omni_moe_thinker": _SIGHT,
    "codegen": {"n_head": 8},
    "cpmant": {"dim_head": 16},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [1, 2]},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [1, 2]},
    "gemma3": {"mm_tokens_per_image": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8},
}


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
    for name, part, switches in parts_of(config_class):
        # What tells one part from another of its class, as a decoder from an encoder.
        values[name] = part(**{**switches, **sizes_of(part)})
    return values | _SPECIAL.get(getattr(config_class, "model_type", ""), {})


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
