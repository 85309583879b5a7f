"""Tensors without memory."""

from __future__ import annotations

import pytest
import torch

from shardwright.planner.fakes import Fakes


def test_results_whose_shape_goes_by_numbers_are_refused_in_a_sentence() -> None:
    """As CTC's loss, whose table is as wide as the longest text."""
    with Fakes(), pytest.raises(ValueError, match=r"cannot be replayed without data: what aten\._unique2.* returns"):
        torch.rand(4, 4).unique()
