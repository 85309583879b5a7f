"""Whether all ranks have come to a call that only all of them together can serve.

Scripts save on one rank: `if rank == 0: model.save_pretrained(path)`. Where the weights are split, that rank would wait
in the first collective for ranks that never come. So ranks sign in through the store first, where waiting can be
watched: after a few seconds the log says who is missing, a rank that signs in for something else ends the call on all
ranks at once, and so does the end of patience.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..cluster import job
from ..comm.compat import default_store
from ..logging import get_dist_logger

WORD_AFTER = 5.0  # seconds until the log says who is missing
_POLL = 0.002
# roll calls so far, by the world group of the time and the job's recoveries
_calls: dict[tuple[dist.ProcessGroup, int], int] = {}


def roll_call(what: str, patience: timedelta | None = None) -> None:
    """Return when every rank is in a roll call for `what`; ValueError on all of them if that does not come about.

    patience  the default is what the process group was given as timeout
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    now = world, job.generation()
    for old in [key for key in _calls if key != now]:
        del _calls[old]
    number = _calls[now] = _calls.get(now, 0) + 1
    store: Any = default_store()  # its stubs lack the timeout
    _RollCall(what, f"{now[1]}/{number}").hold((patience or store.timeout).total_seconds())


class _RollCall:
    def __init__(self, what: str, number: str) -> None:
        self.what = what
        self.store = dist.PrefixStore(f"shardwright/roll_call/{number}", default_store())
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def hold(self, patience: float) -> None:
        started = time.monotonic()
        self.store.set(f"rank/{self.rank}", self.what)
        if self.store.add("present", 1) == self.world_size:
            self._decide(self._verdict_of_all())
        said, poll = False, _POLL
        while not self.store.check(["verdict"]):
            job.stop_waiting()
            waited = time.monotonic() - started
            if waited > WORD_AFTER and not said:
                said = True
                get_dist_logger().warning(f"{self.what} waits for {_ranks(self._missing())}: all ranks must call it")
            if waited > patience:
                self._decide(
                    f"{self.what} was called, but not on {_ranks(self._missing())}, which were waited for during "
                    f"{patience:g} s: all ranks must call it, since each of them holds a part; do not put it under `if "
                    "rank == 0`"
                )
            time.sleep(poll)
            poll = min(2 * poll, 0.1)
        verdict = self.store.get("verdict").decode()
        if self.store.add("read", 1) == self.world_size:
            for key in ("verdict", "present", "read", *(f"rank/{rank}" for rank in range(self.world_size))):
                self.store.delete_key(key)
        if verdict != "go":
            raise ValueError(verdict)

    def _decide(self, verdict: str) -> None:
        """The first rank that says something decides."""
        self.store.compare_set("verdict", "", verdict)

    def _verdict_of_all(self) -> str:
        called = [self.store.get(f"rank/{rank}").decode() for rank in range(self.world_size)]
        if len(set(called)) == 1:
            return "go"
        return "ranks call different things that all of them must call together: " + ", ".join(
            f"rank {rank} {what}" for rank, what in enumerate(called)
        )

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.store.check([f"rank/{rank}"])]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
