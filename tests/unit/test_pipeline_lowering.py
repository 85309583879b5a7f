"""Lowering: what is sent, in which order, and that no order of execution can deadlock."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque

import pytest

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import COMPUTE, NEEDS_WEIGHTS, TRANSFER, Action, Kind, validate
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.placement import Placement
from shardwright.pipeline.planning.simulate import Costs
from shardwright.pipeline.schedules import Schedule

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 5, 8, 13)]
PAIRS = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


def message_of(action: Action) -> Action:
    """The SEND that a transfer belongs to: itself, or the partner of a RECV."""
    kind, shift = PAIRS.get(action.kind, (action.kind, 0))
    return Action(kind, action.stage + shift, action.microbatch)


def needed_by(action: Action, rank: int, placement: Placement) -> list[Action]:
    """The SEND on another rank, if there is one, of what an action computes with."""
    forward, backward = (Kind.SEND_F, -1), (Kind.SEND_B, 1)
    needed = {Kind.F: forward, Kind.FB: forward, Kind.B: backward, Kind.I: backward}.get(action.kind)
    if needed is None:
        return []
    kind, source = needed[0], action.stage + needed[1]
    crosses = 0 <= source < placement.num_stages and placement.rank_of(source) != rank
    return [Action(kind, source, action.microbatch)] if crosses else []


def all_cases() -> list[tuple[str, Schedule, Schedule]]:
    result = []
    for style, v in CASES:
        for p, m in SIZES:
            for forward_only in (False, True):
                compute = schedules.get(style, p, m, v, forward_only)
                for overlap in (False, True):
                    name = f"{style} p={p} m={m} v={v} forward_only={forward_only} overlap={overlap}"
                    result.append((name, compute, lower(compute, overlap=overlap)))
    return result


def test_compute_order_is_kept_and_every_boundary_is_crossed_once() -> None:
    for name, compute, lowered in all_cases():
        placement = compute.placement
        forward_only = "forward_only=True" in name
        m = 1 + max(action.microbatch for action in compute.actions[0])
        validate(lowered.actions, placement, m, forward_only)
        sends, receives = [], []
        for rank, actions in enumerate(lowered.actions):
            assert [a for a in actions if a.kind in COMPUTE] == list(compute.actions[rank]), name
            pairs = [(action, behind) for action, behind in itertools.pairwise(actions) if action.kind is Kind.FB]
            assert all(behind.kind is Kind.B for _, behind in pairs), f"{name}: something stands inside of a pair"
            sends += [a for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)]
            receives += [message_of(a) for a in actions if a.kind in PAIRS]
            reduces = [a.stage for a in actions if a.kind is Kind.REDUCE]
            assert sorted(reduces) == ([] if forward_only else sorted(placement.stages_of(rank))), name
        crossed = [s for s in range(placement.num_stages - 1) if placement.rank_of(s) != placement.rank_of(s + 1)]
        expected = [Action(Kind.SEND_F, s, i) for s in crossed for i in range(m)]
        if not forward_only:
            expected += [Action(Kind.SEND_B, s + 1, i) for s in crossed for i in range(m)]
        assert sorted(sends) == sorted(receives) == sorted(expected), name


def test_blocking_transfers_in_one_queue_never_deadlock() -> None:
    """The strictest machine there is: a SEND blocks until the receiver stands at the RECV."""
    for name, _, lowered in all_cases():
        position = [0] * len(lowered.actions)
        moved = True
        while moved:
            moved = False
            standing: dict[Action, list[int]] = defaultdict(list)
            for rank, actions in enumerate(lowered.actions):
                while position[rank] < len(actions) and actions[position[rank]].kind not in TRANSFER:
                    position[rank] += 1
                    moved = True
                if position[rank] < len(actions):
                    standing[message_of(actions[position[rank]])].append(rank)
            for ranks in standing.values():
                if len(ranks) == 2:
                    for rank in ranks:
                        position[rank] += 1
                    moved = True
        assert position == [len(actions) for actions in lowered.actions], name


def test_asynchronous_transfers_through_one_queue_per_rank_never_deadlock() -> None:
    """As on an NCCL communicator: a rank's transfers run strictly one after the other, in the order in which they were
    posted; computing waits for the data that it needs, and nothing else does."""
    for name, compute, lowered in all_cases():
        placement = compute.placement
        position = [0] * len(lowered.actions)
        queues: list[deque[Action]] = [deque() for _ in lowered.actions]
        arrived: set[Action] = set()
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(lowered.actions):
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    if action.kind in TRANSFER:
                        queues[rank].append(message_of(action))
                    else:
                        together = actions[position[rank] :][: 2 if action.kind is Kind.FB else 1]
                        if not all(
                            message in arrived for part in together for message in needed_by(part, rank, placement)
                        ):
                            break
                    position[rank] += 1
                    moved = True
            heads: dict[Action, list[int]] = defaultdict(list)
            for rank, queue in enumerate(queues):
                if queue:
                    heads[queue[0]].append(rank)
            for message, ranks in heads.items():
                if len(ranks) == 2:
                    for rank in ranks:
                        queues[rank].popleft()
                    arrived.add(message)
                    moved = True
        assert position == [len(actions) for actions in lowered.actions], name
        assert not any(queues), name


def test_receive_buffers_in_use_do_not_grow_with_microbatches() -> None:
    for style, v in CASES:
        for p in (2, 4):
            peaks = []
            for m in (4 * p, 16 * p):
                peak = 0
                for actions in lower(schedules.get(style, p, m, v)).actions:
                    posted = 0
                    for kind, stage, _ in actions:
                        posted += kind in PAIRS
                        peak = max(peak, posted)
                        if (kind in (Kind.F, Kind.FB) and stage > 0) or (
                            kind in (Kind.B, Kind.I) and stage < p * v - 1
                        ):
                            posted -= 1
                peaks.append(peak)
            # GPipe's and the warm-up's early arrivals: data that a stage cannot use yet stays with the sender
            assert peaks[0] == peaks[1] <= 2 * p * v, (style, p, peaks)


def test_overlap_posts_receives_while_computing() -> None:
    """Interleaved: the next input is posted before the action that runs while it travels, not right before its use."""

    def early(schedule: Schedule) -> int:
        count = 0
        for actions in schedule.actions:
            for index, action in enumerate(actions):
                if action.kind in PAIRS:
                    following = next(a for a in actions[index:] if a.kind in COMPUTE)
                    used_at_once = following[1:] == action[1:] and (following.kind is Kind.F) == (
                        action.kind is Kind.RECV_F
                    )
                    count += not used_at_once
        return count

    schedule = schedules.get("interleaved", 4, 16, 2)
    assert early(lower(schedule, overlap=True)) > early(lower(schedule, overlap=False))


def test_costs_must_be_positive() -> None:
    with pytest.raises(ValueError, match="above 0"):
        lower(schedules.get("1f1b", 2, 2), costs=Costs(forward=0))


@pytest.mark.parametrize(
    ("style", "chunks"), [("1f1b", 1), ("interleaved", 4), ("zb", 1), ("zbv", 2), ("gpipe", 1), ("dualpipev", 2)]
)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_weights_are_gathered_for_what_comes_next(style: str, chunks: int, most: int) -> None:
    """Never more stages than allowed, always the one that runs, the next ones as early as they may be; freed ones
    are needed later.
    """
    plain = lower(schedules.get(style, 2, 8, chunks))
    lowered = lower(schedules.get(style, 2, 8, chunks), gathered=most)
    validate(lowered.actions, lowered.placement, 8)
    for actions, without in zip(lowered.actions, plain.actions, strict=True):
        assert [action for action in actions if action.kind not in (Kind.GATHER, Kind.FREE)] == without
        held: list[int] = []
        in_pair = False
        for place, action in enumerate(actions):
            if action.kind is Kind.GATHER:
                held.append(action.stage)
                assert len(held) <= max(most, 2 if style == "dualpipev" else 1)
            elif action.kind is Kind.FREE:
                held.remove(action.stage)
            elif action.kind in NEEDS_WEIGHTS:
                coming = dict.fromkeys(later.stage for later in actions[place:] if later.kind in NEEDS_WEIGHTS)
                in_pair = in_pair or action.kind is Kind.FB
                assert set(held) == set(list(coming)[: max(most, 1 + in_pair)])
                in_pair = action.kind is Kind.FB
        assert not held
        if most >= chunks:
            assert sum(action.kind is Kind.GATHER for action in actions) == chunks, "once per step"
