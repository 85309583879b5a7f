"""From compute-only schedules to what the runtime executes: SEND, RECV and REDUCE are derived, never written by hand.

[Note: why lowered schedules cannot deadlock]
Simulate all ranks. Every transfer has a time: the end of the action that produced the data. Sort all transfers by this
time, and place their SEND and RECV so that on every rank the transfers stand in this one global order.

  * Blocking transfers (`overlap=False`): RECV stands after the actions that start before the time of the transfer and before
    all others. Compute actions (by start) and transfers (by time) then form one global order, of which every rank's list is
    a part. So even if SEND blocks until the receiver has arrived at RECV, as rendezvous protocols do, the first entry of
    the global order that has not run can always run.
  * Asynchronous transfers (`overlap=True`): RECV moves before the action that the receiver is busy with at the time of the
    transfer, so that the data arrives while it computes; it is waited for only by the action that needs it. The
    order of transfers is unchanged, so it stays safe where all transfers of a rank share one queue, as on an NCCL communicator.

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
