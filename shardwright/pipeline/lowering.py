"""From compute-only schedules to what the runtime executes: SEND, RECV and REDUCE are derived, never written by hand.

[Note: why lowered schedules cannot deadlock]
Simulate all ranks. Every transfer has a time: the end of the action that produced the data. SEND stands right after this action, and RECV

    overlap=False  after the actions of the receiver that start before this time, so before its next one
    overlap=True   after the actions of the receiver that end by this time, so before the one it is then busy with: the data arrives
                   while it computes, and is waited for only by the action that needs it

In both cases there is one global order of which every rank's list is a part: transfers by their time, and compute actions by
their start (without overlap) or their end (with it). The action that produced the data comes before the transfer in this order, and the one
that needs it after. So whatever blocks, the first entry of the global order that has not run can always run: even where
SEND blocks until the receiver stands at RECV, as rendezvous protocols do, or where all transfers of a rank share one
queue, as on an NCCL communicator.

Results are the same either way: the order of the compute actions is.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter

from .actions import Action, Kind
from .schedules import Schedule
from .simulate import Costs, simulate


def lower(schedule: Schedule, overlap: bool = True, costs: Costs | None = None) -> Schedule:
    """Add SEND_F, RECV_F, SEND_B, RECV_B and REDUCE to the compute actions of all ranks.

    overlap  place receives so that they run while the rank computes, else blocking order (see the note above)
    costs    of the stages, when they are known to be unequal: receives are placed by them
    """
    placement, compute = schedule
    costs = Costs() if costs is None else costs
    if min(min(values) for values in costs.of_kind(placement.num_stages).values()) <= 0:
        raise ValueError("lowering orders transfers by time and needs costs above 0")
    spans = simulate(schedule, costs).spans
    starts = [[span.start for span in rank_spans] for rank_spans in spans]
    last = placement.num_stages - 1

    # (time, sending stage, send, receive, position after the producing action, sender, receiver)
    transfers: list[tuple[float, int, int, Action, Action, int, int]] = []
    for sender, rank_spans in enumerate(spans):
        for index, ((kind, stage, microbatch), _, end) in enumerate(rank_spans):
            if kind is Kind.W:
                continue
            target = stage + 1 if kind is Kind.F else stage - 1
            if not 0 <= target <= last:
                continue
            receiver = placement.rank_of(target)
            if receiver == sender:  # the turn of a V: handed over without a message
                continue
            send, receive = (Kind.SEND_F, Kind.RECV_F) if kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
            transfers.append(
                (end, stage, index + 1, Action(send, stage, microbatch), Action(receive, target, microbatch), sender, receiver)
            )
    transfers.sort(key=itemgetter(0, 1, 2))

    # gaps[rank][i]: what stands before compute action i, filled in the global order of transfers
    gaps: list[list[list[Action]]] = [[[] for _ in range(len(rank_spans) + 1)] for rank_spans in spans]
    for time, _, position, send_action, receive_action, sender, receiver in transfers:
        gaps[sender][position].append(send_action)
        before = bisect_left(starts[receiver], time)  # first action that starts at `time` or later
        if overlap and before > 0 and time < spans[receiver][before - 1].end:
            before -= 1
        gaps[receiver][before].append(receive_action)

    lowered: list[list[Action]] = []
    for rank, rank_actions in enumerate(compute):
        final = {action.stage: index for index, action in enumerate(rank_actions) if action.kind in (Kind.B, Kind.W)}
        reduce_at = {index + 1: stage for stage, index in final.items()}
        actions: list[Action] = []
        for index, gap in enumerate(gaps[rank]):
            actions += gap
            if index in reduce_at:
                actions.append(Action(Kind.REDUCE, reduce_at[index]))
            if index < len(rank_actions):
                actions.append(rank_actions[index])
        lowered.append(actions)
    return Schedule(placement, lowered)
