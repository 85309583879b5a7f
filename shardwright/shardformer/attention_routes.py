"""Attention of families that go around transformers' interface, sent through it.

Their classes compute scores and softmax themselves. Where sequences are split, a method of each class is replaced by
one that hands queries, keys and values to the function that the config names, as other families do. Under a name that
transformers has itself, and where a function is to see whole sequences of some heads, the class computes as it did.

Options beside those of any family: `alibi` [B, H, T], a term of scores for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.extra_terms import sdpa_with_alibi
from ..attention.sequence_modes import attention_of, function_called
from .attention_methods import METHODS
from .layer.parallel_module import ParallelModule, native_class


def route_attention(model: nn.Module) -> None:
    """Once for each module; deep copies keep it. Modules of one class get one: layers share graphs by their classes."""
    made: dict[Any, Any] = {}
    for module in model.modules():
        name = native_class(module).__name__
        if name not in _ROUTES or hasattr(type(module), "own_attention") or _multiplies_slices(module):
            continue
        native, own_methods = _unsharded(module), METHODS.get(name, {})
        is_fused = any(getattr(native, method) is function for method, function in own_methods.items())
        kernels = is_fused or (not own_methods and attention_of(model) != "eager")
        module.routed_config = getattr(model, "config", None)  # type: ignore[assignment]
        module.uses_kernels = kernels  # type: ignore[assignment]
        kind = type(module), kernels
        if kind not in made:
            made[kind] = _over(type(module), native, _ROUTES[name](native, kernels))
        module.__class__ = made[kind]


def _unsharded(module: nn.Module) -> Any:
    """The class of a module that computes, which may have had methods replaced; what shards it is above."""
    classes = type(module).__mro__
    return next(cls for cls in classes if issubclass(cls, native_class(module)) and not issubclass(cls, ParallelModule))


def _over(cls: Any, native: Any, methods: Mapping[str, Any]) -> Any:
    """`cls` with `methods` in the place of those of `native`, a class that it inherits from."""
    if cls is native:
        names = {"__module__": cls.__module__, "native_class": getattr(cls, "native_class", cls)}
        return type(cls.__name__, (cls,), {**names, "changed_methods": True, **methods})
    bases = tuple(_over(base, native, methods) if issubclass(base, native) else base for base in cls.__bases__)
    kept = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, kept)


def _multiplies_slices(module: Any) -> bool:
    """BLOOM's exact form of a checkpoint that was trained on several ranks."""
    return bool(getattr(module, "slow_but_exact", False)) and module.pretraining_tp > 1


def has_alibi(model: nn.Module) -> bool:
    """Whether a family of those here hands `alibi` to its attention function."""
    names = {native_class(module).__name__ for module in model.modules()}
    config = getattr(model, "config", None)
    adds_it = getattr(config, "alibi", False) and attention_of(model) == "eager"
    return bool(names & {"BloomAttention", "MptAttention"} or (adds_it and "FalconAttention" in names))


def hides_by_numbers(model: nn.Module) -> bool:
    """Whether a query that may see no key gets the mean of all values, from a mask that is added to scores."""
    name, config = attention_of(model), getattr(model, "config", None)
    falcon = any(native_class(module).__name__ == "FalconAttention" for module in model.modules())
    # T5's masks are numbers that a trained bias is added to, whatever computes with them.
    biased = any(getattr(module, "has_relative_attention_bias", False) is True for module in model.modules())
    return name == "eager" or biased or (falcon and bool(getattr(config, "alibi", False)))


def makes_own_masks(model: nn.Module) -> bool:
    """Whether a routed family reads the masks that it makes itself, so that they must keep their form."""
    return any(native_class(module).__name__ in _OWN_MASKS for module in model.modules())


def _call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, **options: Any
) -> Tensor:
    """[B, S, H, D]"""
    function = function_called(module, module.routed_config)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out, _ = function(module, query, key, value, mask, dropout=p if module.training else 0.0, **options)
    return out  # type: ignore[no-any-return]


def _no_weights(module: Any, like: Tensor) -> Tensor | None:
    """Where the class returns attention's weights: pipelines have seen that a layer returns them."""
    own_kernels = module.uses_kernels and native_class(module).__name__ not in _WITH_WEIGHTS
    return None if own_kernels else like.new_empty(0)


# GPT-J, CodeGen, GPT-Neo: a method of [B, H, S, D].


def _of_method(native: Any, _: bool) -> dict[str, Any]:
    def own(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        return native._attn(module, query, key, value, mask)[0].transpose(1, 2), None

    return {"_attn": _attn, "own_attention": own}


def _attn(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    options: dict[str, Any] = {"scaling": 1 / float(getattr(self, "scale_attn", 1.0))}
    if getattr(self, "attention_type", None) == "local":
        options["sliding_window"] = self.config.window_size
        attention_mask = _within_window(self, attention_mask)
    out = _call(self, query, key, value, attention_mask, self.attn_dropout.p, **options)
    return out.transpose(1, 2), _no_weights(self, out)


def _within_window(self: Any, mask: Tensor | None) -> Tensor | None:
    """The mask of a whole sequence with GPT-Neo's own window, which is a buffer; others are left as they are."""
    if mask is None or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return mask
    seen = self.bias[:, :, : mask.shape[-2], : mask.shape[-1]]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


# BLOOM, Falcon, MPT: the whole forward.


def _of_forward(forward: Callable[..., Any]) -> Callable[[Any, bool], dict[str, Any]]:
    return lambda native, kernels: {"forward": forward, "own_attention": _with_kernels if kernels else _plainly}


def _plainly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    alibi: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Mask: additive, or a bool one, True where it is seen."""
    scores = query @ key.transpose(-1, -2) * scaling
    if alibi is not None:
        scores = scores + alibi[:, :, None]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2), None


def _with_kernels(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    alibi: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if alibi is not None:
        return sdpa_with_alibi(query, key, value, mask, alibi, scaling, dropout).transpose(1, 2), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


def _bloom_forward(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """alibi [B * H, 1, T]"""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    alibi = alibi.view(query.shape[0], self.num_heads, -1)
    options = {"scaling": self.inv_norm_factor, "alibi": alibi}
    out = _call(self, query, key, value, attention_mask, self.attention_dropout.p, **options)
    states = residual + F.dropout(self.dense(out.flatten(2)), p=self.hidden_dropout, training=self.training)
    return states, _no_weights(self, out)


def _falcon_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """alibi [B, H, 1, T], which is part of the mask too: kernels add it once, plain products twice."""
    query, key, value = (each.transpose(1, 2) for each in self._split_heads(self.query_key_value(hidden_states)))
    p, options = 0.0, {"scaling": self.inv_norm_factor}
    if alibi is None:
        query, key = _falcon_rotated(self, query, key, *position_embeddings)
    else:
        p = self.attention_dropout.p
        if not self.uses_kernels:
            options["alibi"] = alibi.view(query.shape[0], self.num_heads, -1) * self.inv_norm_factor
    out = _call(self, query, key, value, attention_mask, p, **options)
    return self.dense(out.flatten(2)), _no_weights(self, out)


def _falcon_rotated(self: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(query), turned(key)


def _mpt_forward(
    self: Any, hidden_states: Tensor, position_bias: Tensor | None, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """position_bias [H, 1, T or more], of which the last ones are those of the keys; the mask is True where a key is
    hidden.
    """
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        each.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for each in mixed.chunk(3, dim=2)
    )
    options: dict[str, Any] = {"scaling": self.softmax_scale}
    if position_bias is not None:
        assert attention_mask is not None, "MPT always makes a mask"
        alibi = position_bias[:, 0, position_bias.shape[-1] - attention_mask.shape[-1] :]
        options["alibi"] = alibi.expand(query.shape[0], -1, -1)
    seen = None if attention_mask is None else ~attention_mask
    out = _call(self, query, key, value, seen, self.attn_dropout_p, **options)
    return self.out_proj(out.flatten(2)), _no_weights(self, out)


# Class -> the methods of a module, from its class as it is and whether its attention goes to kernels.
_ROUTES: Mapping[str, Callable[[Any, bool], dict[str, Any]]] = {
    "GPTJAttention": _of_method,
    "CodeGenAttention": _of_method,
    "GPTNeoSelfAttention": _of_method,
    "BloomAttention": _of_forward(_bloom_forward),
    "FalconAttention": _of_forward(_falcon_forward),
    "MptAttention": _of_forward(_mpt_forward),
}
_WITH_WEIGHTS = tuple(name for name, methods in METHODS.items() if methods)  # before those took their place
_OWN_MASKS = ("FalconAttention", "MptAttention")
