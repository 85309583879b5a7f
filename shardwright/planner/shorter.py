"""The same layout with less of it: three pipeline ranks in place of many, two layers in place of many equal ones, a
few microbatches. What its ranks do is what those of the real layout do, fewer times.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..models.config import LAYERS, parts
from ..models.layer_chain import Unit
from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..pipeline.cut.plan import CutPlan
from ..pipeline.planning.placement import Placement
from ..pipeline.schedules import splits_backward
from ..plugins import HybridParallelPlugin

SEEN = 2  # equal layers that are left: the first and the last, where those between find nothing else than they do
_LONGEST_PATTERN = 6  # layers of different kinds that take turns
_COUNTS = (*LAYERS, "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers")
_NUMBERS = ("layer_idx", "layer_id", "index", "idx")  # by which equal layers differ


class NotShorterError(Exception):
    """Says why a layout must be replayed as it is."""


@dataclass(frozen=True)
class Stage:
    """Of a shorter layout.

    kept     units of the real stage that are left
    whole, selective   how many of them are recomputed, as a whole and in part
    further  of every group of equal layers, how many more of what recurs in it the real stage has; those that are left
             whole have none
    """

    kept: tuple[int, ...]
    whole: int
    selective: int
    further: tuple[int, ...]


@dataclass(frozen=True)
class Shorter:
    """A layout that stands for the real one at some of its ranks.

    ranks        real ranks that the ranks of this one stand for
    placement    of this one
    stages       of this one
    """

    ranks: tuple[int, ...]
    placement: Placement
    stages: tuple[Stage, ...]

    @property
    def kept(self) -> frozenset[int]:
        return frozenset(unit for stage in self.stages for unit in stage.kept)


def shorter(plan: CutPlan, kinds: Sequence[Hashable], rank: int, more: int | None = None, seen: int = SEEN) -> Shorter:
    """For the real `rank`; `kinds` are equal for layers that do the same. `more`: the number of a group, in every
    stage, that has one layer more. `seen`: equal layers that are left.
    """
    real = plan.placement
    count = min(real.num_ranks, ranks_left(plan.pp_style))
    ranks = list(range(count - 1)) + [real.num_ranks - 1]
    if count < real.num_ranks and rank not in ranks:
        ranks[1] = rank
        ranks[2:-1] = range(rank + 1, rank + 1 + count - 3)
        if ranks != sorted(set(ranks)):
            ranks = [0, *range(rank - (count - 3), rank + 1), real.num_ranks - 1]
    placement = replace(real, num_ranks=count)
    stages = []
    for stage in range(placement.num_stages):
        at = ranks[placement.rank_of(stage)]
        own = real.stage_of(at, placement.chunk_of(stage))
        stages.append(stage_of(plan.stages[own], plan.checkpointed[at].of(own), kinds, more, seen))
    return Shorter(tuple(ranks), placement, tuple(stages))


def ranks_left(pp_style: str) -> int:
    return 4 if splits_backward(pp_style) or pp_style == "interleaved" else 3


def microbatches_left(pp_style: str, ranks: int) -> int:
    """So many that every kind of action comes first, last and between, where neither forwards nor backwards are among
    themselves: it matters which came before, for weights that come and go (ZeRO-3), and for messages, which are let go
    of when others are sent or expected.
    """
    if splits_backward(pp_style) or pp_style == "interleaved":
        return 4 * ranks  # of interleaved ones groups of as many as ranks come again, of which two have to lie between
    return max(4, 2 * ranks)


def stage_of(
    units: range, again: tuple[int, int], kinds: Sequence[Hashable], more: int | None, seen: int = SEEN
) -> Stage:
    """What is left of a stage with these units, the first of which are recomputed as a whole, the next in part; see
    `shorter`.
    """
    first, second = units.start + again[0], units.start + sum(again)
    kept: list[int] = []
    counts: list[int] = []
    further: list[int] = []
    for group in (range(units.start, first), range(first, second), range(second, units.stop)):
        before = len(kept)
        for start, length, pattern in runs(kinds, group):
            left = length if length <= seen * pattern else seen * pattern + length % pattern
            if left < length:
                further.append((length - left) // pattern)
                left += pattern if len(further) - 1 == more else 0
            kept += range(start, start + left)
        counts.append(len(kept) - before)
    return Stage(tuple(kept), counts[0], counts[1], tuple(further))


def runs(kinds: Sequence[Hashable], units: range) -> Iterator[tuple[int, int, int]]:
    """Of these units, one run of layers in which something recurs after the other: its first one, how many, and how
    many make up what recurs. Layers between are runs of one.
    """
    start = units.start
    while start < units.stop:
        length, pattern = _run(kinds[start : units.stop])
        yield start, length, pattern
        start += length


def _run(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Of how many layers from the first on something recurs, and how many make up what does."""
    found = (1, 1)
    for pattern in range(1, min(_LONGEST_PATTERN, len(kinds)) + 1):
        length = pattern
        while length < len(kinds) and kinds[length] == kinds[length - pattern]:
            length += 1
        if length > SEEN * pattern and length > found[0]:
            found = (length, pattern)
    return found


def kinds_of(model: nn.Module, units: Sequence[Unit]) -> list[Hashable]:
    """By unit. Layers of a kind have the same modules, shapes and settings."""
    if any(unit.call for unit in units):
        raise NotShorterError("some layers run several times")
    return [_kind(model.get_submodule(unit.layer)) for unit in units]


def _kind(layer: nn.Module) -> Hashable:
    found: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key not in _NUMBERS and not key.startswith("_")
        ]
        shapes = [(key, tuple(param.shape), param.dtype) for key, param in module.named_parameters(recurse=False)]
        found.append((name, type(module).__qualname__, tuple(settings), tuple(shapes)))
    return tuple(found)


def shorten(model: nn.Module, units: Sequence[Unit], kept: frozenset[int]) -> None:
    """Leave out all other layers."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "config"):  # which may belong to others too
            module.config = copies.setdefault(id(module.config), copy.deepcopy(module.config))
    gone: dict[str, list[int]] = {}
    for number, unit in enumerate(units):
        home, _, index = unit.layer.rpartition(".")
        if number not in kept:
            if not index.isdigit() or not isinstance(model.get_submodule(home), nn.ModuleList):
                raise NotShorterError(f"{unit.layer} is in no list of layers")
            gone.setdefault(home, []).append(int(index))
    for home, numbers in gone.items():
        layers: Any = model.get_submodule(home)
        before = len(layers)
        for place in sorted(numbers, reverse=True):
            del layers[place]
        for config in _configs(model.get_submodule(home.rpartition(".")[0]), model):
            _count(config, before, set(numbers))


def _configs(*modules: nn.Module) -> Iterator[Any]:
    seen = set[int]()
    for module in modules:
        config = getattr(module, "config", None)
        for part in parts(config) if config is not None else ():
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def _count(config: Any, before: int, gone: set[int]) -> None:
    """Let a config say how many layers there are."""
    for name, value in list(vars(config).items()):
        if name in _COUNTS and value == before:
            setattr(config, name, before - len(gone))
        elif isinstance(value, list | tuple) and len(value) == before and before > len(gone):
            setattr(config, name, type(value)(item for index, item in enumerate(value) if index not in gone))


def changes(plugin: HybridParallelPlugin, plan: CutPlan, layout: Shorter, samples: int) -> dict[str, Any]:
    """Arguments of the plugin of the shorter layout; `samples` of a microbatch."""
    pipeline = plugin.settings.pipeline
    config = pipeline.gradient_checkpoint_config
    keep = config.selective_keep if isinstance(config, PipelineGradientCheckpointConfig) else None
    whole, selective = [stage.whole for stage in layout.stages], [stage.selective for stage in layout.stages]
    again = None
    if any(whole) or any(selective):
        again = PipelineGradientCheckpointConfig(
            num_ckpt_layers_per_stage=whole, num_selective_layers_per_stage=selective, selective_keep=keep
        )
    return {
        "pp_size": layout.placement.num_ranks,
        "pp_style": plan.pp_style,
        "num_model_chunks": layout.placement.num_chunks,
        "num_layers_per_stage": [len(stage.kept) for stage in layout.stages] if len(layout.stages) > 1 else None,
        "layer_costs": None,
        "cut_memory": None,
        "num_microbatches": None,
        "microbatch_size": samples,
        "gradient_checkpoint_config": again,
    }
