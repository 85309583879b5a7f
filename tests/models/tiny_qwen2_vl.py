"""A Qwen2-VL with one layer of vision: patches of 4 x 4 x 3 in two frames, four of which make a token."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

IMAGE, VIDEO, START = 100, 101, 102  # token ids
PATCH = 3 * 2 * 4 * 4  # values


def build(**text: Any) -> nn.Module:
    """`text`: settings of the language model other than the usual ones."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    tokens = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.15,
    }
    config = transformers.Qwen2VLConfig(
        text_config={
            **sizes,
            **tokens,
            "max_position_embeddings": 128,
            "rope_parameters": rotary,
            "initializer_range": 0.15,
            **text,
        },
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=103,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)
