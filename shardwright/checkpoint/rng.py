"""States of the random generators of a process, as tensors.

Tensor parallelism needs nothing beside them: its per-rank numbers are drawn from the global generators (see
`shardformer.rng`).
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

_GOLDEN = 0x9E3779B97F4A7C15


def get_states() -> dict[str, torch.Tensor]:
    """ "torch", "cuda" (where there is one), "numpy" and "python"; words of 32 bits are kept as doubles, which hold
    them exactly.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    words: Any
    _, words, position, has_gauss, gauss = numpy.random.get_state()
    states["numpy"] = torch.tensor([*words.tolist(), position, has_gauss, gauss], dtype=torch.float64)
    _, words, following = random.getstate()
    states["python"] = torch.tensor([*words, following is not None, following or 0.0], dtype=torch.float64)
    return states


def set_states(states: dict[str, torch.Tensor], stream: int = 0) -> None:
    """`stream` other than 0: numbers of their own, made from the states (for ranks that did not exist when they were
    saved).
    """
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        values: list[Any] = states["numpy"].tolist()
        keys = numpy.array(values[:-3], dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", keys, int(values[-3]), int(values[-2]), values[-1]))
    if "python" in states:
        values = states["python"].tolist()
        random.setstate((3, tuple(int(word) for word in values[:-2]), values[-1] if values[-2] else None))
    if stream:
        seed = int(torch.randint(2**62, ())) ^ (stream * _GOLDEN & (2**62 - 1))
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
