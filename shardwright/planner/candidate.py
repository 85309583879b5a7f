"""Layouts that a search compares, and what they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .machines import Machine
from .stages import Ends
from .states import NO_STEP, StepCost


@dataclass(frozen=True)
class Layout:
    """tp, pp, sp, dp   ranks
    zero              stage
    samples, count    of a microbatch, and microbatches
    whole, selective  shares of the layers that are recomputed
    """

    tp: int
    pp: int
    sp: int
    dp: int
    zero: int
    style: str
    chunks: int
    samples: int
    count: int
    whole: float = 0.0
    selective: float = 0.0


@dataclass(frozen=True)
class Task:
    """What is trained, on what.

    hidden      bytes of one sample between layers, whole
    half        whether weights have half precision, beside masters
    states      numbers of four bytes that the optimizer keeps per element
    flops       of all forwards and backwards of a sample, on all ranks together
    step        what a step of the optimizer moves and computes
    ends        what the cut takes to lie around the layers; None: by their times
    table       elements of what is looked up before the layers, whose gradient is as large
    tied        whether the head has the same weights, of which the last stage of a pipeline has a copy
    rereads     whether a backward reads the table once more
    again       layers that look up the same once more, and how many elements of it: of which their stage has a copy
    clips       whether the norm of gradients is taken
    """

    machine: Machine
    hidden: float
    half: bool
    states: float
    flops: float
    world_size: int
    step: StepCost = NO_STEP
    ends: Ends | None = None
    table: float = 0.0
    tied: bool = False
    rereads: bool = False
    again: tuple[tuple[int, float], ...] = ()
    clips: bool = False


class Rounds(NamedTuple):
    """How often in a step a rank's gradients are reduced over data-parallel ranks, and its weights gathered."""

    reduced: int
    gathered: int


def data_rounds(layout: Layout) -> Rounds:
    """Below stage 2 gradients are summed on their rank first, from it on every microbatch's are reduced. Updated
    weights are gathered once; those of stage 3 for every forward and backward, of a pipeline's chunks once where all
    of a rank's find room (up to three), else for each of the actions.
    """
    if layout.dp * layout.sp == 1:
        return Rounds(0, 0)
    reduced = layout.count if layout.zero >= 2 else 1
    if layout.zero < 3:
        return Rounds(reduced, 1 if layout.zero else 0)
    return Rounds(reduced, 2 * layout.count if layout.pp == 1 or layout.chunks > 3 else 1)
