"""The notation in which schedules are written: phases of letters, repeated.

A letter is a kind of work on one of the rank's chunks: `F(0)`, `I(1)`. A phase repeats some letters, and a schedule is a list of phases:

    [times(warmup, F(0)), times(m - warmup, F(0), B(0)), times(warmup, B(0))]

No microbatch is named, because every letter takes the microbatches in their order: the third F(0) of a rank is that of microbatch 2. This
also means that gradients add up in the same order in every schedule. Letters are numbers in arrays, so that a pipeline of hundreds of
ranks and thousands of microbatches is written down in a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..actions import KINDS, ActionList, Kind
from ..placement import Placement

Letters = NDArray[np.int16]  # chunk * 4 + position of the kind in `_COMPUTE`
_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
_KIND_OF = np.array([KINDS.index(kind) for kind in _COMPUTE], dtype=np.int8)


def _letter(kind: Kind, chunk: int) -> int:
    return 4 * chunk + _COMPUTE.index(kind)


def F(chunk: int = 0) -> int:
    return _letter(Kind.F, chunk)


def B(chunk: int = 0) -> int:
    return _letter(Kind.B, chunk)


def I(chunk: int = 0) -> int:  # noqa: E743  (see `Kind.I`)
    return _letter(Kind.I, chunk)


def W(chunk: int = 0) -> int:
    return _letter(Kind.W, chunk)


def times(count: int, *letters: int) -> Letters:
    """A phase: `count` times these letters."""
    return np.tile(np.array(letters, dtype=np.int16), max(0, count))


def of_chunks(letter: int, chunks: NDArray[np.integer]) -> Letters:
    """This letter (written for chunk 0) on these chunks, one after the other."""
    return (4 * chunks + letter).astype(np.int16)


def in_turn(first: Letters, second: Letters) -> Letters:
    """A phase of pairs: one of the first, one of the second."""
    return np.stack([first, second], axis=1).ravel()


def number(phases: Sequence[Letters], placement: Placement, rank: int, num_microbatches: int) -> ActionList:
    """The actions of a rank: every letter takes the microbatches in order. Letters beyond the last microbatch are left out."""
    letters = np.concatenate(phases)
    order = np.argsort(letters, kind="stable")
    first = np.searchsorted(letters[order], letters[order])  # where the run of equal letters begins
    microbatches = np.empty(len(letters), dtype=np.int32)
    microbatches[order] = np.arange(len(letters)) - first
    exist = microbatches < num_microbatches
    letters, microbatches = letters[exist], microbatches[exist]
    stages = np.array(placement.stages_of(rank), dtype=np.int32)
    return ActionList(_KIND_OF[letters % 4], stages[letters // 4], microbatches)
