"""Trainable keys and values before every sequence (P-tuning v2)."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_chatglm import ChatGLMConfig


class PrefixEncoder(nn.Module):
    """A table [P, 2 * layers * groups * channels]; with `prefix_projection` two linears behind it."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        assert config.pre_seq_len is not None
        features = 2 * config.num_layers * config.num_key_value_heads * config.kv_channels
        self.prefix_projection = config.prefix_projection
        self.embedding = nn.Embedding(config.pre_seq_len, features)
        if self.prefix_projection:
            self.trans = nn.Sequential(
                nn.Linear(features, config.hidden_size), nn.Tanh(), nn.Linear(config.hidden_size, features)
            )

    def forward(self, prefix: torch.Tensor) -> torch.Tensor:
        """[B, P] -> [B, P, 2 * layers * groups * channels], for each layer its keys, then its values."""
        embedded = self.embedding(prefix)
        return self.trans(embedded) if self.prefix_projection else embedded
