"""The notation in which schedules are written: phases of letters, repeated.

A letter is a kind of work on one of the rank's chunks: `F(0)`, `I(1)`. A phase repeats some letters, and a schedule is
a list of phases:

    [times(warmup, F(0)), times(m - warmup, F(0), B(0)), times(warmup, B(0))]

`FB(0), B(1)` is a forward of chunk 0 that runs together with the backward behind it.

No microbatch is named, because every letter takes the microbatches in their order: the third forward of chunk 0 is that
of microbatch 2, the third of its backwards (B or I) as well, and the first W is that of the first I. This also means
that gradients add up in the same order in every schedule. Letters are numbers in arrays, so that a pipeline of hundreds
of ranks and thousands of microbatches is written down in a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..planning.actions import KINDS, ActionList, Kind
from ..planning.placement import Placement

Letters = NDArray[np.int16]  # chunk * 5 + position of the kind in `_COMPUTE`
_COMPUTE = (Kind.F, Kind.FB, Kind.B, Kind.I, Kind.W)
_COUNTED = np.array([0, 0, 1, 1, 2])  # kinds that share the microbatches of a chunk
_KIND_OF = np.array([KINDS.index(kind) for kind in _COMPUTE], dtype=np.int8)


def _letter(kind: Kind, chunk: int) -> int:
    return len(_COMPUTE) * chunk + _COMPUTE.index(kind)


def F(chunk: int = 0) -> int:
    return _letter(Kind.F, chunk)


def FB(chunk: int = 0) -> int:
    return _letter(Kind.FB, chunk)


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
    return (len(_COMPUTE) * chunks + letter).astype(np.int16)


def in_turn(first: Letters, second: Letters) -> Letters:
    """A phase of pairs: one of the first, one of the second."""
    return np.stack([first, second], axis=1).ravel()


def kinds_and_chunks(letters: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Each letter as it is written for chunk 0, and its chunk."""
    chunks, kinds = np.divmod(letters, len(_COMPUTE))
    return kinds, chunks


def number(phases: Sequence[Letters], placement: Placement, rank: int, num_microbatches: int) -> ActionList:
    """The actions of a rank: every letter takes the microbatches in order. Letters beyond the last microbatch are
    left out.
    """
    letters = np.concatenate(phases)
    chunks, kinds = np.divmod(letters, len(_COMPUTE))
    counted = (3 * chunks + _COUNTED[kinds]).astype(np.int16)
    order = np.argsort(counted, kind="stable")
    first = np.searchsorted(counted[order], counted[order])  # where the run of what is counted together begins
    microbatches = np.empty(len(letters), dtype=np.int32)
    microbatches[order] = np.arange(len(letters)) - first
    for chunk in range(placement.num_chunks if W() in kinds and B() in kinds else 0):
        microbatches[letters == W(chunk)] = microbatches[letters == I(chunk)]
    exist = microbatches < num_microbatches
    joined = np.flatnonzero(exist & (kinds == FB()))
    kinds[joined[~exist[joined + 1]]] = F()  # the backward beside it does not exist
    stages = np.array(placement.stages_of(rank), dtype=np.int32)
    return ActionList(_KIND_OF[kinds[exist]], stages[chunks[exist]], microbatches[exist])
