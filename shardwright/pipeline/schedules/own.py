"""What functions of registered schedules return, checked before it is numbered: nobody knows that it is in letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..planning.placement import Placement
from .phases import FB, B, I, Letters, W, kinds_and_chunks

_NOTATION = (
    "it must return a list of phases for the rank, written with shardwright.pipeline.schedules.phases, such as "
    "[times(num_microbatches, F(), B())]"
)


def own_phases(
    name: str,
    function: Callable[[Placement, int, int], Any],
    splits: bool,
    placement: Placement,
    rank: int,
    num_microbatches: int,
) -> list[Letters]:
    """The phases of a rank; ValueError that names the schedule for anything else."""
    asked = f"pp_style={name!r}, which was registered, for rank {rank} and {num_microbatches} microbatches"
    try:
        returned = function(placement, rank, num_microbatches)
    except Exception as error:  # of the user's
        raise ValueError(f"{asked}: its function raised {type(error).__name__}: {error}") from error
    if isinstance(returned, str | bytes | dict | np.ndarray) or not np.iterable(returned):
        raise ValueError(f"{asked}: its function returned {returned!r}; {_NOTATION}")
    phases = [_phase(phase, asked) for phase in returned]
    if not any(map(len, phases)):
        raise ValueError(f"{asked}: its function returned no letters; {_NOTATION}")
    _check_letters(np.concatenate(phases), placement, splits, asked)
    return [phase.astype(np.int16) for phase in phases]


def _phase(phase: Any, asked: str) -> NDArray[np.int64]:
    try:
        letters = np.asarray(phase)
    except ValueError:  # lists of different lengths
        letters = np.array(None)
    if letters.ndim != 1 or (len(letters) and not np.issubdtype(letters.dtype, np.integer)):
        raise ValueError(f"{asked}: {phase!r} is no phase; {_NOTATION}")
    return letters.astype(np.int64)


def _check_letters(letters: NDArray[np.int64], placement: Placement, splits: bool, asked: str) -> None:
    kinds, chunks = kinds_and_chunks(letters)
    if (wrong := chunks[(chunks < 0) | (chunks >= placement.num_chunks)]).size:
        raise ValueError(
            f"{asked}: it has letters of chunk {wrong[0]}, but a rank has {placement.num_chunks} chunk(s), the first "
            "of which is 0; num_model_chunks= of register_schedule says how many"
        )
    if not splits and np.isin(kinds, (I(), W())).any():
        raise ValueError(f"{asked}: it has I or W; register it with splits_backward=True, or write B, which is both")
    behind = np.append(kinds[1:], -1)[kinds == FB()]
    if not np.isin(behind, (B(), I())).all():
        raise ValueError(f"{asked}: it has an FB without a B or I behind it; FB(0), B(0) run together")
