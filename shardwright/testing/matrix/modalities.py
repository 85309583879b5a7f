"""Tiny configs of images, sounds, videos, and pairs of images and texts, by class of the config."""

from __future__ import annotations

from typing import Any

_SIZES = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
_PATCHES = {"image_size": 20, "patch_size": 5}
_IMAGE = (
    _SIZES
    | _PATCHES
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.15, "num_labels": 5}
)
_DEEPER = {"num_hidden_layers": 4}  # two towers have four layers together, and one alone has as many
_TOWER = _IMAGE | _DEEPER
_TEXT = _SIZES | {"vocab_size": 101, "max_position_embeddings": 64, "pad_token_id": 0}
_SPEECH: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 88,
    "decoder_ffn_dim": 88,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "num_mel_bins": 12,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "init_std": 0.15,
    "num_labels": 5,
}
_WINDOWS: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 1, 1, 2],
    "num_heads": [2, 2, 4, 4],
    "window_size": 2,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.15,
    "num_labels": 5,
}
_CLIP_TEXT = _TEXT | {"bos_token_id": 1, "eos_token_id": 2, "projection_dim": 24}
_QUERIES = (
    _SIZES
    | _DEEPER
    | {
        "encoder_hidden_size": 48,
        "cross_attention_frequency": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
)
_OPT = {
    "model_type": "opt",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 88,
    "word_embed_proj_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 1,
}
_SEEN: dict[str, Any] = {
    **_SIZES,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "global_attn_indexes": [1, 2],
    "mlp_dim": 88,
} | _DEEPER
_GEMMA: dict[str, Any] = _TEXT | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attention_dropout": 0.0,
    "num_labels": 5,
}
_DEBERTA = _TEXT | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
}
_WAVES: dict[str, Any] = _SIZES | {
    "vocab_size": 32,
    "num_feat_extract_layers": 3,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 24,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": 5,
    "initializer_range": 0.15,
}
_CUT_IMAGE: dict[str, Any] = _SIZES | {"patch_size": 4, "num_patches": 16, "vision_use_head": False}
_GRIDS: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 48,
    "num_heads": 4,
    "mlp_ratio": 2,
    "patch_size": 4,
    "initializer_range": 0.15,
}
_LLAMA = _TEXT | {"model_type": "llama", "num_key_value_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "ViTConfig": _TOWER | {"encoder_stride": 5},
    "WhisperConfig": _SPEECH,
    "BeitConfig": _TOWER | {"use_relative_position_bias": True, "drop_path_rate": 0.0},
    "SwinConfig": _WINDOWS,
    "Swinv2Config": _WINDOWS,
    "CLIPConfig": {
        "text_config": _CLIP_TEXT,
        "vision_config": _SIZES | _PATCHES | {"projection_dim": 24},
        "projection_dim": 24,
    },
    "Blip2Config": {
        "vision_config": _IMAGE,
        "qformer_config": _QUERIES,
        "text_config": _OPT,
        "num_query_tokens": 4,
        "image_token_index": 100,
    },
    "SamConfig": {
        "vision_config": _SEEN | {"output_channels": 32, "num_pos_feats": 16},
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {
            "hidden_size": 32,
            "mlp_dim": 40,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 32,
        },
    },
    "Gemma2Config": _GEMMA | _DEEPER,
    "DebertaV2Config": _DEBERTA | _DEEPER,
    "VideoMAEConfig": _TOWER | {"num_frames": 4, "tubelet_size": 2},
    "Wav2Vec2Config": _WAVES | _DEEPER,
    "Siglip2Config": {"vision_config": _CUT_IMAGE, "text_config": _TEXT, "num_labels": 5, "initializer_factor": 0.3},
    "Qwen2VLConfig": {
        "vision_config": _GRIDS,
        "text_config": _TEXT
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        },
        "image_token_id": 100,
        "video_token_id": 99,
        "vision_start_token_id": 98,
    },
    "LlavaConfig": {
        "vision_config": {"model_type": "clip_vision_model", **_SIZES, **_PATCHES},
        "text_config": _LLAMA,
        "image_token_index": 100,
        "image_seq_length": 16,
    },
}

_READING = {"qformer_config": _QUERIES | {"use_qformer_text_input": True, "vocab_size": 101}}
# What single classes of a config need over that.
OF_CLASS: dict[str, dict[str, Any]] = {
    "Blip2TextModelWithProjection": _READING,
    "Blip2ForImageTextRetrieval": _READING | {"image_token_index": None},
}
