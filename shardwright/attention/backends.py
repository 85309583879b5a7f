"""Attention functions of our own, with the arguments that transformers' interface passes.

All take query [B, H, S, D], key [B, K, T, D], value [B, K, T, Dv] with K heads that H is a multiple of, and a mask: a
bool one (True is seen) or an additive one [B, 1 or H, S, T], or None. They return ([B, S, H, Dv], None).

What an implementation cannot do is an error and never left out: transformers passes soft caps, sinks and position
biases as keywords that a function may overlook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .extra_terms import sdpa_with_sinks

Attention = Callable[..., tuple[torch.Tensor, Any]]
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sdpa:
    """torch's SDPA, through transformers' function, with certain kernels, and with sinks.

    function    transformers' own
    kernel      one of KERNELS; "" leaves it to torch
    only        no other kernel may take over where that one cannot
    """

    function: Attention
    kernel: str = ""
    only: bool = True

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if self.only and self.kernel == "flash" and query.is_cuda and attention_mask is not None:
            raise ValueError(
                "attention_backend='flash': torch's flash kernels take no masks on a GPU, and this batch needs one (it "
                "is padded or packed); use attention_backend='sdpa' or 'efficient', or batches without padding"
            )
        bias = kwargs.get("position_bias")
        if bias is not None and bias.stride(-1) != 1:  # as T5's is, and no fused kernel takes that
            kwargs["position_bias"] = bias.contiguous()
        try:
            with self._kernels():
                if s_aux is None:
                    caller: Any = module
                    if self.kernel == "efficient" and query.shape[1] != key.shape[1]:  # which knows no groups of heads
                        key, value = repeated(query, key, value)
                        caller = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
                    out, _ = self.function(
                        caller,
                        query,
                        key,
                        value,
                        attention_mask,
                        dropout=dropout,
                        scaling=scaling,
                        is_causal=is_causal,
                        **kwargs,
                    )
                    return out, None
                refuse_unknown("sdpa", kwargs)
                causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
                key, value = repeated(query, *reachable(query, key, value, attention_mask, bool(causal)))
                scale = scaling if scaling is not None else query.shape[-1] ** -0.5
                out = sdpa_with_sinks(query, key, value, attention_mask, s_aux, scale, bool(causal), dropout)
                return out.transpose(1, 2).contiguous(), None
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise ValueError(
                f"attention_backend={self.kernel!r}: torch has no such kernel for this call ({query.dtype}, head_dim "
                f"{query.shape[-1]}, {'a mask' if attention_mask is not None else 'no mask'}, dropout {dropout:g}, "
                f"{query.device.type}); use attention_backend='sdpa', which lets torch choose"
            ) from error

    def _kernels(self) -> Any:
        if not self.kernel:
            return nullcontext()
        first = KERNELS[self.kernel]
        if self.only:
            return sdpa_kernel(first)
        return sdpa_kernel([first, *(each for each in KERNELS.values() if each != first)], set_priority=True)


def repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values for every head of queries."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def reachable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values without places of a cache that are still empty: where transformers gives a causal model no mask,
    several queries are the first of their sequence, however many places there are.
    """
    length = query.shape[2]
    if attention_mask is None and causal and 1 < length < key.shape[2]:
        return key[:, :, :length], value[:, :, :length]
    return key, value


def refuse_unknown(backend: str, kwargs: dict[str, Any], known: Sequence[str] = ()) -> None:
    """What changes scores must not be overlooked."""
    for name in ("softcap", "s_aux", "position_bias"):
        if name not in known and kwargs.get(name) is not None:
            raise ValueError(
                f"attention_backend={backend!r}: this model's attention has a {name}, which it does not know; use "
                "attention_backend=None, which chooses one that does"
            )


def xformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """xformers' memory-efficient attention."""
    import xformers.ops as ops

    refuse_unknown("xformers", kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is None and causal and position_bias is not None and query.shape[2] > 1:
        position_bias = position_bias[..., : query.shape[2]]
    key, value = repeated(query, *reachable(query, key, value, attention_mask, bool(causal)))
    bias: Any = None
    if attention_mask is not None or position_bias is not None:
        bias = additive(query, key, attention_mask, position_bias, bool(causal))
        room = -(-bias.shape[-1] // 8) * 8  # rows begin at multiples of 8 elements
        bias = F.pad(bias, (0, room - bias.shape[-1]))[..., : key.shape[2]]
    elif causal and query.shape[2] > 1:
        bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ops.memory_efficient_attention(q, k, v, attn_bias=bias, p=dropout, scale=scaling), None


def additive(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Mask and position bias as one additive bias [B, H, S, T]. Without a mask a causal model gets a causal one."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    bias = query.new_zeros(shape) if position_bias is None else position_bias.to(query.dtype).expand(shape)
    if attention_mask is None and causal:
        attention_mask = torch.ones(shape[2:], dtype=torch.bool, device=query.device).tril(shape[3] - shape[2])
    if attention_mask is None:
        return bias
    if attention_mask.dtype == torch.bool:
        return bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    return bias + attention_mask


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """torch's attention over documents of varying length; the mask is a 2-D one [B, S] (True is a token) or None.

    Documents are what positions say: where they begin again, in a row without padding.
    """
    from torch.nn.attention.varlen import varlen_attn

    refuse_unknown("varlen", kwargs)
    if dropout:
        raise ValueError(
            f"attention_backend='varlen' has no dropout, and the model's is {dropout:g}; use 'sdpa', or 0 in its config"
        )
    batch, heads, length, _ = query.shape
    if key.shape[2] != length:
        raise ValueError("attention_backend='varlen' attends to the tokens of this batch only; use 'sdpa' with a cache")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_backend='varlen' takes masks of tokens [batch, length], and this one has "
            f"{attention_mask.ndim} dimensions; use 'sdpa', or 'eager'"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    is_token = torch.ones(batch, length, dtype=torch.bool, device=query.device)
    if attention_mask is not None:
        is_token = attention_mask.bool()
    kept = is_token.flatten().nonzero().squeeze(1)
    if not len(kept):
        return query.transpose(1, 2)[..., : value.shape[-1]] * 0, None
    starts = _document_starts(is_token, position_ids if attention_mask is None else None).flatten()[kept]
    bounds = torch.cat([starts.nonzero().squeeze(1), starts.new_tensor([len(kept)], dtype=torch.long)]).int()
    longest = int(bounds.diff().max())
    grouped: dict[str, Any] = {"enable_gqa": True} if heads != key.shape[1] else {}
    if grouped and "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        grouped, (key, value) = {}, repeated(query, key, value)
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[kept] for x in (query, key, value))
    back = sliding_window - 1 if sliding_window is not None else -1
    window = (back, 0 if causal else back)
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **grouped)
    whole: torch.Tensor = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, kept, out)
    return whole.unflatten(0, (batch, length)), None


def _document_starts(is_token: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """[B, S], True at the first token of each document."""
    starts = is_token & (is_token.cumsum(1) == 1)
    if position_ids is None or position_ids.ndim != 2:
        return starts
    position_ids = position_ids.expand(is_token.shape)
    again = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts | F.pad(again, (1, 0))
