"""Whether the calls of all ranks fit together, on any backend and however slow each rank is.

    with CallRecorder() as recorder:          on every rank
        ... train ...
    check_order([recorder.launches for every rank])       CallOrderError

What is checked is what NCCL asks of a program:

    one list per group       all of its ranks make the same collectives in the same order, with equal sizes and dtypes
    messages in pairs        what one rank of a group sends another is what that one receives there, in the same order:
                             there are no tags
    one order on all ranks   for communicators that share a device. Every call is taken to block, until all of its
                             ranks have come to it, and those of one `batch_isend_irecv` to block together; then the
                             ranks must come to the end. Two that both send first do not, nor do two that make the
                             collectives of two groups in different orders
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from .calls import Call, CallWatch, replaced

Launch = list[Call]  # what starts together
_Key = tuple[Any, ...]
_ROOTED = {"gather": 0, "scatter": 1}  # the sizes that all ranks have alike


class CallOrderError(AssertionError):
    """Calls of ranks that do not fit together."""


class Mark(NamedTuple):
    """Something else that happened, such as a part of the computation."""

    what: str


class Waited(NamedTuple):
    """The program waits for a call."""

    call: Call


class CallRecorder(CallWatch):
    """Records the calls of this rank.

    launches  all calls, those of a batch together
    events    calls, waits and marks, in their order
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.events: list[Call | Waited | Mark] = []
        self._in_batch = False

    def mark(self, what: str) -> None:
        self.events.append(Mark(what))

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> Any:
        if self._in_batch:
            self.launches[-1].append(call)
        else:
            self.launches.append([call])
        self.events.append(call)
        return call

    def waited(self, token: Any) -> None:
        self.events.append(Waited(token))

    def __enter__(self) -> Self:
        super().__enter__()
        self._inside.enter_context(replaced(dist, "batch_isend_irecv", self._batched))
        return self

    def _batched(self, post: Callable[..., Any]) -> Callable[..., Any]:
        def posted(operations: list[Any]) -> Any:
            self.launches.append([])
            self._in_batch = True
            try:
                return post(operations)
            finally:
                self._in_batch = False

        return posted


def check_order(recordings: Sequence[Sequence[Launch]]) -> None:
    """CallOrderError unless the `launches` of all ranks, by global rank, fit together."""
    _check_groups(recordings)
    _check_messages(recordings)
    _check_ends(recordings)


def _check_groups(recordings: Sequence[Sequence[Launch]]) -> None:
    lists: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, launches in enumerate(recordings):
        for call in (call for launch in launches for call in launch):
            if not call.is_message:
                lists[call.group][rank].append(call)
    for members in lists.values():
        ranks = next(iter(members.values()))[0].ranks
        first, others = ranks[0], ranks[1:]
        for other in others:
            mine, theirs = members.get(first, []), members.get(other, [])
            for number, (one, two) in enumerate(zip(mine, theirs, strict=False)):
                if _alike(one) != _alike(two):
                    raise CallOrderError(
                        f"collective {number} of a group is not the same on its ranks\n  rank {first}: {one}\n"
                        f"  rank {other}: {two}"
                    )
            if len(mine) != len(theirs):
                longer, rank = (mine, other) if len(mine) > len(theirs) else (theirs, first)
                raise CallOrderError(f"rank {rank} does not make {longer[min(len(mine), len(theirs))]}")


def _alike(call: Call) -> Any:
    """What is equal on all ranks of a collective."""
    sizes: Any = call.sizes
    if "output_split_sizes" in call.details or "input_split_sizes" in call.details:
        sizes = None
    elif call.kind in _ROOTED:
        sizes = call.sizes[_ROOTED[call.kind]]
    details = tuple(each for each in call.details if not str(each).endswith("_split_sizes"))
    return call.kind, call.ranks, sizes, call.dtypes, details


def _check_messages(recordings: Sequence[Sequence[Launch]]) -> None:
    sides: dict[_Key, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for rank, launches in enumerate(recordings):
        for call in (call for launch in launches for call in launch):
            if call.is_message:
                sides[_edge(call, rank)][call.kind == "recv"].append(call)
    for (_, source, destination), (sent, received) in sides.items():
        for number, (one, two) in enumerate(zip(sent, received, strict=False)):
            if (one.sizes[0], one.dtypes) != (two.sizes[1], two.dtypes):
                raise CallOrderError(
                    f"message {number} is not what is received\n  rank {source}: {one}\n  rank {destination}: {two}"
                )
        if len(sent) != len(received):
            longer = max(sent, received, key=len)
            raise CallOrderError(f"no rank answers {longer[min(len(sent), len(received))]}")


def _edge(call: Call, rank: int) -> _Key:
    """Group, source and destination."""
    assert call.peer is not None
    other = call.ranks[call.peer]
    return (call.group, rank, other) if call.kind == "send" else (call.group, other, rank)


def _check_ends(recordings: Sequence[Sequence[Launch]]) -> None:
    keys = [_named(launches, rank) for rank, launches in enumerate(recordings)]
    place: dict[tuple[int, _Key], int] = {}
    members: dict[_Key, list[int]] = defaultdict(list)
    for rank, launches in enumerate(keys):
        for number, launch in enumerate(launches):
            for key in launch:
                place[rank, key] = number
                members[key].append(rank)
    at = [0] * len(recordings)
    waiting = set(range(len(recordings)))
    while waiting:
        moved = set()
        for rank in waiting:
            while at[rank] < len(keys[rank]) and all(
                at[other] >= place[other, key] for key in keys[rank][at[rank]] for other in members[key]
            ):
                at[rank] += 1
                moved.add(rank)
        if not moved:
            break
        waiting = {rank for rank in waiting if at[rank] < len(keys[rank])}
    stuck = [rank for rank in range(len(recordings)) if at[rank] < len(keys[rank])]
    if stuck:
        raise CallOrderError(
            "the ranks make their calls in orders that wait for one another:\n"
            + "\n".join(f"  rank {rank} is at {' and '.join(map(str, recordings[rank][at[rank]]))}" for rank in stuck)
        )


def _named(launches: Sequence[Launch], rank: int) -> list[list[_Key]]:
    """Every call by a name that all of its ranks give it."""
    counts: Counter[_Key] = Counter()
    found = []
    for launch in launches:
        names = []
        for call in launch:
            key = _edge(call, rank) if call.is_message else (call.group,)
            names.append((*key, counts[key]))
            counts[key] += 1
        found.append(names)
    return found
