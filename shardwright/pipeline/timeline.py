"""What a pipeline step really did: spans of every action on every rank, and how they compare with the ideal.

runtime.recorder = Recorder(device)
... steps ...
timeline = runtime.recorder.gather(group, placement)     # collective; on every rank
timeline.write_trace("step.json")                        # opens in Perfetto (ui.perfetto.dev) or chrome://tracing
timeline_html.write_page(timeline, "step.html")
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from ..comm.collectives import all_gather, gather_sizes
from ..comm.p2p import PipeComm
from ..utils.labels import label
from .clocks import ahead_of_first
from .planning.actions import COMPUTE, Action, Kind
from .planning.placement import Placement
from .planning.simulate import Costs, simulate
from .schedules import Schedule

_NAMES = {
    Kind.F: "forward",
    Kind.FB: "forward, with the next",
    Kind.B: "backward",
    Kind.I: "gradients of inputs",
    Kind.W: "gradients of weights",
    Kind.SEND_F: "send activations",
    Kind.RECV_F: "post receive of activations",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "post receive of gradients",
    Kind.REDUCE: "reduce gradients",
    Kind.GATHER: "gather weights",
    Kind.FREE: "free weights",
    Kind.OFFLOAD: "offload activations",
    Kind.RELOAD: "reload activations",
}


def name_of(action: Action) -> str:
    """As traces show it: "stage 1, microbatch 2: forward"."""
    microbatch = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"stage {action.stage}{microbatch}: {_NAMES[action.kind]}"


class Labels:
    """In place of a `Recorder` where a profiler of torch records and nobody else."""

    def start_step(self) -> None:
        """Nothing is kept."""

    def span(self, action: Action) -> AbstractContextManager[Any]:
        return label(name_of(action))


class MeasuredSpan(NamedTuple):
    """Seconds since the start of the step. Between `start` and `ready` the action waited for its input.

    The two actions of a pair have the times of both together.
    """

    action: Action
    start: float
    ready: float
    end: float


class Recorder:
    """Takes the time of every action of the latest step of one rank.

    On a CPU it reads the clock; on CUDA it records events, which cost no synchronisation between the start of a step
    and `spans`, which reads them. Each action is also a range of torch's profiler (`name_of`).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any, Any]] = []
        self._origin: Any = None
        self._began = 0.0  # the host's clock at the origin
        self._ready: Any = None

    def start_step(self) -> None:
        """Forget the step before."""
        self._marks = []
        if self._cuda:  # so that the device's time and the host's are known to be one here
            torch.cuda.synchronize()
        self._began = time.perf_counter()
        self._origin = self._now()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self._now()
        self._ready = None
        with label(name_of(action)):
            yield
        times = start, start if self._ready is None else self._ready, self._now()
        if self._marks and self._marks[-1][0].kind is Kind.FB:  # which ran now
            self._marks[-1] = (self._marks[-1][0], *times)
        self._marks.append((action, *times))

    def inputs_arrived(self) -> None:
        """The current action (of a pair, the first of the two) has what it waited for, and starts to compute."""
        if self._ready is None:
            self._ready = self._now()

    def spans(self) -> list[MeasuredSpan]:
        """The actions of the latest step, in order."""
        if self._cuda:
            torch.cuda.synchronize()
        return [
            MeasuredSpan(action, *(self._seconds(mark) for mark in (start, ready, end)))
            for action, start, ready, end in self._marks
        ]

    def gather(self, comm: PipeComm, placement: Placement) -> Timeline:
        """The timeline of all ranks; all ranks of the pipeline must call it.

        Times are those of one clock (see `clocks`) and count from where the first rank started its step.
        """
        began = self._began - ahead_of_first(comm.group, comm.device)
        own = json.dumps([began, [(str(action), *times) for action, *times in self.spans()]])
        data = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8).to(comm.device)
        sizes = gather_sizes(len(data), comm.group, comm.device)
        # a collective: no two ranks connect for it
        texts = all_gather(data, comm.group, sizes=sizes).cpu().split(sizes)
        told = [json.loads(bytes(text.tolist())) for text in texts]
        first = min(began for began, _ in told)
        return Timeline(placement, [_read_spans(spans, began - first) for began, spans in told])

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1000 if self._cuda else mark - self._origin


@dataclass(frozen=True)
class Timeline:
    """One step on all ranks, by rank in the pipeline group."""

    placement: Placement
    ranks: Sequence[Sequence[MeasuredSpan]]

    @property
    def makespan(self) -> float:
        """Seconds from the first action to the end of the last compute action of any rank."""
        ends = [span.end for spans in self.ranks for span in spans if span.action.kind in COMPUTE]
        return max(ends) - min(spans[0].start for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Part of the ranks' time in which they did not compute."""
        work = sum(
            span.end - span.ready for spans in self.ranks for span in spans if span.action.kind in COMPUTE - {Kind.FB}
        )
        return 1 - work / (len(self.ranks) * self.makespan)

    def mean_costs(self) -> Costs:
        """Costs of the stages as measured, for the simulator. What B takes is counted half as I, half as W.

        Actions count where they run alone, as each does for some microbatch; what pairs take less is `hidden`.
        """
        seconds: dict[tuple[Kind, int], list[float]] = {}
        pairs: list[tuple[int, int, float]] = []
        for spans in self.ranks:
            joined = None
            for action, _, ready, end in spans:
                if joined is not None:
                    pairs.append((joined, action.stage, end - ready))
                elif action.kind in COMPUTE - {Kind.FB}:
                    seconds.setdefault((action.kind, action.stage), []).append(end - ready)
                joined = action.stage if action.kind is Kind.FB else None

        def cost(kind: Kind, stage: int) -> float:
            if kind is not Kind.F and (Kind.B, stage) in seconds:
                return fmean(seconds[Kind.B, stage]) / 2
            return fmean(seconds[kind, stage]) if (kind, stage) in seconds else 0.0

        forward, input_grad, weight_grad = (
            [cost(kind, stage) for stage in range(self.placement.num_stages)] for kind in (Kind.F, Kind.I, Kind.W)
        )
        apart = sum(forward[f] + input_grad[b] + weight_grad[b] for f, b, _ in pairs)
        hidden = max(0.0, 1 - sum(together for *_, together in pairs) / apart) if apart else 0.0
        return Costs(forward, input_grad, weight_grad, hidden=hidden)

    def ideal(self) -> Timeline:
        """The same schedule as the simulator runs it with the measured mean costs: no jitter, transfers free."""
        compute = [[span.action for span in spans if span.action.kind in COMPUTE] for spans in self.ranks]
        return Timeline.simulated(Schedule(self.placement, compute), self.mean_costs())

    @classmethod
    def simulated(cls, schedule: Schedule, costs: Costs) -> Timeline:
        """The timeline of a step that never ran, with costs in seconds."""
        spans = simulate(schedule, costs).spans
        return cls(
            schedule.placement, [[MeasuredSpan(a, start, start, end) for a, start, end in rank] for rank in spans]
        )

    def summary(self) -> str:
        """One line: measured against ideal."""
        ideal = self.ideal()
        return (
            f"step {1000 * self.makespan:.2f} ms, bubble {100 * self.bubble:.1f} %; "
            f"ideal with the same costs {1000 * ideal.makespan:.2f} ms, bubble {100 * ideal.bubble:.1f} %"
        )

    def to_plain(self) -> dict[str, Any]:
        """For JSON; `from_plain` makes it a timeline again."""
        ranks = [[(str(action), *times) for action, *times in spans] for spans in self.ranks]
        return {"placement": asdict(self.placement), "ranks": ranks}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Timeline:
        return cls(Placement(**plain["placement"]), [_read_spans(spans) for spans in plain["ranks"]])

    def trace_events(self) -> list[dict[str, Any]]:
        """Events of the Chrome trace format: one process per rank; waiting, transfers and the forwards of pairs on
        threads of their own.
        """
        events: list[dict[str, Any]] = []
        threads = {"compute": 0, "wait": 1, "transfer": 2, "beside": 3}
        for rank, spans in enumerate(self.ranks):
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
            for name, thread in threads.items():
                events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}})
            for action, start, ready, end in spans:
                computes = action.kind in COMPUTE
                arguments = {
                    "stage": action.stage,
                    "chunk": self.placement.chunk_of(action.stage),
                    "microbatch": action.microbatch,
                    "kind": action.kind.value,
                }
                place = "beside" if action.kind is Kind.FB else "compute" if computes else "transfer"
                parts = [(place, str(action), ready if computes else start, end)]
                if place == "compute" and ready > start:
                    parts.append(("wait", f"wait for {action}", start, ready))
                for thread_name, name, begin, finish in parts:
                    events.append(
                        {
                            "ph": "X",
                            "pid": rank,
                            "tid": threads[thread_name],
                            "name": name,
                            "cat": action.kind.value,
                            "ts": round(begin * 1e6, 3),
                            "dur": round((finish - begin) * 1e6, 3),
                            "args": arguments,
                        }
                    )
        return events

    def write_trace(self, path: str | Path) -> None:
        """Chrome trace JSON."""
        Path(path).write_text(json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"}))


def _read_spans(spans: Iterable[Sequence[Any]], later: float = 0.0) -> list[MeasuredSpan]:
    """Spans from (name, start, ready, end), `later` by so many seconds."""
    return [MeasuredSpan(Action.parse(name), *(time + later for time in times)) for name, *times in spans]
