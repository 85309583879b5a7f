"""Actions: the words in which every pipeline schedule is written.

An action is (kind, stage, microbatch) and prints as `2F0`: forward of stage 2, microbatch 0. A schedule is one list of
actions per rank; it can be printed, parsed, validated, simulated and drawn without a process group.

    F               forward
    B               full backward: gradients of the inputs and of the weights
    I, W            the same in two halves: gradients of the inputs, later gradients of the weights
    FB              forward that runs together with the backward B of another microbatch, which is the rank's next
                    action: while one waits for other ranks, the other computes. The two are printed as `(0F3;1B2)`
    SEND_F, RECV_F  SEND_F of stage s pairs with RECV_F of stage s + 1: the output of s travels
    SEND_B, RECV_B  SEND_B of stage s pairs with RECV_B of stage s - 1: the gradient of the input of s travels
    REDUCE          all weight gradients of the stage are complete: reduce them over data-parallel ranks (no microbatch)
    GATHER, FREE    the weights of the stage are brought together from data-parallel ranks before its next F, B or I,
                    and let go (no microbatch; ZeRO stage 3)
    OFFLOAD, RELOAD the activations of a microbatch start for host memory behind its F, and back before its B or I

Schedules (`schedules/`) write F, B, I, W and FB only; `lowering` derives the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from .placement import Placement


class Kind(StrEnum):
    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the name that the literature gives to this half of the backward pass)
    W = "W"
    FB = "FB"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    GATHER = "GATHER"
    FREE = "FREE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"


KINDS = tuple(Kind)  # the number of a kind is its place here
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB})
NEEDS_WEIGHTS = frozenset({Kind.F, Kind.B, Kind.I, Kind.FB})
TRANSFER = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
MOVES = frozenset({Kind.OFFLOAD, Kind.RELOAD})
OF_STAGE = frozenset({Kind.REDUCE, Kind.GATHER, Kind.FREE})  # of no microbatch

# which action before
_NEEDS = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I, Kind.OFFLOAD: Kind.F, Kind.RELOAD: Kind.OFFLOAD}
_ALTERNATIVES = {Kind.B: Kind.I, Kind.I: Kind.B}  # ways to compute the gradient of the input
_FORWARD_ONLY = frozenset({Kind.F})
_TRAINING = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE, Kind.OFFLOAD, Kind.RELOAD})
_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|GATHER|FREE|OFFLOAD|RELOAD|FB|F|B|I|W)(\d*)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)")


class Action(NamedTuple):
    """One step of one rank. `microbatch` is -1 for what belongs to a stage alone."""

    kind: Kind
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}" + (str(self.microbatch) if self.microbatch >= 0 else "")

    def __repr__(self) -> str:
        return str(self)

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or (match[2] in OF_STAGE) != (match[3] == ""):
            raise ValueError(f"{text!r} is no action; actions look like 2F0, 0SEND_F3 or 1REDUCE")
        return Action(Kind(match[2]), int(match[1]), int(match[3] or -1))


class ActionList(Sequence[Action]):
    """Actions of one rank as three arrays of the same length: millions of them fit where as many objects would not.

    kinds        int8, places in `KINDS`
    stages, microbatches   int32
    """

    __slots__ = ("kinds", "microbatches", "stages")

    def __init__(self, kinds: NDArray[np.int8], stages: NDArray[np.int32], microbatches: NDArray[np.int32]) -> None:
        self.kinds, self.stages, self.microbatches = kinds, stages, microbatches

    @classmethod
    def of(cls, actions: Sequence[Action]) -> ActionList:
        if isinstance(actions, ActionList):
            return actions
        kinds, stages, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
        numbers = np.array([KINDS.index(kind) for kind in kinds], dtype=np.int8)
        return cls(numbers, np.array(stages, dtype=np.int32), np.array(microbatches, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> ActionList: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> Action | ActionList:
        kinds, stages, microbatches = self.kinds[index], self.stages[index], self.microbatches[index]
        if isinstance(index, slice | np.ndarray):
            return ActionList(kinds, stages, microbatches)
        return Action(KINDS[kinds], int(stages), int(microbatches))

    def __iter__(self) -> Iterator[Action]:
        for kind, stage, microbatch in zip(
            self.kinds.tolist(), self.stages.tolist(), self.microbatches.tolist(), strict=True
        ):
            yield Action(KINDS[kind], stage, microbatch)

    def __repr__(self) -> str:
        return f"[{format_list(self)}]"


def parse_list(text: str) -> list[Action]:
    """The actions of one rank from text separated by blanks or commas."""
    found = []
    for word in text.replace(",", " ").split():
        pair = _PAIR.fullmatch(word)
        found += (
            [Action.parse(pair[1].replace("F", "FB")), Action.parse(pair[2])]
            if pair is not None
            else [Action.parse(word)]
        )
    return found


def format_list(actions: Sequence[Action]) -> str:
    """One rank's actions on one line; `parse_list` reads it back."""
    return " ".join(_cells(actions)).replace("; ", ";")


def _cells(actions: Sequence[Action]) -> list[str]:
    """Text of each action; the two of a pair have a bracket each."""
    found: list[str] = []
    joined = False
    for action in actions:
        text = f"{action})" if joined else str(action)
        joined = action.kind is Kind.FB
        found.append(f"({text.replace('FB', 'F')};" if joined else text)
    return found


def separate(actions: Sequence[Action]) -> ActionList:
    """The same actions one after the other: every FB is an F."""
    compact = ActionList.of(actions)
    kinds = np.where(compact.kinds == KINDS.index(Kind.FB), np.int8(KINDS.index(Kind.F)), compact.kinds)
    return ActionList(kinds, compact.stages, compact.microbatches)


def table(actions: Sequence[Sequence[Action]], failing: tuple[int, int] | None = None, context: int = 8) -> str:
    """All ranks side by side, one line per step.

    failing  (rank, step) of the action that raised: its cell is marked, and only `context` steps and ranks around it
             are shown. The other ranks' lists are not looked at, so that they need not exist yet
    """
    ranks = range(len(actions))
    if failing is not None:
        ranks = ranks[max(0, failing[0] - context) : failing[0] + context + 1]
    lists = {rank: _cells(actions[rank]) for rank in ranks}
    steps = max(map(len, lists.values()), default=0)
    first, last = 0, steps
    if failing is not None:
        first, last = max(0, failing[1] - context), min(steps, failing[1] + context + 1)
    mark = " <-- ERROR HERE"
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    for step in range(first, last):
        row = [str(step)]
        for rank, rank_actions in lists.items():
            cell = rank_actions[step] if step < len(rank_actions) else ""
            row.append(cell + mark if failing == (rank, step) else cell)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(ranks) < len(actions):
        lines.insert(0, f"ranks {ranks[0]} to {ranks[-1]} of {len(actions)}")
    if first > 0:
        lines.insert(len(lines) - len(rows) + 1, f"... {first} earlier steps")
    if last < steps:
        lines.append(f"... {steps - last} later steps")
    return "\n".join(lines)


def validate(
    actions: Sequence[Sequence[Action]], placement: Placement, num_microbatches: int, forward_only: bool = False
) -> None:
    """Check what holds for every correct schedule; raise ValueError with the table and the failing cell marked.

    Every stage runs every microbatch exactly once, on the rank that holds it: F, then B or I and later W (nothing but F
    when `forward_only`). FB is an F with a B of another microbatch or stage right behind it. REDUCE, where present,
    comes once per stage and after its last weight gradient. Where a rank gathers, F, B and I stand between a GATHER and
    the FREE of their stage. What an OFFLOAD takes away between F and B or I, a RELOAD brings back before B or I. That
    the stages can run in their order without waiting for one another for ever is what `simulate` and `lower` check.
    """
    if len(actions) != placement.num_ranks:
        raise ValueError(f"the schedule has lists for {len(actions)} ranks, the placement has {placement.num_ranks}")
    for rank, rank_actions in enumerate(actions):
        checked = _RankCheck(rank, placement.stages_of(rank), num_microbatches, forward_only)
        checked.gathers = any(action.kind is Kind.GATHER for action in rank_actions)
        try:
            for step, action in enumerate(rank_actions):
                checked.step = step
                checked.follow(action)
            checked.end()
        except _BadStep as wrong:
            where = f"(rank {rank}, step {checked.step})\n{table(actions, (rank, checked.step))}"
            raise ValueError(f"bad schedule: {wrong} {where}") from None
        except _BadTotal as wrong:
            raise ValueError(f"bad schedule: {wrong}\n{table(actions)}") from None


class _BadStep(Exception):
    """Says what is wrong with an action."""


class _BadTotal(Exception):
    """Says what is wrong with all of them together."""


class _RankCheck:
    """Follows the actions of one rank; raises where one does not belong there."""

    def __init__(self, rank: int, stages: Sequence[int], num_microbatches: int, forward_only: bool) -> None:
        self.step = 0
        self.gathers = False
        self._rank = rank
        self._stages = stages
        self._num_microbatches = num_microbatches
        self._forward_only = forward_only
        self._allowed = _FORWARD_ONLY if forward_only else _TRAINING
        self._seen: set[Action] = set()
        self._weights_done = dict.fromkeys(stages, 0)
        self._gathered: set[int] = set()
        self._joined: Action | None = None

    def follow(self, action: Action) -> None:
        action = self._parted(action)
        kind, stage, _ = action
        if kind in TRANSFER and not (self._forward_only and kind in (Kind.SEND_B, Kind.RECV_B)):
            return
        if kind in (Kind.GATHER, Kind.FREE):
            self._check_gathering(action)
            return
        if self.gathers and kind in NEEDS_WEIGHTS and stage not in self._gathered:
            raise _BadStep(f"{action} while the weights of stage {stage} are not gathered")
        self._check_place(action)
        if action in self._seen:
            raise _BadStep(f"{action} comes twice")
        self._seen.add(action)
        self._check_order(action)
        self._check_moves(action)
        if kind in (Kind.B, Kind.W):
            self._weights_done[stage] += 1

    def end(self) -> None:
        if self._joined is not None:
            raise _BadStep(f"{self._joined} is the last action, and runs together with a B")
        total = self._num_microbatches
        for stage, done in self._weights_done.items():
            forwards = sum(Action(Kind.F, stage, microbatch) in self._seen for microbatch in range(total))
            if forwards != total or done != (0 if self._forward_only else total):
                raise _BadTotal(
                    f"stage {stage} on rank {self._rank} runs {forwards} forwards and {done} weight gradients for "
                    f"{total} microbatches"
                )

    def _parted(self, action: Action) -> Action:
        """FB as the F that it is; behind it stands its B."""
        joined = self._joined
        if joined is not None and (action.kind is not Kind.B or action[1:] == joined[1:]):
            raise _BadStep(f"{action} behind {joined}, which runs together with a B of another microbatch or stage")
        self._joined = action._replace(kind=Kind.F) if action.kind is Kind.FB else None
        return action if self._joined is None else self._joined

    def _check_gathering(self, action: Action) -> None:
        is_gathered = action.stage in self._gathered
        if is_gathered is (action.kind is Kind.GATHER):
            raise _BadStep(f"{action} of a stage that is {'gathered already' if is_gathered else 'not gathered'}")
        self._gathered ^= {action.stage}

    def _check_place(self, action: Action) -> None:
        """Whether the action belongs into a schedule of this kind, to this rank, and to a microbatch that there is."""
        kind, stage, microbatch = action
        if kind not in self._allowed:
            raise _BadStep(f"{action} does not belong into a forward-only schedule")
        if stage not in self._weights_done:
            raise _BadStep(f"{action} runs on rank {self._rank}, which holds stages {self._stages}")
        if kind is Kind.REDUCE:
            if self._weights_done[stage] != self._num_microbatches:
                raise _BadStep(f"{action} before the last weight gradient of stage {stage}")
        elif not 0 <= microbatch < self._num_microbatches:
            raise _BadStep(f"{action} with only {self._num_microbatches} microbatches")

    def _check_order(self, action: Action) -> None:
        """What has to come before, and that the gradient of the input is computed once."""
        needed = _NEEDS.get(action.kind)
        if needed is not None and (before := action._replace(kind=needed)) not in self._seen:
            raise _BadStep(f"{action} before {before}")
        other = _ALTERNATIVES.get(action.kind)
        if other is not None and (twin := action._replace(kind=other)) in self._seen:
            raise _BadStep(f"{action} after {twin}: both compute the gradient of the input")

    def _check_moves(self, action: Action) -> None:
        """Activations are in the device's memory when the backward needs them."""
        moved, back = action._replace(kind=Kind.OFFLOAD), action._replace(kind=Kind.RELOAD)
        if action.kind in _ALTERNATIVES and moved in self._seen and back not in self._seen:
            raise _BadStep(f"{action} without {back}: {moved} has taken its activations away")
        if action.kind in MOVES and {action._replace(kind=kind) for kind in _ALTERNATIVES} & self._seen:
            raise _BadStep(f"{action} after the backward that needs the activations")
