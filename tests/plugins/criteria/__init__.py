"""Losses as people write them, by what must become of them: `RIGHT`, `REFUSED`, `PAIRS`."""

from . import by_hand, loops, means, model, pairs, refused
from .model import REFUSED, RIGHT, batch, build, shifted
from .pairs import PAIRS, Weighted

__all__ = [
    "PAIRS",
    "REFUSED",
    "RIGHT",
    "Weighted",
    "batch",
    "build",
    "by_hand",
    "loops",
    "means",
    "model",
    "pairs",
    "refused",
    "shifted",
]
