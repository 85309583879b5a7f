"""Tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration

from shardwright.planner.fakes import Fakes, is_fake


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
