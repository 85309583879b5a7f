"""Layers of ChatGLM, under the names of the published checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_chatglm import ChatGLMConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in float32 or better."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * scaled).to(x.dtype)


class WideLayerNorm(nn.LayerNorm):
    """A layer norm in float32 of weights with fewer bits, for sums of residuals in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(widened(x), self.normalized_shape, widened(self.weight), widened(self.bias), self.eps)


def norm_of(config: ChatGLMConfig) -> nn.Module:
    layer_norm = WideLayerNorm if config.fp32_residual_connection else nn.LayerNorm
    return (RMSNorm if config.rmsnorm else layer_norm)(config.hidden_size, eps=config.layernorm_epsilon)


def widened(x: torch.Tensor) -> torch.Tensor:
    """In float32, where `x` has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_frequencies(
    config: ChatGLMConfig, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    """[channels / 4], of the pairs in the rotated half of a head."""
    rotated = config.kv_channels // 2
    exponents = torch.arange(0, rotated, 2, dtype=dtype, device=device) / rotated
    return 1.0 / (10000.0 * config.rope_ratio) ** exponents


class RotaryEmbedding(nn.Module):
    """Cosine and sine of position * frequency.

    `inv_freq` is in the published checkpoints, where it is rounded to 16 bits; angles are computed without it.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inverse_frequencies(config))

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Positions [B or 1, S] -> two of [B or 1, S, channels / 4] in the dtype of `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(wide) * inverse_frequencies(self.config, wide, x.device)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first half of every head [B, heads, S, channels]: neighbouring features are a pair, (a, b) becomes
    (a cos - b sin, b cos + a sin).
    """
    pairs = cos.shape[-1]
    a, b = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., 2 * pairs :]), dim=-1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scaling + mask) v: q [B, heads, S, channels], k and v [B, groups, T, channels] ->
    [B, S, heads, channels].
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = F.dropout(scores.softmax(-1, dtype=wide).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class SelfAttention(nn.Module):
    """Causal attention whose query heads share keys and values in groups.

    The features of `query_key_value` are [all q | all k | all v] with groups, and [q, k, v] of every head without.
    """

    is_causal = True

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_attention_heads // self.num_key_value_heads
        self.head_dim = config.kv_channels
        self.packed = config.multi_query_attention
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        features = self.num_attention_heads * self.head_dim
        key_features = self.num_key_value_heads * self.head_dim
        self.query_key_value = nn.Linear(
            config.hidden_size, features + 2 * key_features, bias=config.add_bias_linear or config.add_qkv_bias
        )
        self.dense = nn.Linear(features, config.hidden_size, bias=config.add_bias_linear)

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [B, heads, S, channels], k and v [B, groups, S, channels]."""
        mixed = self.query_key_value(hidden_states)
        if self.packed:
            heads = mixed.unflatten(-1, (-1, self.head_dim))
            counts = [self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads]
            parts = heads.split(counts, dim=-2)
        else:
            parts = mixed.unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)
        return tuple(part.transpose(1, 2) for part in parts)

    def forward(
        self,
        hidden_states: torch.Tensor,
        prefix: torch.Tensor | None = None,
        position_embeddings: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`prefix` [2, B, groups, P, channels] are keys and values that stand before all others, unrotated."""
        assert position_embeddings is not None
        query, key, value = self._projected(hidden_states)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if prefix is not None:
            key, value = torch.cat((prefix[0], key), dim=-2), torch.cat((prefix[1], value), dim=-2)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.dense(output.flatten(-2)), weights


class MLP(nn.Module):
    """dense_4h_to_h(silu(gate) * up); `dense_h_to_4h` is [gate | up]."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=config.add_bias_linear)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.dense_h_to_4h(hidden_states).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class GLMBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then the same with the MLP; the residual may start behind the norm instead."""

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        self.fp32_residual_connection = config.fp32_residual_connection
        self.input_layernorm = norm_of(config)
        self.self_attention = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        prefix: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        start = self._normed(self.input_layernorm, hidden_states)
        attended, _ = self.self_attention(
            start,
            prefix,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            **kwargs,
        )
        hidden_states = self._added(hidden_states, start, attended)
        start = self._normed(self.post_attention_layernorm, hidden_states)
        return self._added(hidden_states, start, self.mlp(start))

    def _normed(self, norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """In the dtype of the weights, which is that of `hidden_states` unless residuals are wider."""
        output = norm(hidden_states)
        return output.to(norm.weight.dtype) if self.fp32_residual_connection else output  # type: ignore[arg-type]

    def _added(self, hidden_states: torch.Tensor, start: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        residual = start if self.apply_residual_connection_post_layernorm else hidden_states
        if self.fp32_residual_connection:
            residual = widened(residual)
        return residual + self.dropout(update)


class Embedding(nn.Module):
    """The table of words, a module of its own in the published checkpoints."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(input_ids)


class GLMTransformer(nn.Module):
    """All layers and the norm behind them."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GLMBlock(config, index) for index in range(config.num_layers)])
        if config.post_layer_norm:
            self.final_layernorm = norm_of(config)

    def forward(self, hidden_states: torch.Tensor, prefixes: list[torch.Tensor | None], **kwargs: Any) -> torch.Tensor:
        """`prefixes` has one entry per layer."""
        for layer, prefix in zip(self.layers, prefixes, strict=True):
            hidden_states = layer(hidden_states, prefix, **kwargs)
        if hasattr(self, "final_layernorm"):
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states
