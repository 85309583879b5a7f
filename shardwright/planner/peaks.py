"""The peak of memory on every pipeline rank, whatever the number of layers, ranks and microbatches: a shorter layout is
replayed (`shorter`), and what its actions do is put in the places that the real schedule has for them.

    found = peaks(Job(make_plugin, make_model, make_optimizer, batch), world_size)

Layouts that cannot be made shorter are replayed as they are (`replay`), and so are those whose layers turn out not to
do the same one after the other.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..booster import Booster
from ..models.config import has_experts
from ..pipeline.batch.microbatch import batch_size, microbatch_sizes
from ..pipeline.cut.plan import CutPlan
from ..pipeline.planning.actions import Action, Kind
from ..pipeline.planning.lowering import lower
from ..pipeline.planning.sliced_schedule import get_sliced
from ..plugins import HybridParallelPlugin
from ..plugins.hybrid.chunks import chunks_gathered
from .batches import first_rows
from .buckets import Buckets, come_again
from .curves import Curve, Stretch, by_holder
from .fakes import Fakes
from .holders import KEPT, Holders
from .live_bytes import LiveBytes
from .places import Place, like, places
from .repeats import Class, More, extend, is_steady
from .replay import LOOKED_AT, Book, Job, Peak, counts_host, forward_and_backward, joined, replay, silent
from .segments import BEFORE, OPTIMIZER, Amounts, Segment, Segments
from .shorter import SEEN, NotShorterError, Shorter, changes, kinds_of, microbatches_left, shorten, shorter

_MOST_SEEN = 32  # layers that are replayed where two are not enough
_LEFT = 1e-3  # share of a peak that a step may seem to leave behind
DRIFTS = "microbatches in the middle"


class Found(NamedTuple):
    """peaks    by pipeline rank
    replayed  why the layout was replayed as it is; empty where a shorter one stood for it
    rough     actions whose layers do not do the same one after the other, so that their peak is drawn on a line; and
              `DRIFTS`, where what stands for microbatches in the middle of a schedule adds up to something that a step
              leaves behind, which none does
    curves    of the ranks for which they were asked
    experts   whether the model has some
    """

    peaks: list[Peak]
    replayed: str = ""
    rough: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()
    experts: bool = False

    @property
    def note(self) -> str:
        said = []
        if self.replayed:
            said.append(f"every layer and microbatch was replayed: {self.replayed}")
        elif actions := [each for each in self.rough if each != DRIFTS]:
            said.append(
                f"not exact: layers do not do the same one after the other in {', '.join(actions)}, whose peak is "
                "taken to rise evenly with their number"
            )
        if DRIFTS in self.rough:
            said.append(
                "not exact: microbatches in the middle of the schedule differ from those of a shorter one, and seem to "
                "leave something behind"
            )
        if self.experts:
            said.append(
                "tokens are taken to choose all experts alike; where many choose the same ones, these and the ranks "
                "that hold them need more"
            )
        return "; ".join(said)


@dataclass(frozen=True)
class _Real:
    """The layout that is asked for.

    kinds    of its layers
    samples  of a microbatch
    count    microbatches
    batch    bytes of it
    """

    plugin: HybridParallelPlugin
    plan: CutPlan
    kinds: Sequence[Hashable]
    samples: int
    count: int
    batch: int

    def actions(self, rank: int) -> Sequence[Action]:
        return _actions(self.plugin, self.plan, self.count, rank)


# Of which ranks curves are wanted, chosen when the peaks of all are known.
Chosen = Callable[[Sequence[Peak]], Collection[int]]


def peaks(job: Job, world_size: int, curves_of: Chosen | None = None, say: Callable[[str], None] = silent) -> Found:
    """This process must be in no process group. `say` is told what comes next."""
    gc.collect()
    gc.freeze()  # what is there now need not be looked through behind every rank
    try:
        rough = dict[str, None]()
        every = _Peaks(job, world_size)
        found = every.found(rough, say)
        curves = [every.curve(rank) for rank in sorted(curves_of(found))] if curves_of is not None else []
        return Found(found, rough=tuple(rough), curves=tuple(curves), experts=every.experts)
    except NotShorterError as error:
        why = str(error)
    finally:
        gc.unfreeze()
    every_curve: list[Curve] | None = [] if curves_of is not None else None
    found = replay(job, world_size, every_curve, say)
    wanted = curves_of(found) if curves_of is not None else ()
    curves = [curve for curve in every_curve or () if curve.rank in wanted]
    return Found(found, why, curves=tuple(curves), experts=has_experts(job.model()))


class _Peaks:
    def __init__(self, job: Job, world_size: int) -> None:
        self._job = job
        self._world_size = world_size
        with joined(0, world_size):
            plugin, model = job.plugin(), job.model()
            self.experts = has_experts(model)
            _, (plan, _, _) = plugin.check(model, job.optimizer(model))
            self._real = _Real(plugin, plan, kinds_of(model, plan.units), *_microbatches(plugin, job.batch))
        self._books: dict[Shorter, Book] = {}
        self._replayed: dict[int, tuple[Sequence[_Rank], list[tuple[int, ...]]]] = {}  # by rank: see `_peak`

    def found(self, rough: dict[str, None], say: Callable[[str], None]) -> list[Peak]:
        """One of every class of ranks is replayed; those that lie between the first and the last are mostly alike."""
        by_class: dict[Hashable, list[_Rank]] = {}
        found = []
        for rank in range(self._real.plan.placement.num_ranks):
            seen = SEEN
            say(f"pipeline rank {rank} of {self._real.plan.placement.num_ranks}")
            replayed, further = self._of_rank(rank, seen, by_class)
            while seen < _MOST_SEEN and not all(replayed[0].is_steady(other) for other in replayed[1:]):
                seen *= 2
                replayed, further = self._of_rank(rank, seen, by_class)
            if not _buckets_come_again(replayed, further):
                say(f"pipeline rank {rank}, all layers, since several share a bucket of gradients")
                replayed, further = self._of_rank(rank, len(self._real.kinds), by_class)
            self._replayed[rank] = replayed, further
            found.append(_peak(self._real, rank, replayed, further, rough))
        return found

    def _of_rank(
        self, rank: int, seen: int, by_class: dict[Hashable, list[_Rank]]
    ) -> tuple[list[_Rank], list[tuple[int, ...]]]:
        """With so many layers of a kind: see `_peak`."""
        plan, kinds = self._real.plan, self._real.kinds
        count = plan.placement.num_ranks
        layout = shorter(plan, kinds, rank, seen=seen)
        place = layout.ranks.index(rank)
        stages = [layout.stages[stage] for stage in layout.placement.stages_of(place)]
        own = [
            (stage.whole, stage.selective, len(stage.further), [kinds[unit] for unit in stage.kept]) for stage in stages
        ]
        key = (seen, rank == 0, rank == count - 1, str(own)) if len(layout.ranks) < count else (seen, rank)
        if key not in by_class:
            groups = range(max(len(stage.further) for stage in stages))
            layouts = [layout, *(shorter(plan, kinds, rank, group, seen) for group in groups)]
            by_class[key] = [self._replay(each, place) for each in layouts]
        return by_class[key], [stage.further for stage in stages]

    def curve(self, rank: int) -> Curve:
        """Behind `found`."""
        stretches: list[Stretch] = []
        peak = _peak(self._real, rank, *self._replayed[rank], {}, stretches)
        return Curve(rank, peak.kept, stretches)

    def _replay(self, layout: Shorter, place: int) -> _Rank:
        real, count = self._real, len(layout.ranks)
        world_size = self._world_size // real.plan.placement.num_ranks * count
        rows = real.samples * min(real.count, microbatches_left(real.plan.pp_style, count))
        batch = first_rows(dict(self._job.batch), rows)
        options = changes(real.plugin, real.plan, layout, real.samples)
        book = self._books.setdefault(layout, Book())
        with joined(0, world_size):
            members = self._job.plugin(**options).mesh.ranks("pp")

        def replayed(one: int) -> _Rank:
            with joined(members[one], world_size):
                found = self._replay_rank(self._job.plugin(**options), layout, batch, book)
            book.replayed.add(one)
            return found

        # headers of messages come from the ranks before
        before = [each for each in range(place) if each not in book.replayed]
        return book.in_turn([*before, place], replayed, others=range(place + 1, count))[place]

    def _replay_rank(
        self, plugin: HybridParallelPlugin, layout: Shorter, batch: Mapping[str, Any], book: Book
    ) -> _Rank:
        segments, booster = Segments(), Booster(plugin=plugin)
        holders = Holders(lambda: segments.action)
        with Fakes(), LiveBytes(LOOKED_AT, label=holders.label, host=counts_host()) as live:
            segments.live = live
            bare = self._job.model()
            shorten(bare, self._real.plan.units, layout.kept)
            model: Any
            optimizer: Any
            model, optimizer, *_ = booster.boost(bare, self._job.optimizer(bare))
            del bare
            runtime = model.executor.runtime
            if runtime is not None:
                runtime.recorder, runtime.comm.book = segments, book

            def step(rows: Mapping[str, Any]) -> None:
                with holders.part("forward and backward"):
                    forward_and_backward(booster, model, optimizer, rows)
                segments.begin(OPTIMIZER)
                with holders.part("optimizer step"):
                    optimizer.step()
                optimizer.zero_grad()

            step(first_rows(dict(batch), self._real.samples))
            gc.collect()
            live.bytes()
            live.relabel(KEPT)
            if runtime is None:
                segments.follow(model.executor)
            with segments.step():
                step(batch)
        placement = model.executor.cut.placement
        names = [segment.name for segment in segments.done if isinstance(segment.name, Action)]
        own, buckets = list(places(names, placement)), Buckets.of(optimizer)
        return _Rank(segments, own, _bytes(batch), placement.num_ranks, buckets)


class _Rank:
    """What the actions of a rank of a shorter layout do."""

    def __init__(self, segments: Segments, own: Sequence[Place], batch: int, ranks: int, buckets: Buckets) -> None:
        self.labels = segments.labels
        self.before, *others = segments.done
        assert self.before.name == BEFORE, self.before.name
        self.behind = [segment for segment in others if not isinstance(segment.name, Action)]
        actions = [segment for segment in others if isinstance(segment.name, Action)]
        self.by_place = dict(zip(own, actions, strict=True))
        self.count = Counter(place.sort for place in own)
        self.batch = batch
        self.ranks = ranks
        self.buckets = buckets

    def is_steady(self, other: _Rank) -> bool:
        """See `repeats.is_steady`; `other` has a layer more."""
        actions = [(segment, other.by_place[place]) for place, segment in self.by_place.items()]
        pairs = [(self.before, other.before), *actions, *zip(self.behind, other.behind, strict=True)]
        return all(is_steady(*pair) for pair in pairs)

    def relabelled(self, labels: Mapping[Hashable, int]) -> None:
        """Use these places for labels."""
        places = [labels[label] for label in self.labels]

        def moved(amounts: Amounts) -> Amounts:
            found = np.zeros((*amounts.shape[:-1], len(labels)), dtype=np.int64)
            if amounts.size:
                found[..., places] = amounts
            return found

        for segment in (self.before, *self.by_place.values(), *self.behind):
            segment.start, segment.points, segment.end = map(moved, (segment.start, segment.points, segment.end))
        self.labels = list(labels)


def _buckets_come_again(replayed: Sequence[_Rank], further: Sequence[Sequence[int]]) -> bool:
    """See `_peak`."""
    base, *others = replayed
    numbers = [sum(own[group] for own in further if group < len(own)) for group in range(len(others))]
    return come_again(base.buckets, [(other.buckets, n) for other, n in zip(others, numbers, strict=True)])


def _peak(
    real: _Real,
    rank: int,
    replayed: Sequence[_Rank],
    further: Sequence[Sequence[int]],
    rough: dict[str, None],
    stretches: list[Stretch] | None = None,
) -> Peak:
    """Of a rank of the real layout, whose stages have so many more layers. `replayed`: the shorter one, and for every
    group of equal layers the one that has one more. `rough` (see `Found`) and `stretches` are added to.
    """
    labels = {label: place for place, label in enumerate(dict.fromkeys(la for one in replayed for la in one.labels))}
    for one in replayed:
        one.relabelled(labels)
    base, *others = replayed
    actions = real.actions(rank)
    placement = real.plan.placement
    there = list(places(actions, placement))
    counts = Counter(place.sort for place in there)
    # of all chunks together: what is kept is the sum over them
    mean = [
        sum(own[group] for own in further if group < len(own)) / max(sum(group < len(own) for own in further), 1)
        for group in range(len(others))
    ]

    def more(segments: Sequence[Segment], numbers: Sequence[float]) -> list[More]:
        return [More(segment, number) for segment, number in zip(segments, numbers, strict=False)]

    level = base.before.start.astype(np.float64)
    for other, number in zip(others, mean, strict=True):
        level = level + number * (other.before.start - base.before.start)
    level[labels[KEPT]] += real.batch - base.batch
    kept, top, during = float(level.sum()), level, "between steps"
    most = kept
    classes: dict[Place | str, Class] = {}

    def follow(key: Place | str, make: Callable[[], Class], name: str) -> None:
        nonlocal level, most, top, during
        if key not in classes:
            classes[key] = make()
            if classes[key].rough:
                rough[key if isinstance(key, str) else key.sort.kind.value] = None
        change, highest, _ = classes[key]
        here = float(level.sum() + highest.sum())
        if here > most:
            most, top, during = here, level + highest, name
        highest = level + highest
        level = level + change
        if stretches is not None:
            stretches.append(Stretch(name, round(here), by_holder(labels, highest), by_holder(labels, level)))

    # interleaved microbatches go in groups of as many as there are ranks
    rounds = (placement.num_ranks, base.ranks) if real.plan.pp_style == "interleaved" else (1, 1)
    follow(BEFORE, lambda: extend(base.before, more([other.before for other in others], mean)), "forward")
    for action, place in zip(actions, there, strict=True):
        found = like(place, counts, base.count, rounds)
        if found is None:
            raise NotShorterError(f"a shorter layout has no {place.sort.kind} there")
        follow(found, partial(_of_action, base, others, found, further, more), str(action))
    for index, segment in enumerate(base.behind):
        own = [other.behind[index] for other in others]
        follow(str(segment.name), partial(extend, segment, more(own, mean)), str(segment.name))
    if abs(float(level.sum()) - kept) > _LEFT * most:
        rough[DRIFTS] = None
    return Peak(rank, round(kept), round(most), during, by_holder(labels, top))


def _of_action(
    base: _Rank,
    others: Sequence[_Rank],
    place: Place,
    further: Sequence[Sequence[int]],
    more: Callable[[Sequence[Segment], Sequence[float]], list[More]],
) -> Class:
    own = further[place.sort.chunk]
    if place.sort.joined is not None and any((*own, *further[place.sort.joined])):
        raise NotShorterError("forwards and backwards run at the same time")
    return extend(base.by_place[place], more([other.by_place[place] for other in others], own))


def _microbatches(plugin: HybridParallelPlugin, batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Samples of a microbatch, microbatches, and bytes of the batch."""
    options = plugin.settings.pipeline
    if options.num_sequence_slices > 1 or options.offload_activations:
        raise NotShorterError("parts of microbatches, or activations that leave, depend on the whole schedule")
    sizes = microbatch_sizes(batch_size(batch), options.num_microbatches, options.microbatch_size)
    if len(set(sizes)) > 1:
        raise NotShorterError("microbatches differ in their size")
    return sizes[0], len(sizes), _bytes(batch)


def _bytes(batch: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes"))


def _actions(plugin: HybridParallelPlugin, plan: CutPlan, count: int, rank: int) -> Sequence[Action]:
    """What a rank does in a step."""
    placement = plan.placement
    if placement.num_ranks == 1:
        return [Action(kind, 0, index) for index in range(count) for kind in (Kind.F, Kind.B)]
    schedule = get_sliced(
        plan.pp_style, placement.num_ranks, count, 1, placement.num_chunks, pairs=plugin.mesh.size("tp") > 1
    )
    settings = plugin.settings
    costs = plan.costs.actions(plan.stages) if plan.costs is not None else None
    gathered = chunks_gathered(settings.zero.gather_ahead) if settings.zero.stage == 3 else None
    lowered = lower(schedule, overlap=settings.pipeline.overlap_p2p, costs=costs, rank=rank, gathered=gathered)
    return lowered.actions[rank]
