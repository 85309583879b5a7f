"""Seeding every generator at once."""

from __future__ import annotations

import random

import numpy
import torch


def set_seed(seed: int) -> None:
    """Seed python, numpy and torch (all devices). Any whole number: numpy's 32 bits are taken from it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
