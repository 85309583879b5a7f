"""Whether stages have what a batch makes the model read, asked before the first batch of each kind.

Stages were cut from what the model reads of an example, in training and in evaluation. A batch with other entries
(`output_hidden_states=True`, a second text) may have it read more: in a stage that has not got it, that would be NaN,
or what the layers of this rank alone have left somewhere. So a copy of the whole model without memory is surveyed with
the batch, on every rank alike, and what is missing is refused by name.

A kind is the mode of the model and which entries there are; numbers and lengths are of no account. A forward that
cannot be followed without numbers is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ...models.dry_run import meta_copy
from ..batch.microbatch import items_of
from ..loss.router_logits import FLAG, without_router_logits
from ..planning.placement import Placement
from .entry import ENTRY
from .survey import Survey
from .surveyor import survey_batch

_MOST = 64  # kinds that are looked at


class StageCheck:
    """Of one model that is cut.

    model   whole, not sharded, as the user gave it; copied here without memory
    survey  from which it was cut into `stages`, ranges of units
    """

    def __init__(self, model: nn.Module, survey: Survey, stages: Sequence[range], placement: Placement) -> None:
        self._model = meta_copy(model)
        self._survey, self._stages, self._placement = survey, tuple(stages), placement
        self._known: set[Any] = set()

    @classmethod
    def of(cls, model: nn.Module, survey: Survey, stages: Sequence[range], placement: Placement) -> StageCheck | None:
        """None for a model that cannot be copied."""
        with suppress(Exception):  # a lock or an open file among its attributes
            return cls(model, survey, stages, placement)
        return None

    def check(self, microbatches: Sequence[Any], training: bool) -> None:
        """ValueError, the same on every rank, where a stage has not got what a microbatch has it read. training: the
        mode of the model

        Router logits have messages of their own (loss/router_logits.py), whoever asks for them; a batch is looked at
        as if it did not.
        """
        for microbatch in microbatches:
            if isinstance(microbatch, Mapping) and FLAG in microbatch:
                microbatch = {**microbatch, FLAG: False}
            kind = training, _kind_of(microbatch)
            if kind in self._known or len(self._known) >= _MOST:
                continue
            with without_router_logits(self._model):
                seen = survey_batch(self._model, self._survey.units, microbatch, training)
            for missing in self._missing(seen) if seen is not None else ():
                raise ValueError(self._told(missing, microbatch, training))
            self._known.add(kind)

    def _missing(self, seen: Survey) -> Iterator[str]:
        """What stages lack, in words."""
        own, stages = self._survey, self._stages
        for unit, one, two in zip(own.units, own.templates, seen.templates, strict=True):
            if not one.is_like(two):
                yield f"{unit.gate} returns {_structure(two)}, and {_structure(one)} where the model was cut"
        yield from (seen.why_joined(units.start) for units in stages if units.start and not seen.can_cut(units.start))
        for rank in range(self._placement.num_ranks):
            twice = seen.changed_twice(stages, self._placement.stages_of(rank))
            if twice is not None:
                yield f"every forward makes a new {twice[0]} of the old one, in each of the stages {list(twice[1])}"
        if not stages[0] and seen.entry is None:  # hidden states that the batch brings, say
            return
        for stage, units in enumerate(stages):
            where = f"stage {stage}" + (" (the last one)" if stage == len(stages) - 1 else "")
            has = {*own.boundary(units.start), *units} if stage else {*units}
            for number in sorted(seen.units_read(stages, stage) - has - {ENTRY}):
                yield f"{where} reads what {own.units[number].gate} returned, which is not sent there"
            if parameters := sorted(seen.parameters_read(stages, stage) - own.parameters(stages, stage)):
                yield f"{where} reads {parameters[0]}, which it does not hold"
            read = own.modules(stages, stage)
            runs = {name for name in own.outside if any(f"{each}.".startswith(f"{name}.") for each in read)}
            if modules := sorted(seen.modules(stages, stage) - runs):
                yield f"{where} reads what {modules[0]} returns, which it does not run"

    def _told(self, missing: str, batch: Any, training: bool) -> str:
        mode = "in training" if training else "in evaluation"
        if _kind_of(batch) == _kind_of(self._survey.example):
            does = "use cuts (num_layers_per_stage) that do not part these, or pp_size=1"
        else:
            does = "leave out what asks for it, or pass a batch like this one as example_inputs= to the plugin"
        entries = ", ".join(str(key) for key, _ in items_of(batch) if key is not None)
        return (
            f"{type(self._model).__name__} cannot run on this batch{f' ({entries})' * bool(entries)} {mode} with the "
            f"stages it was cut into: {missing}; {does}"
        )


def _structure(template: Any) -> str:
    what = "a tensor" if template.spec.is_leaf() else f"{template.spec.num_leaves} values"
    return f"{what}, {template.num_tensors} of them tensors" if not template.spec.is_leaf() else what


def _kind_of(batch: Any) -> Any:
    return frozenset((key, _kind(value)) for key, value in items_of(batch))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return frozenset((key, _kind(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), frozenset(map(_kind, value))
    return type(value)
