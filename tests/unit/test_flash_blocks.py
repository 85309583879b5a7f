"""Blocks of a ring by the functions of flash-attn, of which there is a stand-in here: its arguments, its layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.attention import blocks
from shardwright.attention.blocks import Rule, attend, attend_backward
from shardwright.attention.flash_blocks import find_flash_blocks, of_module

B, H, K, D = 2, 6, 2, 8


def weights(q: Tensor, k: Tensor, scale: float, causal: bool, softcap: float) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Q, K] of q and k [B, ., H, D] without a soft cap, and what it makes of them."""
    raw = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    return raw, capped.masked_fill(torch.ones_like(capped).triu(1).bool(), -torch.inf) if causal else capped


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    assert (window_size_left, window_size_right) == (-1, 0 if causal else -1)
    assert q.shape[2:] == (H, D)
    assert k.shape[2:] == v.shape[2:] == (K, D)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    _, scores = weights(q, k, softmax_scale, causal, softcap)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(H // K, 2))
    return out, scores.logsumexp(-1), q.new_empty(0), q.new_empty(2)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert (dropout_p, alibi_slopes, rng_state, deterministic) == (0.0, None, None, False)
    assert softmax_lse.shape == (q.shape[0], H, q.shape[1])
    assert softmax_lse.is_contiguous()
    raw, scores = weights(q, k, softmax_scale, causal, softcap)
    chosen = (scores - softmax_lse[..., None]).exp()
    towards = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(H // K, 2))
    slope = 1 - torch.tanh(raw / softcap) ** 2 if softcap else 1
    of_scores = chosen * (towards - (dout * out).sum(-1).transpose(1, 2)[..., None]) * slope * softmax_scale

    def summed(of_heads: Tensor) -> Tensor:
        return of_heads.unflatten(2, (K, H // K)).sum(3)

    for into, made in (
        (dq, torch.einsum("bhqk,bkhd->bqhd", of_scores, k.repeat_interleave(H // K, 2))),
        (dk, summed(torch.einsum("bhqk,bqhd->bkhd", of_scores, q))),
        (dv, summed(torch.einsum("bhqk,bqhd->bkhd", chosen, dout))),
    ):
        assert into is not None
        assert into.is_contiguous()
        into.copy_(made)
    return softmax_lse


STAND_IN = SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_those_of_the_plain_products(
    causal: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys = 5, 5 if causal else 7
    # parts of longer tensors, as a ring has them
    q, kv = random(B, H, queries + 2, D)[:, :, 2:], random(B, K, keys + 1, 2 * D)[:, :, :keys]
    k, v = kv.split(D, -1)
    rule = Rule(0.4, softcap, causal)
    plain, lse = attend(q, k, v, rule)
    dout, more = random(B, H, queries, D), random(B, H, queries).abs()
    given = dout, q, k, v, 0.8 * plain, (lse + more).to(lse.dtype), rule  # there are keys in other blocks
    expected = plain, lse, *attend_backward(*given)[:3]

    flash = of_module(STAND_IN)
    assert flash is not None
    monkeypatch.setattr(blocks, "_flash_fits", lambda *_: True)
    monkeypatch.setattr(blocks, "find_flash_blocks", lambda: flash)
    for got, wanted in zip((*attend(q, k, v, rule), *attend_backward(*given)[:3]), expected, strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-10, atol=1e-12)


def test_other_versions_and_none_are_left_alone() -> None:
    def older(q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size: Any) -> None: ...

    assert of_module(SimpleNamespace(_flash_attn_forward=older, _flash_attn_backward=_flash_attn_backward)) is None
    assert of_module(SimpleNamespace()) is None
    assert find_flash_blocks() is None


def test_operators_of_torch_are_known_by_their_schema() -> None:
    forward = torch.library.custom_op("stand_in::flash_forward", _flash_attn_forward, mutates_args=())
    wrapped = SimpleNamespace(
        _wrapped_flash_attn_forward=torch.ops.stand_in.flash_forward, _flash_attn_backward=_flash_attn_backward
    )
    assert forward is not None
    found = of_module(wrapped)
    assert found is not None
    assert found.forward is torch.ops.stand_in.flash_forward
