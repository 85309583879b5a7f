"""Tiny random models of every modality: images, sounds, videos, pairs of images and texts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_SIZES = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
_PATCHES = {"image_size": 20, "patch_size": 5}
_IMAGE = (
    _SIZES
    | _PATCHES
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.15, "num_labels": 5}
)
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
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.15,
    "num_labels": 5,
}
_CLIP_TEXT = _TEXT | {"bos_token_id": 1, "eos_token_id": 2, "projection_dim": 24}
_QUERIES = _SIZES | {
    "encoder_hidden_size": 48,
    "cross_attention_frequency": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
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
_SEEN = {
    **_SIZES,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 88,
}
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

# Class -> class of the config, its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", _IMAGE),
    "ViTForMaskedImageModeling": ("ViTConfig", _IMAGE | {"encoder_stride": 5}),
    "WhisperForConditionalGeneration": ("WhisperConfig", _SPEECH),
    "WhisperForAudioClassification": ("WhisperConfig", _SPEECH),
    "BeitForImageClassification": ("BeitConfig", _IMAGE | {"use_relative_position_bias": True, "drop_path_rate": 0.0}),
    "SwinForImageClassification": ("SwinConfig", _WINDOWS),
    "Swinv2ForImageClassification": ("Swinv2Config", _WINDOWS),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": _CLIP_TEXT, "vision_config": _SIZES | _PATCHES | {"projection_dim": 24}, "projection_dim": 24},
    ),
    "Blip2ForConditionalGeneration": (
        "Blip2Config",
        {
            "vision_config": _IMAGE,
            "qformer_config": _QUERIES,
            "text_config": _OPT,
            "num_query_tokens": 4,
            "image_token_index": 100,
        },
    ),
    "SamModel": (
        "SamConfig",
        {
            "vision_config": _SEEN | {"output_channels": 32, "num_pos_feats": 16},
            "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 40,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 32,
            },
        },
    ),
    "Gemma2Model": ("Gemma2Config", _GEMMA),
    "Gemma2ForSequenceClassification": ("Gemma2Config", _GEMMA),
    "Gemma2ForTokenClassification": ("Gemma2Config", _GEMMA),
    "DebertaV2ForQuestionAnswering": ("DebertaV2Config", _DEBERTA | {"num_labels": 2}),
    "DebertaV2ForMultipleChoice": ("DebertaV2Config", _DEBERTA),
    "VideoMAEForVideoClassification": ("VideoMAEConfig", _IMAGE | {"num_frames": 4, "tubelet_size": 2}),
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", _WAVES),
    "Siglip2ForImageClassification": (
        "Siglip2Config",
        {"vision_config": _CUT_IMAGE, "text_config": _TEXT, "num_labels": 5, "initializer_factor": 0.3},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {
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
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "vision_config": {"model_type": "clip_vision_model", **_SIZES, **_PATCHES},
            "text_config": _LLAMA,
            "image_token_index": 100,
            "image_seq_length": 16,
        },
    ),
}


def build(name: str) -> nn.Module:
    """The model `name` in float64 without dropout; always the same weights, none at the zero or one that it was
    initialised with.
    """
    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.double().eval()


def batch(name: str) -> dict[str, Any]:
    """Three samples, written by hand for every kind of model, with labels that are spread unevenly."""
    generator = torch.Generator().manual_seed(4)
    samples = 3
    ids = torch.randint(5, 99, (samples, 9), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    text = {"input_ids": ids, "attention_mask": mask}
    classes = torch.tensor([4, 0, 2])

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)

    def with_places(count: int) -> dict[str, torch.Tensor]:
        front = torch.full((samples, count), 100)
        return {
            "input_ids": torch.cat([front, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(front), mask], 1),
            "labels": torch.cat([torch.full_like(front, -100), labels], 1),
        }

    family = name.split("For")[0].removesuffix("Model")
    if family in ("Gemma2", "DebertaV2"):
        if name.endswith("QuestionAnswering"):
            return {**text, "start_positions": torch.tensor([1, 0, 3]), "end_positions": torch.tensor([2, 4, 3])}
        if name.endswith("MultipleChoice"):
            return {key: torch.stack([value, value.flip(0)], 1) for key, value in text.items()} | {
                "labels": torch.tensor([0, 1, 1])
            }
        if name.endswith("TokenClassification"):
            return {**text, "labels": labels.where(labels == -100, labels % 5)}
        return {**text, "labels": classes} if name.endswith("SequenceClassification") else text
    if family == "Wav2Vec2":
        return {"input_values": noise(1200), "labels": classes}
    if family == "Siglip2":
        mask = torch.ones(samples, 16, dtype=torch.long)
        mask[1, 8:] = 0
        shapes = torch.tensor([[4, 4], [2, 4], [4, 4]])
        return {
            "pixel_values": noise(16, 48),
            "pixel_attention_mask": mask,
            "spatial_shapes": shapes,
            "labels": classes,
        }
    if family == "Qwen2VL":
        seen = with_places(4)
        kinds = (seen["input_ids"] == 100).long()
        grid = torch.tensor([[1, 4, 4]] * samples)
        return {**seen, "mm_token_type_ids": kinds, "pixel_values": noise(16, 96).flatten(0, 1), "image_grid_thw": grid}
    if family == "Whisper":
        return {"input_features": noise(12, 32), "labels": labels if name.endswith("Generation") else classes}
    if family == "CLIP":
        return {**text, "pixel_values": noise(3, 20, 20), "return_loss": True}
    if family in ("Blip2", "Llava"):
        return {"pixel_values": noise(3, 20, 20), **with_places(4 if family == "Blip2" else 16)}
    if family == "Sam":
        return {
            "pixel_values": noise(3, 32, 32),
            "input_points": torch.tensor([[[[3.0, 9.0]]], [[[20.0, 5.0]]], [[[30.0, 30.0]]]]).double(),
        }
    if family == "VideoMAE":
        return {"pixel_values": noise(4, 3, 20, 20), "labels": classes}
    size = 32 if family.startswith("Swin") else 20
    target = (
        {"bool_masked_pos": torch.arange(48).view(3, 16) % 5 == 0}
        if name.endswith("MaskedImageModeling")
        else {"labels": classes}
    )
    return {"pixel_values": noise(3, size, size), **target}
