"""Tensors without memory."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration

from shardwright.planner.fakes import Fakes, is_fake
from shardwright.planner.live_bytes import LiveBytes


def test_results_whose_shape_goes_by_numbers_are_refused_in_a_sentence() -> None:
    """As CTC's loss, whose table is as wide as the longest text."""
    with Fakes(), pytest.raises(ValueError, match=r"cannot be replayed without data: what aten\._unique2.* returns"):
        torch.rand(4, 4).unique()


def test_masks_that_decoders_make_for_themselves_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """BART makes one of ones where it is given none, and attention has no mask where all of it is one."""
    config = BartConfig(
        vocab_size=101,
        d_model=40,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=5,
        decoder_attention_heads=5,
        encoder_ffn_dim=72,
        decoder_ffn_dim=72,
    )
    masks, attend = list[Any](), functional.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Any = None, **others: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **others)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    with Fakes():
        model = BartForConditionalGeneration(config)
        ids = torch.ones(2, 7, dtype=torch.long)
        assert is_fake(model(input_ids=ids, labels=ids).logits)
    assert masks == [None] * 5


def test_ones_are_tensors_without_memory_where_they_are_large() -> None:
    with Fakes():
        assert not is_fake(torch.ones(2, 7))
        assert is_fake(torch.ones(7))
        assert is_fake(torch.ones(2, 1, 7, 7))
        assert is_fake(torch.ones(4096, 4096))


def test_copies_are_fakes_of_their_own_and_go() -> None:
    with Fakes(), LiveBytes() as live:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        model[1].weight.grad = torch.empty(8, 16)
        model[0].weight.note = ["told"]
        model[0].tied = model[1].weight
        frozen = model[0].bias.requires_grad_(False)
        before = live.bytes()
        copied = copy.deepcopy(model)
        assert live.bytes() == 2 * before
        assert all(isinstance(param, nn.Parameter) and is_fake(param) for param in copied.parameters())
        assert copied[0].tied is copied[1].weight is not model[1].weight
        assert copied[1].weight.grad is not None
        assert copied[1].weight.grad is not model[1].weight.grad
        assert copied[0].weight.note == ["told"]
        assert copied[0].weight.note is not model[0].weight.note
        assert [param.requires_grad for param in copied.parameters()] == [
            param is not frozen for param in model.parameters()
        ]
        with pytest.raises(RuntimeError, match="deepcopy protocol"):
            copy.deepcopy(model[0].weight * 2)
        del copied
        gc.collect()
        assert live.bytes() == before


def test_what_is_largest_among_fakes_is_drawn_by_lot() -> None:
    """Distinct along the dimension, all about as often, and the same again for as many."""
    with Fakes():
        scores = torch.randn(600, 8)
        values, places = scores.topk(3)
        assert is_fake(values)
        assert not is_fake(places)
        assert places.shape == (600, 3)
        assert all(len(set(row)) == 3 for row in places.tolist())
        counts = places.flatten().bincount(minlength=8)
        assert counts.min() > 0.8 * 225
        assert counts.max() < 1.2 * 225
        torch.testing.assert_close(torch.randn(600, 8).topk(3)[1], places)
        assert scores.topk(2, 0)[1].shape == (2, 8)
        assert scores.topk(2, dim=0)[1].max() > 8
        assert scores.view(2, 300, 8).argmax(1).shape == (2, 8)
        assert scores.max(-1, keepdim=True)[1].shape == (600, 1)
        assert scores.argmax().shape == ()
        assert torch.empty(0, 8).topk(2)[1].shape == (0, 2)
        assert torch.empty(1 << 20, 1 << 20).argmax().shape == (), "for which there are no lots as many"
        many = torch.empty(600_000, 8).topk(2)[1]
        assert many.untyped_storage().nbytes() == many.numel() * 8
