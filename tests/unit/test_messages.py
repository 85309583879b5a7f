"""Channels, rules for shapes, and what is posted on NCCL, without processes: a recorder stands for the process
groups.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.cluster import job as jobs
from shardwright.comm import p2p
from shardwright.comm.p2p import PipeComm
from shardwright.comm.payload import TensorMeta, take_apart
from shardwright.comm.shape_rules import find_rule, split_sizes
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import COMPUTE, TRANSFER, Action, Kind
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.placement import Placement
from shardwright.pipeline.planning.simulate import Costs, simulate

STYLES = [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb", 1), ("zbv", 2)]


# Channels ------------------------------------------------------------------------------------------------------------


def test_channels_lead_from_each_rank_to_its_neighbors() -> None:
    line = ((0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1))
    assert Placement(4).channels == Placement(4, 2, "v").channels == line  # at the turn of a V nothing is sent
    assert set(Placement(4, 2, "round_robin").channels) == {*line, (3, 0), (0, 3)}
    assert Placement(2, 3, "round_robin").channels == Placement(2).channels == ((0, 1), (1, 0))
    assert Placement(1, 2, "v").channels == ()


def test_ranks_can_connect_their_channels_in_this_order() -> None:
    """Each channel blocks until both of its ranks come; all come in the end, and ranks in the middle wait for one
    neighbor at most.
    """
    for placement in (Placement(7), Placement(8), Placement(7, 2, "round_robin"), Placement(8, 2, "v")):
        rounds = [0] * placement.num_ranks
        for source, destination in placement.channels:
            rounds[source] = rounds[destination] = 1 + max(rounds[source], rounds[destination])
        assert max(rounds) <= (6 if placement.style == "round_robin" and placement.num_ranks % 2 else 4)


def replay(lowered: schedules.Schedule, costs: Costs) -> float:
    """When the lists are through, on ranks whose host runs ahead of the device: a transfer starts when both ends have
    done what stands before it in their lists, and when those posted before it in its channel are through."""
    placement = lowered.placement
    cost, rank_of = costs.of_kind(placement.num_stages), placement.rank_of
    posted: dict[Action, dict[int, float]] = {}  # by the SEND, when each of its ends is ready
    queues: dict[tuple[int, int, int], list[Action]] = {}  # of a channel at one of its ends
    arrival: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = {}
    place, clock = [0] * placement.num_ranks, [0.0] * placement.num_ranks
    local: dict[Action, float] = {}

    def message(action: Action) -> Action:
        shift = {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(action.kind, 0)
        kind = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}.get(action.kind, action.kind)
        return Action(kind, action.stage + shift, action.microbatch)

    def needed(action: Action) -> Action | None:
        shift = {Kind.F: -1, Kind.B: 1, Kind.I: 1}.get(action.kind, 0)
        source = action.stage + shift
        if not shift or not 0 <= source < placement.num_stages:
            return None
        return Action(Kind.SEND_F if shift < 0 else Kind.SEND_B, source, action.microbatch)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lowered.actions):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                if action.kind in TRANSFER:
                    sent = message(action)
                    target = sent.stage + (1 if sent.kind is Kind.SEND_F else -1)
                    channel = rank_of(sent.stage), rank_of(target)
                    posted.setdefault(sent, {})[rank] = clock[rank]
                    queues.setdefault((*channel, rank), []).append(sent)
                elif action.kind in COMPUTE:
                    source = needed(action)
                    if source is not None:
                        known = local if rank_of(source.stage) == rank else arrival
                        if source not in known:
                            break
                        clock[rank] = max(clock[rank], known[source])
                    clock[rank] += cost[action.kind][action.stage]
                    local[Action(Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B, *action[1:])] = clock[rank]
                place[rank] += 1
                moved = True
        for (source_rank, target_rank, rank), queue in queues.items():
            other = queues.get((source_rank, target_rank, source_rank + target_rank - rank), [])
            while queue and other:
                assert queue[0] == other[0], "both ends post in the same order"
                sent = queue.pop(0)
                other.pop(0)
                begin = max(*posted[sent].values(), free.get((source_rank, target_rank), 0.0))
                arrival[sent] = free[source_rank, target_rank] = begin + costs.transfer
                moved = True
    assert place == [len(actions) for actions in lowered.actions]
    return max(clock)


def test_the_simulator_knows_the_channels() -> None:
    """What the lists of all ranks come to, posted as they are into channels that carry one message at a time."""
    rng = random.Random(5)
    for style, chunks in STYLES:
        for ranks, microbatches in ((2, 5), (4, 8), (5, 7)):
            stages = ranks * chunks
            forward, input_grad, weight_grad = ([rng.choice([1.0, 2.0, 1.3]) for _ in range(stages)] for _ in "FIW")
            for transfer in (0.1, 0.7, 2.5):
                costs = Costs(forward, input_grad, weight_grad, transfer)
                compute = schedules.get(style, ranks, microbatches, chunks)
                assert replay(lower(compute, costs=costs), costs) == pytest.approx(
                    simulate(compute, costs).makespan, rel=1e-12
                )


@pytest.mark.parametrize(("style", "chunks"), STYLES)
def test_lists_are_good_for_messages_whose_time_nobody_knew(style: str, chunks: int) -> None:
    """Receives stand where they do not hold up what comes behind them."""
    compute = schedules.get(style, 8, 32, chunks)
    for transfer in (0.02, 0.1, 0.2):
        costs = Costs(*[1 / chunks] * 3, transfer / chunks)
        assert (
            replay(lower(compute, costs=replace(costs, transfer=0.0)), costs)
            <= simulate(compute, costs).makespan * 1.001
        )


def test_messages_of_a_channel_travel_one_after_the_other() -> None:
    gpipe = schedules.get("gpipe", 2, 4)
    assert simulate(gpipe, Costs(transfer=3.0)).spans[1][3].start == 1 + 4 * 3  # the fourth of them
    p, m, transfer = 8, 32, 0.1
    plain, eager = (
        simulate(schedules.get(style, p, m), Costs(transfer=transfer)).makespan for style in ("1f1b", "eager_1f1b")
    )
    assert eager < plain - transfer * m


# Rules for shapes ----------------------------------------------------------------------------------------------------


def header_of(*shapes: tuple[int, ...]) -> Any:
    return take_apart(tuple(torch.empty(shape, device="meta") for shape in shapes))[0]


def test_shapes_follow_from_sizes() -> None:
    header = header_of((2, 8, 16), (16, 4), (1, 2, 8, 8))
    rule = find_rule(
        (2, 8), header, [((3, 7), ((3, 7, 16), (21, 4), (1, 2, 7, 7))), ((4, 5), ((4, 5, 16), (20, 4), (1, 2, 5, 5)))]
    )
    assert rule is not None
    found = rule.header((5, 11))
    assert found is not None
    assert [meta.shape for meta in found.tensors] == [(5, 11, 16), (55, 4), (1, 2, 11, 11)]
    assert found.structure == header.structure
    assert rule.header((2, 8)) == header


@pytest.mark.parametrize(
    "of",
    [lambda size: size + 1, lambda size: -(-size // 8) * 8, lambda size: min(size, 6), lambda size: size // 2],
    ids=["a token more", "padded", "cut off", "halved"],
)
def test_other_shapes_follow_from_nothing(of: Any) -> None:
    seen = [((3, 7), ((3, of(7)),)), ((4, 5), ((4, of(5)),)), ((5, 17), ((5, of(17)),))]
    assert find_rule((2, 8), header_of((2, of(8))), seen) is None


def test_nothing_is_known_where_rules_disagree_or_sizes_never_changed() -> None:
    rule = find_rule((2, 8, 8, 3), header_of((2, 8)), [((3, 7, 7, 3), ((3, 7),)), ((4, 5, 5, 3), ((4, 5),))])
    assert rule is not None
    assert rule.header((2, 9, 9, 3)) is not None
    assert rule.header((2, 9, 7, 3)) is None, "either of two sizes that have always been equal"
    assert rule.header((2, 9, 9, 4)) is None, "a size that was always 3"
    assert find_rule((2, 8), header_of((2, 8)), [((3, 7), ((3, 7, 1),))]) is None
    limited = find_rule((2, 8), header_of((2, 8)), [((3, 7), ((3, 7),)), ((4, 5), ((4, 5),))], most=(4, 8))
    assert limited is not None
    assert limited.header((4, 6)) is not None
    assert limited.header((4, 9)) is None


def test_sizes_are_told_from_names() -> None:
    key = (("ids", (2, 8), "torch.int64"), ("mask", (2, 8), "torch.int64"), True)
    look, sizes = split_sizes(key)
    assert sizes == (2, 8, 2, 8)
    assert look == split_sizes((("ids", (3, 5), "torch.int64"), ("mask", (3, 5), "torch.int64"), True))[0]
    assert look != split_sizes((("ids", (2, 8), "torch.int64"), ("mask", (2, 8), "torch.int64"), False))[0]
    assert split_sizes((None, 2)) != split_sizes((2, None))


# NCCL ----------------------------------------------------------------------------------------------------------------


class Work:
    def __init__(self) -> None:
        self.through = False
        self.waited = False

    def is_completed(self) -> bool:
        return self.through

    def wait(self) -> None:
        self.waited = True


class Nccl:
    """Rank 1 of three ranks, on groups that note what is posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[tuple[str, Any, int, torch.Size]]] = []
        self.works: list[Work] = []
        monkeypatch.setattr(dist, "get_backend", lambda group: "cuda:nccl")
        monkeypatch.setattr(dist, "get_rank", lambda group: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
        monkeypatch.setattr(
            dist, "P2POp", lambda op, tensor, group, group_peer: (op.__name__, group, group_peer, tensor.shape)
        )
        monkeypatch.setattr(p2p, "has_streams", lambda device: True)
        monkeypatch.setattr(dist, "batch_isend_irecv", self._post)
        self.comm = PipeComm(
            Any, {channel: channel for channel in Placement(3).channels if 1 in channel}, torch.device("cpu")
        )  # type: ignore[arg-type, misc]

    def _post(self, operations: list[Any]) -> list[Work]:
        self.batches.append(operations)
        self.works.append(Work())
        return [self.works[-1]]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    return Nccl(monkeypatch)


def test_a_message_is_one_launch_in_the_channel_of_its_direction(nccl: Nccl) -> None:
    comm = nccl.comm
    comm.isend_tensors([torch.zeros(2), torch.zeros(0), torch.zeros(3, 4)], 2)
    comm.irecv_tensors([TensorMeta((2,), torch.float32, False), TensorMeta((5,), torch.float32, False)], 0)
    comm.irecv_tensors([TensorMeta((1,), torch.float32, False)], 2)
    comm.isend_tensors([torch.zeros(1)], 0)
    # A rank's place in a channel's group is that of the two by number.
    assert nccl.batches == [
        [("isend", (1, 2), 1, (2,)), ("isend", (1, 2), 1, (3, 4))],
        [("irecv", (0, 1), 0, (2,)), ("irecv", (0, 1), 0, (5,))],
        [("irecv", (2, 1), 1, (1,))],
        [("isend", (1, 0), 0, (1,))],
    ]
    comm.isend_tensors([torch.zeros(0)], 0)
    assert len(nccl.batches) == 4, "nothing is posted for nothing"
    nccl.batches.clear()
    comm.isend([torch.zeros(2), torch.zeros(3)], 2, "key")
    assert [len(batch) for batch in nccl.batches] == [1, 1, 2], (
        "a header is received in two parts, so it is sent in two"
    )
    comm.isend([torch.zeros(2), torch.zeros(3)], 2, "key")
    assert len(nccl.batches) == 4


def test_all_channels_are_used_before_the_first_step(nccl: Nccl) -> None:
    nccl.comm.warm_up()
    assert [batch[0][:3] for batch in nccl.batches] == [
        ("irecv", (0, 1), 0),
        ("isend", (1, 0), 0),
        ("isend", (1, 2), 1),
        ("irecv", (2, 1), 1),
    ]


def test_what_has_been_sent_is_let_go_of_when_something_is_posted_next(nccl: Nccl) -> None:
    comm, kept = nccl.comm, []

    def send(destination: int) -> Any:
        tensor = torch.zeros(4)
        kept.append(weakref.ref(tensor.untyped_storage()))
        return comm.isend_tensors([tensor], destination)

    messages = [send(2), send(2), send(0)]
    assert all(storage() is not None for storage in kept)
    nccl.works[0].through = nccl.works[2].through = True
    comm.irecv_tensors([TensorMeta((1,), torch.float32, False)], 0)
    assert [storage() is not None for storage in kept] == [False, True, False]
    assert nccl.works[0].waited, "that is what lets torch let go of its own references"
    nccl.works[1].through = True
    send(0)
    assert kept[1]() is None
    assert not any(message.pending for message in messages)


def test_a_failed_step_keeps_what_the_backend_may_write_to(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    closing: list[Any] = []
    monkeypatch.setattr(jobs, "when_closed", closing.append)
    comm = nccl.comm
    tensor = torch.zeros(4)
    sent = weakref.ref(tensor.untyped_storage())
    comm.isend_tensors([tensor], 2)
    receives = [comm.irecv_tensors([TensorMeta((4,), torch.float32, False)], 0) for _ in range(2)]
    receives[1].complete()
    buffers = [weakref.ref(receive._buffers[0].untyped_storage()) for receive in receives]
    comm.discard(receives)
    del tensor, receives
    assert sent() is not None
    assert [buffer() is not None for buffer in buffers] == [True, False], "the one that was waited for has been written"
    for close in closing:
        close()
    assert sent() is None
    assert buffers[0]() is None
