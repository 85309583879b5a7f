"""What a layer of a model keeps, computes, moves and sends, and what lies before and behind the layers: microbatches of
several sizes, forward and backward, replayed for few layers and for one more.

    found = profile(Source(make_model, make_optimizer, batch, precision, sizes=(1, 2)), tensor_ranks=8)
    found.parts[1].layer, found.parts[1].rest        of a microbatch of one sample

Not all of it grows with the samples: weight gradients have the size of the weights, and a head that computes its loss
in chunks of tokens keeps one chunk of logits and a weight gradient where it kept all logits of a smaller microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..booster import Booster
from ..models.layer_chain import find_units
from ..plugins import HybridParallelPlugin
from .batches import first_rows
from .fakes import Fakes
from .live_bytes import LiveBytes
from .operators import Operator, Operators
from .replay import LOOKED_AT, forward_and_backward, joined
from .segments import Segment, Segments
from .shorter import SEEN, NotShorterError, kinds_of, runs, shorten, stage_of

Calls = Mapping[Operator, float]
_APART = 0.02  # of the elements of a layer, from which on it is of a kind of its own
_ONE_BUCKET = 1e6  # megabytes: nothing is reduced here, and many buckets take long to fill


@dataclass(frozen=True)
class Source:
    """What is trained: see `replay.Job`; `precision` is the plugin's. `sizes` are samples of microbatches, and `batch`
    has as many as the largest.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: Mapping[str, Any]
    precision: str
    sizes: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Part:
    """Of one microbatch, on one rank.

    kept        bytes from forward to backward
    forward_top, backward_top   bytes that these need for a while, beyond what is kept
    parameters  elements
    forward, backward   calls of operators
    tensors     that these elements are in, and
    shares      what each has of them, in the model's order
    early_top   the part of `backward_top` that comes before any weight gradient, which may wait
    end_top     bytes that the end of a backward needs, behind the layers, when nothing that was kept is left
    """

    kept: float
    forward_top: float
    backward_top: float
    parameters: float
    forward: Calls
    backward: Calls
    tensors: float = 0.0
    shares: tuple[float, ...] = ()
    early_top: float = 0.0
    end_top: float = 0.0

    @property
    def flops(self) -> float:
        """Of a forward that keeps nothing but logits and computes nothing again. A head whose loss computes gradients
        beside it has three times as many in its forward, and one that computes its logits again three in its backward.
        """
        forward, backward = (
            sum(call.flops * n for call, n in calls.items()) for calls in (self.forward, self.backward)
        )
        return min(forward, (forward + backward) / 3)


class Parts(NamedTuple):
    """layers  one of each kind; of kinds that take turns (attention to all and to a window) their mean
    rest    all else: embeddings, head, loss
    """

    layers: tuple[Part, ...]
    rest: Part


@dataclass(frozen=True)
class Profile:
    """parts   by samples of a microbatch, in ascending order
    kinds   which of its layers every layer of the model is
    tensor_ranks    that share them
    along   whether sequences are split over these ranks between layers
    """

    parts: Mapping[int, Parts]
    kinds: tuple[int, ...]
    tensor_ranks: int
    along: bool


def profile(source: Source, tensor_ranks: int = 1, along: bool = True) -> Profile:
    """This process must be in no process group. `along`: tensor-parallel ranks split sequences where the model lets
    them.
    """
    model = source.model()
    units = find_units(model)
    kinds = kinds_of(model, units)
    whole = range(len(units))
    base = stage_of(whole, (0, 0), kinds, None)
    if not base.further:
        raise NotShorterError("the model has no equal layers to tell what one takes")
    options: dict[str, Any] = {"tp_size": tensor_ranks, "precision": source.precision, "num_microbatches": 1}
    options["ddp_bucket_cap_mb"] = _ONE_BUCKET
    along = along and tensor_ranks > 1
    verdict, first = _Verdict(), None
    if along:
        split = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
        try:
            first = _measure(source, {**options, **split}, tensor_ranks, frozenset(base.kept), verdict)
            options |= split
        except ValueError:  # not every model's sequences can be split
            along, verdict = False, _Verdict()
    if first is None:
        first = _measure(source, options, tensor_ranks, frozenset(base.kept), verdict)
    groups = []
    for group in range(len(base.further)):
        more = stage_of(whole, (0, 0), kinds, group)
        added = len(more.kept) - len(base.kept)  # layers of which what recurs consists
        found = _measure(source, options, tensor_ranks, frozenset(more.kept), verdict)
        groups.append((found, added))
    parts = {}
    numel = [sum(param.numel() for param in model.get_submodule(unit.layer).parameters()) for unit in units]
    order, alone = _order(kinds, numel)
    without = [_without(source, options, tensor_ranks, frozenset(base.kept) - {unit}, verdict) for unit in alone]
    for size in source.sizes:
        one = first[size]
        layers = tuple(_difference(one, found[size], added) for found, added in groups)
        layers += tuple(
            layers[run] if less is None else _difference(less[size], one, 1)
            for run, less in zip(alone.values(), without, strict=True)
        )
        there = [layers[order[unit]] for unit in base.kept]
        parts[size] = Parts(layers, _rest(one, [found[size] for found, _ in groups], there))
    return Profile(parts, order, tensor_ranks, along)


def _order(kinds: Sequence[Hashable], numel: Sequence[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Which kind each layer is of, and the first layers of those kinds that are of no run of equal layers, which come
    behind these, with the number of the next run, or the last one. One that has about as many elements as those of
    that run is taken to be one of them, as the first of a stack is that computes for all of it where positions are.
    """
    found = _runs_that_recur(kinds)
    first = {number: place for place, number in reversed(list(enumerate(found))) if number is not None}
    others: dict[Hashable, int] = {}
    alone: dict[int, int] = {}
    order = []
    for place, own in enumerate(found):
        run = next((number for number in found[place:] if number is not None), len(first) - 1)
        number = run
        if own is None and abs(numel[place] / max(numel[first[run]], 1) - 1) > _APART:
            number = others.setdefault(kinds[place], len(first) + len(others))
            if number == len(first) + len(alone):
                alone[place] = run
        order.append(number)
    return tuple(order), alone


def _runs_that_recur(kinds: Sequence[Hashable]) -> list[int | None]:
    """The number of each layer's; None for layers that are left whole."""
    found: list[int | None] = []
    number = 0
    for _, length, pattern in runs(kinds, range(len(kinds))):
        recurs = length > SEEN * pattern
        found += [number if recurs else None] * length
        number += recurs
    return found


def _without(
    source: Source, options: Mapping[str, Any], ranks: int, kept: frozenset[int], verdict: _Verdict
) -> dict[int, _Measured] | None:
    """None where the model cannot do without a layer."""
    try:
        return _measure(source, options, ranks, kept, verdict)
    except ValueError:
        return None


class _Verdict:
    """What is found out about the loss of the first step, which holds for the others: they have more rows or layers. It
    is that of one microbatch of several, or of one rank's: where weights of these have to be found out, losses that are
    computed for it need more than one that is alone.
    """

    def __init__(self) -> None:
        self._found: Any = None

    def follow(self, executor: Any) -> None:
        check = executor._check_loss

        def check_once(step: Any) -> None:
            step.loss.follow_as_part()
            if self._found is None:
                check(step)
                self._found = step.loss.checked
            step.loss.checked = self._found

        executor._check_loss = check_once


@dataclass(frozen=True)
class _Measured:
    forward: Segment
    backward: Segment
    calls: Mapping[str, Counter[Operator]]
    sizes: Sequence[int]  # of parameters
    matrices: frozenset[int]  # bytes of those

    @property
    def parameters(self) -> int:
        return sum(self.sizes)


def _measure(
    source: Source, options: Mapping[str, Any], ranks: int, kept: frozenset[int], verdict: _Verdict
) -> dict[int, _Measured]:
    """By samples of a microbatch."""
    found = {}
    with joined(0, ranks):
        plugin = HybridParallelPlugin(**options)
        segments, booster, operators = Segments(), Booster(plugin=plugin), Operators()
        begin = segments.begin

        def begins(name: Any) -> None:
            operators.part = str(name) if hasattr(name, "kind") else ""
            begin(name)

        segments.begin = begins  # type: ignore[method-assign]  # operators follow
        with Fakes(), LiveBytes(LOOKED_AT) as live:
            segments.live = live
            bare = source.model()
            shorten(bare, find_units(bare), kept)
            model: Any
            model, optimizer, *_ = booster.boost(bare, source.optimizer(bare))
            del bare
            segments.follow(model.executor)
            verdict.follow(model.executor)
            sizes = [param.numel() for param in model.parameters()]
            matrices = frozenset(param.nbytes for param in model.parameters() if param.dim() > 1)
            for samples in source.sizes:
                batch = first_rows(dict(source.batch), samples)
                operators.calls = {}
                segments.done.clear()
                with operators, segments.step():
                    forward_and_backward(booster, model, optimizer, batch)
                    begins("behind")
                assert optimizer is not None
                optimizer.zero_grad()
                by_name = {str(segment.name): segment for segment in segments.done}
                found[samples] = _Measured(by_name["0F0"], by_name["0B0"], operators.calls, sizes, matrices)
    return found


def _total(amounts: Any) -> Any:
    return amounts.sum(-1)


def _difference(one: _Measured, other: _Measured, layers: int) -> Part:
    """One of the `layers` that the other has more of."""
    kept = [float(_total(each.forward.end - each.forward.start)) for each in (one, other)]
    of_layer = (kept[1] - kept[0]) / layers
    points = _total(other.backward.points - other.backward.start)
    # the backward of the first layer is the last one: by then most of what is kept has gone
    behind = _of_layer(one.backward.grown, other.backward.grown, layers, from_end=True)
    before = float(points[behind.start - 1]) if behind.start else 0.0
    forward_points = _total(other.forward.points - other.forward.start)
    near = forward_points[_of_layer(one.forward.grown, other.forward.grown, layers, from_end=False)]
    forward_top = max(float((near - near[0]).max()) - of_layer, 0.0) if len(near) else 0.0
    count = len(other.sizes) - len(one.sizes)
    first = _alike(one.sizes, other.sizes)
    own = other.sizes[max(first - count, 0) :][:count]  # the same come again
    return Part(
        of_layer,
        forward_top,
        float(points[behind].max(initial=before)) - before,
        (other.parameters - one.parameters) / layers,
        _minus(other.calls["0F0"], one.calls["0F0"], layers),
        _minus(other.calls["0B0"], one.calls["0B0"], layers),
        count / layers,
        tuple(size / sum(own) for size in own),
    )


def _of_layer(grown: Sequence[int], more: Sequence[int], layers: int, from_end: bool) -> slice:
    """Points of `more` that lie within a layer: the last one that both have done alike, counted from the start or from
    the end.
    """
    length = max((len(more) - len(grown)) // layers, 1)
    first, second = (grown[::-1], more[::-1]) if from_end else (grown, more)
    alike = _alike(first, second)
    stop = max(min(alike, len(more)), min(length, len(more)))
    if from_end:
        return slice(len(more) - stop, min(len(more) - stop + length, len(more)))
    return slice(max(stop - length, 0), stop)


def _rest(one: _Measured, others: Sequence[_Measured], layers: Sequence[Part]) -> Part:
    """What `one` has beside these layers."""
    kept = float(_total(one.forward.end - one.forward.start))
    forward, backward = (_total(segment.points - segment.start) for segment in (one.forward, one.backward))
    head, end = _around_layers(one.backward.grown, [other.backward.grown for other in others])
    early = next((place for place, size in enumerate(one.backward.grown[:head]) if size in one.matrices), head)
    tops = [float(points.max(initial=0)) for points in (forward, backward[:head], backward[:early])]
    return Part(
        max(kept - sum(layer.kept for layer in layers), 0.0),
        max(tops[0] - kept, 0.0),
        max(tops[1], 0.0),
        one.parameters - sum(layer.parameters for layer in layers),
        _less(one.calls["0F0"], [layer.forward for layer in layers]),
        _less(one.calls["0B0"], [layer.backward for layer in layers]),
        len(one.sizes) - sum(layer.tensors for layer in layers),
        early_top=max(tops[2], 0.0),
        end_top=float((backward[end:] + kept).max(initial=0)),
    )


def _around_layers(grown: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Points of a backward before those that come again where there are more layers, and where those behind them begin:
    all, where layers do not do the same one after the other.
    """
    count = len(grown)
    head, end = count, 0
    for more in others:
        ahead = _alike(grown, more)
        behind = _alike(grown[::-1], more[::-1])
        if ahead + behind < count:
            return count, count
        head, end = min(head, count - behind), max(end, ahead)
    return head, end


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def _minus(more: Counter[Operator], less: Counter[Operator], layers: int) -> Calls:
    return {call: count / layers for call, count in (more - less).items()}


def _less(calls: Counter[Operator], of_layers: Sequence[Calls]) -> Calls:
    found = {call: count - sum(own.get(call, 0.0) for own in of_layers) for call, count in calls.items()}
    return {call: count for call, count in found.items() if count > 0.01}
