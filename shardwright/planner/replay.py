"""The peak of memory on every pipeline rank of a layout: one training step of each rank, run in this process by the
code that runs on the cluster, on tensors without memory (`fakes`), and counted as they come and go (`live_bytes`).

    peaks = replay(Job(make_plugin, make_model, make_optimizer, batch), world_size)

Exact but for what a device's kernels keep beside tensors, what its allocator keeps beside memory in use, and what
depends on data (experts are taken to be chosen alike). One rank stands for all with its place in the pipeline.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..booster import Booster
from ..cluster.launch import launch
from ..comm.payload import Header
from ..models.example_inputs import loss_of
from ..pipeline.planning.placement import Placement
from ..pipeline.runtime import PipelineError
from ..plugins import HybridParallelPlugin
from ..utils.device import chosen_as_for
from .curves import Curve, by_holder, curve_of
from .fakes import Fakes
from .holders import KEPT, Holders
from .live_bytes import LiveBytes
from .segments import OPTIMIZER, Segments

_T = TypeVar("_T")
LOOKED_AT = 4096  # bytes of a new tensor behind which the peak may lie


def counts_host() -> bool:
    """Whether what leaves for host memory stays in that of the device: on a CPU, which has one memory."""
    return chosen_as_for("cpu") == "cpu"


@dataclass(frozen=True)
class Job:
    """What is trained, made anew for every rank.

    plugin     makes it, with other arguments than the user's where these are given
    model      makes it without weights, in a `LazyInitContext`
    optimizer  makes it for that model
    batch      of one data-parallel rank
    """

    plugin: Callable[..., HybridParallelPlugin]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: Mapping[str, Any]


class Peak(NamedTuple):
    """Of one rank.

    rank    in the pipeline
    kept    bytes between steps
    most    bytes at the peak of a step
    during  what the rank did then: an action of the schedule, or a part of the step
    held    what held how much at the peak, most first
    """

    rank: int
    kept: int
    most: int
    during: str
    held: tuple[tuple[str, int], ...]


def silent(what: str) -> None:
    """Where nobody wants to know what long work is at."""


def replay(
    job: Job, world_size: int, curves: list[Curve] | None = None, say: Callable[[str], None] = silent
) -> list[Peak]:
    """By pipeline rank; `curves` are added to, and `say` is told what comes next. This process must be in no process
    group.
    """
    book = Book()
    with joined(0, world_size):
        members = job.plugin().mesh.ranks("pp")

    def replayed(place: int) -> tuple[Peak, Placement]:
        say(f"pipeline rank {place} of {len(members)}, whole")
        with joined(members[place], world_size):
            return _replay_rank(job, job.plugin(), book, curves)

    found = book.in_turn(range(len(members)), replayed)
    _, placement = found[0]
    for place in {placement.rank_of(stage) for stage in book.mistaken()}:
        found[place] = replayed(place)
    if curves is not None:
        curves[:] = {curve.rank: curve for curve in curves}.values()  # of each the last
    return [found[place][0] for place in range(len(members))]


@contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is that rank of a job."""
    launch(rank, world_size, None, None, backend="fake")
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


class Book(dict[Hashable, Header]):
    """Headers of messages between stages. One that is not known yet, because it comes from a rank that is replayed
    later, is taken to be like the one into another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.guessed: dict[Hashable, Header] = {}
        self.replayed = set[int]()  # ranks whose messages are known

    def __missing__(self, key: Any) -> Header:
        known: Any
        for known, header in reversed(self.items()):
            if known.kind[1:] == key.kind[1:] and known.sizes == key.sizes:
                self.guessed[key] = header
                return header
        raise KeyError(key)

    def in_turn(
        self, places: Iterable[int], replayed: Callable[[int], _T], others: Iterable[int] = ()
    ) -> dict[int, _T]:
        """Replays of pipeline ranks, by place. One that fails on what a guess says (into a decoder's stages come more
        tensors than into an encoder's) is tried again when the ranks behind it have told what they send, of `places`,
        or `others` where those do not suffice.
        """
        found: dict[int, _T] = {}
        left, further = list(places), list(others)
        while left:
            failed: list[int] = []
            for place in left:
                before = dict(self.guessed)
                try:
                    found[place] = replayed(place)
                except PipelineError as error:
                    is_stuck = place == left[-1] and len(failed) == len(left) - 1 and not further
                    if self.guessed == before or is_stuck:
                        if error.__cause__ is None:
                            raise
                        raise _without_data(error.__cause__) from error
                    self.guessed = before
                    failed.append(place)
            if len(failed) == len(left):
                failed, further = [*failed, *further], []
            left = failed
        return found

    def mistaken(self) -> list[int]:
        """Stages for which the guess was wrong, as those before them have sent since."""
        guessed: dict[Any, Header] = dict(self.guessed)
        wrong = {key.kind[0] for key, header in guessed.items() if self.get(key, header) != header}
        self.guessed.clear()
        return sorted(wrong)


def _replay_rank(
    job: Job, plugin: HybridParallelPlugin, book: Book, curves: list[Curve] | None
) -> tuple[Peak, Placement]:
    watch, booster = Segments(), Booster(plugin=plugin)
    holders = Holders(lambda: watch.action)
    with Fakes(), LiveBytes(LOOKED_AT, label=holders.label, moment=holders.doing, host=counts_host()) as live:
        bare = job.model()
        model: Any
        optimizer: Any
        model, optimizer, *_ = booster.boost(bare, job.optimizer(bare))
        del bare
        runtime = model.executor.runtime
        if runtime is not None:
            runtime.recorder, runtime.comm.book = watch, book
        _step(booster, model, optimizer, job.batch, holders)
        gc.collect()
        live.most = kept = live.bytes()
        live.relabel(KEPT)
        live.by_label, live.during = Counter({KEPT: kept}), "between steps"
        _step(booster, model, optimizer, job.batch, holders)
        rank = plugin.mesh.coordinate("pp")
        if curves is not None:  # once more: what is noted for a curve is not what is noted for a peak
            gc.collect()
            live.bytes()
            live.relabel(KEPT)
            watch.live = live
            if runtime is None:
                watch.follow(model.executor)
            with watch.step():
                _step(booster, model, optimizer, job.batch, holders, lambda: watch.begin(OPTIMIZER))
            curves.append(curve_of(rank, kept, watch))
    peak = Peak(rank, kept, live.most, live.during, by_holder(list(live.by_label), list(live.by_label.values())))
    return peak, model.executor.cut.placement


def forward_and_backward(booster: Booster, model: Any, optimizer: Any, batch: Mapping[str, Any]) -> None:
    """Of a training step on fakes; ValueError where a model cannot do without the numbers."""
    try:
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: loss_of(outputs), optimizer)
    except (ValueError, PipelineError):
        raise
    except Exception as error:
        raise _without_data(error) from error


def _without_data(error: BaseException) -> ValueError:
    if isinstance(error, ValueError):
        return error
    said = str(error).strip().splitlines() or [""]
    return ValueError(
        f"a step of this model cannot be replayed without data: on numbers that are made up it raises "
        f"{type(error).__name__}: {said[0]}. Leave out --peak, --html or --search, which replay it; the layout and its "
        "traffic are told without"
    )


def _step(
    booster: Booster,
    model: Any,
    optimizer: Any,
    batch: Mapping[str, Any],
    holders: Holders,
    at_optimizer: Callable[[], None] | None = None,
) -> None:
    with holders.part("forward and backward"):
        forward_and_backward(booster, model, optimizer, batch)
    if at_optimizer is not None:
        at_optimizer()
    with holders.part("optimizer step"):
        optimizer.step()
    optimizer.zero_grad()
