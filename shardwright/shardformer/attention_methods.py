"""Attention of families that go around transformers' interface, through torch's SDPA.

Their classes compute scores and softmax themselves. A method of each class is replaced by one that computes the same
with SDPA, on masks that the model makes for its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention.extra_terms import hidden_wholly, sdpa_with_alibi
from .layer.parallel_module import native_class, with_methods


def _bloom_forward(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """alibi [B * H, 1, T] is a term per key; attention_mask is additive, [B, 1, S, T]."""
    if output_attentions or (self.pretraining_tp > 1 and self.slow_but_exact):
        arguments = (hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions)
        whole: tuple[torch.Tensor, torch.Tensor] = native_class(self).forward(self, *arguments, **kwargs)
        return whole
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    dropout = self.attention_dropout.p if self.training else 0.0
    alibi = alibi.view(query.shape[0], self.num_heads, -1)
    out = sdpa_with_alibi(query, key, value, attention_mask, alibi, self.inv_norm_factor, dropout)
    out = self.dense(out.transpose(1, 2).flatten(2))
    return residual + F.dropout(out, p=self.hidden_dropout, training=self.training), _no_weights(out)


def _gptj_attn(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _sdpa(self, query, key, value, attention_mask, 1 / float(self.scale_attn))
    return out, _no_weights(out)


def _gpt_neo_attn(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores are not scaled. `bias` [1, 1, S, S] hides what is to come and, in local layers, what is beyond the
    window.
    """
    length, keys = query.shape[-2], key.shape[-2]
    seen = self.bias[:, :, keys - length : keys, :keys]
    if attention_mask is None:
        mask = seen
    elif self.attention_type == "local":
        mask = attention_mask.masked_fill(~seen, torch.finfo(attention_mask.dtype).min)
    else:
        mask = attention_mask
    out = _sdpa(self, query, key, value, mask, 1.0)
    return out, _no_weights(out)


def _no_weights(like: torch.Tensor) -> torch.Tensor:
    """In the place of attention's weights: pipelines have seen that a layer returns some."""
    return like.new_empty(0)


def _sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    dropout = module.attn_dropout.p if module.training else 0.0
    query, key = query.to(value.dtype), key.to(value.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=hidden_wholly(mask), dropout_p=dropout, scale=scale
    )


# Class -> methods; without any where the class itself asks whether its config says "sdpa".
METHODS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "BloomAttention": {"forward": _bloom_forward},
    "GPTJAttention": {"_attn": _gptj_attn},
    "GPTNeoSelfAttention": {"_attn": _gpt_neo_attn},
    "FalconAttention": {},
}


def has_methods(attention: Iterable[nn.Module]) -> bool:
    return any(native_class(module).__name__ in METHODS for module in attention)


def reads_config(attention: Iterable[nn.Module]) -> bool:
    return any(METHODS.get(native_class(module).__name__) == {} for module in attention)


def use_methods(attention: Iterable[nn.Module]) -> None:
    for module in attention:
        methods = METHODS.get(native_class(module).__name__)
        if methods:
            own = native_class(module)
            with_methods(module, methods if "forward" in methods else {"forward": _asked(own), **methods})


def _asked(native: Any) -> Callable[..., Any]:
    """The forward of a class whose `_attn` is replaced: as it was where attention's weights are asked for."""

    @functools.wraps(native.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("output_attentions"):
            return native.forward(self, *args, **kwargs)
        self._attn = functools.partial(native._attn, self)
        try:
            return native.forward(self, *args, **kwargs)
        finally:
            del self._attn

    return forward
