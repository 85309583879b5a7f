"""The fastest layouts that fit: every size of every axis that divides the model and the job, each with its memory and
time (`estimate`), the best of them simulated.

    found = search(question)
    found.best, found.estimates, found.neighbours
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models.config import KEY_VALUE_HEADS, QUERY_HEADS, first_int, hidden_size
from ..models.layer_chain import Unit, find_units
from ..plugins.data.input_limits import InputLimits
from ..plugins.hybrid.resolved import size
from ..utils.device import planning_for
from ..utils.errors import counted
from .batches import batch_of
from .beside import both
from .candidate import Layout, Task
from .estimate import Estimate, Estimator
from .machines import Machine
from .profile import Profile, Source, profile
from .rates import Rates, rates
from .shorter import NotShorterError
from .stages import Ends, is_tied, looked_up_again, reads_tables, table_size
from .states import optimizer_costs

MOST_TENSOR_RANKS = 8
_MOST_PIPELINE_RANKS = 64
_SIMULATED = 24  # of the best by formula
_STYLES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb", 1), ("zbv", 2))
_AGAIN = ((0.0, 0.0), (0.0, 1.0), (0.25, 0.0), (0.5, 0.0), (1.0, 0.0))
_SAMPLES = (1, 2, 4, 8, 16)
_REPLAYED = 16384  # tokens of the largest microbatch; heads compute more of them in equal chunks
_LONG = 16384  # tokens from which sequences are worth sharing
# of what devices hold, for what an allocator keeps beside tensors, and for the libraries
_SPARE_SHARE, _SPARE = 0.05, 2 * 2**30
_NEEDED = (
    "the search replays two layers and a third, so it needs three that do the same, in a list of layers, each run once"
)


@dataclass(frozen=True)
class Question:
    """model, optimizer    make them, without weights
    machine, world_size
    global_batch, length    samples of a step, and tokens of one
    precision
    model_name, optimizer_name    what `shardwright plan` calls them
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    machine: Machine
    world_size: int
    global_batch: int
    length: int
    precision: str = "bf16"
    model_name: str = "..."
    optimizer_name: str = "adamw"


class Found(NamedTuple):
    """estimates  of layouts that fit, the best first; one of each tp, pp, style and ZeRO stage
    neighbours   of the best: what is other, and its estimate, which may not fit
    tried        how many layouts
    limit        bytes that a layout may take
    along        whether tensor-parallel ranks split sequences between layers
    """

    estimates: list[Estimate]
    neighbours: list[tuple[str, Estimate]]
    tried: int
    limit: float
    along: bool

    @property
    def best(self) -> Estimate:
        return self.estimates[0]


def search(question: Question) -> Found:
    """ValueError where nothing fits. This process must be in no process group."""
    return Search(question).found()


class Search:
    def __init__(self, question: Question) -> None:
        _check(question)
        self._question = question
        self._model = model = question.model()
        InputLimits(model).check_length(question.length)
        units = _units(model)
        self._layers = len(units)
        self.along = False  # whether tensor-parallel ranks split sequences
        most = max(2, min(_REPLAYED // question.length, question.global_batch))
        sizes = tuple(size for size in _SAMPLES if size <= most)
        batch = batch_of(model, sizes[-1], question.length)
        if not any(_is_text(value, question.length) for value in batch.values()):
            raise ValueError(
                f"batches of {type(model).__name__} hold {', '.join(batch)}, and no texts: the search counts tokens, "
                "and would take samples to have as many as are asked for; shardwright plan --peak tells of one layout"
            )
        source = Source(question.model, question.optimizer, batch, question.precision, sizes)
        tensor = [ranks for ranks in _powers(min(MOST_TENSOR_RANKS, question.machine.per_node)) if self._splits(ranks)]
        tensor = [ranks for ranks in tensor if question.world_size % ranks == 0]
        gc.collect()
        gc.freeze()  # what is there now need not be looked through behind every replay
        try:
            with planning_for(question.machine.device):
                profiles, tensor = _profiles(source, tensor)
        except NotShorterError as error:
            raise ValueError(
                f"{error}: {_NEEDED}; shardwright plan --peak tells of a single layout of any model"
            ) from error
        finally:
            gc.unfreeze()
        *alone, few = profiles[:-1] or profiles
        many = profiles[-1] if len(profiles) > 1 else None
        self._alone = alone[0] if alone else None
        self._tensor = tensor if many is not None or tensor == [1] else [few.tensor_ranks]
        self._shared = few, many
        self._by_samples: dict[tuple[int, float], Rates] = {}  # and tensor-parallel ranks
        one = rates(*self.profiles_of(self._tensor[0]), question.machine, self._tensor[0])
        self.along = few.along if few.tensor_ranks > 1 else many is not None and many.along
        self.model_flops = 3 * self._tensor[0] * (one.layers * one.layer.flops + one.rest.flops)  # of a sample
        half = question.precision != "fp32"
        hidden = (hidden_size(model) or 0) * question.length * (2 if half else 4)
        states, step = optimizer_costs(question.optimizer(model))
        self.task = Task(
            question.machine,
            hidden,
            half,
            states,
            self.model_flops,
            question.world_size,
            step,
            Ends.of(model, units),
            table_size(model),
            is_tied(model),
            reads_tables(model),
            again=tuple(looked_up_again(model, units).items()),
        )
        memory = question.machine.memory
        self.limit = memory * (1 - _SPARE_SHARE) - min(_SPARE, memory / 10)

    def _splits(self, ranks: int) -> bool:
        """Whether so many ranks can share a layer evenly."""
        config = getattr(self._model, "config", None)
        numbers = (first_int(config, QUERY_HEADS), first_int(config, KEY_VALUE_HEADS))
        return all(number is None or number % ranks == 0 for number in numbers)

    def found(self) -> Found:
        fitting, tried, least = [], 0, None
        for layout in self._layouts():
            tried += 1
            estimate = self.estimate(layout, simulated=False)
            if estimate.memory <= self.limit:
                fitting.append(estimate)
            elif least is None or estimate.memory < least.memory:
                least = estimate
        if not fitting:
            raise ValueError(self._nothing(least))
        checked = self._checked(sorted(fitting, key=lambda one: one.seconds))
        neighbours = [
            (what, self.estimate(layout, simulated=True)) for what, layout in self._neighbours(checked[0].layout)
        ]
        return Found(checked, neighbours, tried, self.limit, self.along)

    def _checked(self, fitting: Sequence[Estimate]) -> list[Estimate]:
        """The fastest of each kind that fits when it is simulated, too; `fitting` by formula, in their order."""
        kinds: dict[tuple[Any, ...], list[Estimate]] = {}
        for one in fitting:
            kinds.setdefault(_kind(one.layout), []).append(one)
        found: list[Estimate] = []
        least: Estimate | None = None
        for number, alike in enumerate(kinds.values()):
            if number >= _SIMULATED and found:
                break
            over = 1.0  # of what the formula says
            for one in alike:
                if one.memory * over > self.limit:
                    continue
                simulated = self.estimate(one.layout, simulated=True)
                if simulated.memory <= self.limit:
                    found.append(simulated)
                    break
                over = max(over, simulated.memory / one.memory)
                least = simulated if least is None or simulated.memory < least.memory else least
        if not found:
            raise ValueError(self._nothing(least))
        return sorted(found, key=lambda one: one.seconds)

    def _nothing(self, least: Estimate | None) -> str:
        question = self._question
        where = f"{counted(question.world_size, 'device')} of {question.machine.memory / 2**30:g} GiB"
        if least is None:
            return (
                f"no layout divides the model ({counted(self._layers, 'layer')}) and a global batch of "
                f"{question.global_batch} samples over {where}; a global batch that is a multiple of "
                f"{question.world_size} would"
            )
        return (
            f"nothing fits on {where}: the layout that takes least needs {size(round(least.memory))} of the "
            f"{size(round(self.limit))} that it may take ({describe(least.layout)}); more devices, devices with "
            "more memory, or shorter sequences would help"
        )

    def estimate(self, layout: Layout, simulated: bool) -> Estimate:
        return Estimator(self.task, self._rates_of(layout), layout).estimate(simulated)

    def profiles_of(self, ranks: int) -> tuple[Profile, Profile | None]:
        """What tells of so many tensor-parallel ranks: see `rates`."""
        return (self._alone, None) if ranks == 1 and self._alone is not None else self._shared

    def _rates_of(self, layout: Layout) -> Rates:
        """Of microbatches of its size, where a machine tells more than peaks."""
        key = layout.tp, layout.samples / layout.sp
        if key not in self._by_samples:
            self._by_samples[key] = rates(*self.profiles_of(layout.tp), self._question.machine, *key)
        return self._by_samples[key]

    def _layouts(self) -> Iterator[Layout]:
        question = self._question
        for tp in self._tensor:
            for pp in _divisors(question.world_size // tp, min(_MOST_PIPELINE_RANKS, self._layers)):
                for sp in self._sequence(tp, question.world_size // (tp * pp)):
                    dp = question.world_size // (tp * pp * sp)
                    if question.global_batch % dp == 0:
                        yield from self._of_sizes(tp, pp, sp, dp)

    def _sequence(self, tp: int, left: int) -> list[int]:
        if tp > 1 or self._question.length < _LONG:
            return [1]
        most = min(left, self._question.machine.per_node)
        return [ranks for ranks in _powers(most) if left % ranks == 0 and self._splits(ranks)]

    def _of_sizes(self, tp: int, pp: int, sp: int, dp: int) -> Iterator[Layout]:
        stages = (0,) if dp * sp == 1 else (1, 3) if pp > 1 else (1, 2, 3)
        styles = _STYLES if pp > 1 else (("1f1b", 1),)
        for samples in _SAMPLES:
            count, odd = divmod(self._question.global_batch // dp, samples)
            if odd or not count:
                break
            for style, chunks in styles:
                if pp * chunks > self._layers or (style == "interleaved" and count % pp):
                    continue
                for zero in stages:
                    most = self._layers - pp * chunks + 1  # of a stage
                    for whole, selective in (shares for shares in _AGAIN if not any(shares) or max(shares) * most >= 1):
                        yield Layout(tp, pp, sp, dp, zero, style, chunks, samples, count, whole, selective)

    def _neighbours(self, best: Layout) -> Iterator[tuple[str, Layout]]:
        """Each other in one thing."""
        every = list(self._layouts())
        for what, own in _ASPECTS:
            others = sorted(
                (one for one in every if _differs(best, one, own)), key=lambda one: self.estimate(one, False).seconds
            )
            seen = set[tuple[Any, ...]]()
            for layout in others:
                key = tuple(getattr(layout, name) for name in own)
                if key not in seen and len(seen) < 3:
                    seen.add(key)
                    yield f"{what} {_named(what, layout)}", layout


_ASPECTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tp", ("tp",)),
    ("pp", ("pp",)),
    ("sp", ("sp",)),
    ("ZeRO", ("zero",)),
    ("schedule", ("style", "chunks")),
    ("microbatch", ("samples",)),
    ("recompute", ("whole", "selective")),
)
_FOLLOWS = {
    "tp": ("dp", "count"),
    "pp": ("dp", "count", "style", "chunks"),
    "sp": ("dp", "count"),
    "samples": ("count",),
}


def _differs(best: Layout, other: Layout, aspect: Sequence[str]) -> bool:
    """In this aspect, and in what follows from it, but in nothing else."""
    free = {*aspect, *(name for own in aspect for name in _FOLLOWS.get(own, ()))}
    if aspect == ("pp",) and best.pp > 1 and other.pp > 1:
        free -= {"style", "chunks"}
    fields = Layout.__dataclass_fields__
    same = all(getattr(best, name) == getattr(other, name) for name in fields if name not in free)
    return same and any(getattr(best, name) != getattr(other, name) for name in aspect)


def _named(what: str, layout: Layout) -> str:
    return {
        "tp": f"{layout.tp}",
        "pp": f"{layout.pp}",
        "sp": f"{layout.sp}",
        "ZeRO": f"{layout.zero}",
        "schedule": schedule_of(layout),
        "microbatch": f"of {layout.samples}",
        "recompute": recomputed(layout),
    }[what]


def schedule_of(layout: Layout) -> str:
    if layout.pp == 1:
        return "no pipeline"
    return f"{layout.style}" + (f" x {layout.chunks}" if layout.style == "interleaved" else "")


def recomputed(layout: Layout) -> str:
    if layout.selective:
        return f"{layout.selective:.0%} of layers in part"
    return f"{layout.whole:.0%} of layers" if layout.whole else "nothing"


def describe(layout: Layout) -> str:
    sp = f" x sp {layout.sp}" if layout.sp > 1 else ""
    return (
        f"tp {layout.tp} x pp {layout.pp}{sp} x dp {layout.dp}, ZeRO-{layout.zero}, {schedule_of(layout)}, "
        f"{counted(layout.count, 'microbatch', 'microbatches')} of {layout.samples}, recomputes {recomputed(layout)}"
    )


def _check(question: Question) -> None:
    for name, value in (
        ("world_size", question.world_size),
        ("global_batch_size", question.global_batch),
        ("sequence_length", question.length),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    check_precision(question.precision)


def check_precision(precision: str) -> None:
    """Before a device is asked for, which knows others, that the search does not."""
    if precision not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"precision={precision!r}: the search knows bf16, fp16 and fp32")


def _units(model: nn.Module) -> list[Unit]:
    try:
        return find_units(model)
    except ValueError as error:  # its advice is for who asks for a pipeline
        raise ValueError(
            f"{type(model).__name__} has no list of layers: {_NEEDED}; make a HybridParallelPlugin of a layout of your "
            "own, such as HybridParallelPlugin(zero_stage=1)"
        ) from error


def _is_text(value: Any, length: int) -> bool:
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return whole and value.dim() == 2 and value.shape[1] == length


def _profiles(source: Source, tensor: Sequence[int]) -> tuple[list[Profile], list[int]]:
    """Of few tensor-parallel ranks and of many, and the numbers of ranks that remain: a model may share its layers
    among fewer than its heads allow, or among none. One rank has loss kernels of its own, so it stands for itself, as
    the first of three, where there are more than two numbers.
    """
    left = list(tensor)
    while left[-1] > 1:
        few, many = [2] if left[-1] > 2 else [1], left[-1]
        few = [1, *few] if len(left) > 2 and left[0] == 1 else few
        try:
            found, last = both(partial(_each, source, few), partial(profile, source, many))
            return [*found, last], left
        except ValueError:
            left.pop()
    return [profile(source, 1)], left


def _each(source: Source, tensor: Sequence[int]) -> list[Profile]:
    return [profile(source, ranks) for ranks in tensor]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def _kind(layout: Layout) -> tuple[Any, ...]:
    return layout.tp, layout.pp, layout.sp, layout.style, layout.chunks, layout.zero
