"""Facts from which stages are cut: what every part of a model reads of the others. Learnt by `surveyor`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...models.layer_chain import Unit
from .attributes import Actor
from .chain import list_of
from .entry import ENTRY, Entry
from .template import Template


@dataclass(frozen=True)
class Part:
    """What one unit, or the tail behind the last one, reads."""

    reads: frozenset[int]
    parameters: frozenset[str]
    modules: frozenset[str]

    def __or__(self, other: Part) -> Part:
        return Part(self.reads | other.reads, self.parameters | other.parameters, self.modules | other.modules)


class Accumulated(NamedTuple):
    """Something that every forward changes, made of what it was before: a count, an average.

    name      of what the model keeps
    module    outside the layers, which changes it; "": code of the model around them
    by        the part of the forward that does
    """

    name: str
    module: str
    by: Actor


@dataclass(frozen=True)
class Survey:
    """Facts about one model.

    units       the chain of layers
    templates   output structure of each unit's gate
    parts       what each unit reads, and last what the tail reads
    names       every name of each parameter by its first name (more than one: tied inside the model)
    outside     modules with parameters outside the layers that can become stubs, outer ones first
    ran         those of them that ran in the dry run
    unread      parameters that nothing read in the dry run: True when they belong to the first stage, else to the last
    joined      pairs (i, j) of units, i < j, that cannot be parted because one uses inner values of the other; j may be
                the tail
    reasons     why, by pair, in words
    example     the batch of the dry run
    tail_reads  tensors that the tail reads: the unit that returns them, their number in what it returns
    entry       what the first unit receives, where the model can be cut there. `parts` count with the first unit what
                makes it
    rewritten   buffers, and other tensors that modules keep, which a forward changes
    accumulated what every forward changes, around the layers
    """

    units: tuple[Unit, ...]
    templates: tuple[Template, ...]
    parts: tuple[Part, ...]
    names: dict[str, tuple[str, ...]]
    outside: tuple[str, ...]
    ran: frozenset[str]
    unread: dict[str, bool]
    joined: tuple[tuple[int, int], ...] = ()
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    example: Any = None
    entry: Entry | None = None
    tail_reads: frozenset[tuple[int, int]] = frozenset()
    rewritten: frozenset[str] = frozenset()
    accumulated: tuple[Accumulated, ...] = ()

    @property
    def num_units(self) -> int:
        return len(self.units)

    def can_cut(self, position: int) -> bool:
        """Whether a stage may end before unit `position`; behind the last one, whether the tail may be a stage of its
        own; at 0, whether what comes before the layers may."""
        if position == 0:
            return self.entry is not None
        return not any(low < position <= high for low, high in self.joined)

    def why_joined(self, position: int | None = None) -> str:
        """Of the pairs that a cut before unit `position`, or any cut, would part."""
        told = [
            reason for (low, high), reason in sorted(self.reasons.items()) if position is None or low < position <= high
        ]
        more = f", and {len(told) - 2} more like these" if len(told) > 2 else ""
        return "; ".join(told[:2]) + more

    def boundary(self, position: int) -> tuple[int, ...]:
        """Units before `position` whose outputs are read at or behind it: what travels over a cut there. In front of
        all: the entry.
        """
        return self._boundaries[position]

    @cached_property
    def _numbered(self) -> tuple[int, ...]:
        return tuple(unit for unit, template in enumerate(self.templates) if template.num_numbers)

    def numbered(self, position: int) -> tuple[int, ...]:
        """Units before `position` that return numbers, which travel over every cut behind them: who reads a number
        nobody can see.
        """
        return tuple(unit for unit in self._numbered if unit < position)

    @cached_property
    def _boundaries(self) -> tuple[tuple[int, ...], ...]:
        last_reads = self._last_reads
        behind = [
            tuple(unit for unit in range(position) if last_reads[unit] >= position)
            for position in range(1, self.num_units + 1)
        ]
        return ((ENTRY,), *behind)

    def is_like(self, other: Survey) -> bool:
        """Whether that is of the same chain, whose units return the same."""
        return self.units == other.units and all(map(Template.is_like, self.templates, other.templates))

    def reading_besides(self, other: Survey) -> Survey:
        """With what the same chain reads in another mode, as far as stages can have it without a layer of another one.
        Where they can be cut is up to `self` alone: `StageCheck` tells what that mode would need besides.
        """
        layers = tuple(f"{unit.layer}." for unit in self.units)
        more = {
            name for one, two in zip(self.parts, other.parts, strict=False) for name in two.parameters - one.parameters
        }
        if not self.is_like(other) or any(name.startswith(layers) for name in more):
            return self
        joined, entry = self.joined_by(other), self.entry
        return replace(
            joined,
            joined=self.joined,
            reasons=self.reasons,
            entry=entry and (entry.joined_by(other.entry) or entry),
            accumulated=self.accumulated,
        )

    def joined_by(self, other: Survey) -> Survey:
        """With what another batch has made the same chain read; unchanged where that is another chain."""
        if not self.is_like(other):
            return self
        return replace(
            self,
            templates=tuple(
                replace(one, written=tuple(map(operator.or_, one.written, two.written)), unread=one.unread & two.unread)
                for one, two in zip(self.templates, other.templates, strict=True)
            ),
            parts=tuple(map(operator.or_, self.parts, other.parts)),
            ran=self.ran | other.ran,
            unread={name: first for name, first in self.unread.items() if name in other.unread},
            joined=tuple(sorted({*self.joined, *other.joined})),
            reasons={**other.reasons, **self.reasons},
            entry=self.entry and self.entry.joined_by(other.entry),
            tail_reads=self.tail_reads | other.tail_reads,
            rewritten=self.rewritten | other.rewritten,
            accumulated=tuple(dict.fromkeys((*self.accumulated, *other.accumulated))),
        )

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Of every unit the name of the list that its layer is in."""
        return tuple(list_of(unit) for unit in self.units)

    def template(self, unit: int) -> Template:
        """Structure of what a unit, or the entry, passes on."""
        if unit != ENTRY:
            return self.templates[unit]
        assert self.entry is not None
        return self.entry.template

    @cached_property
    def _last_reads(self) -> list[int]:
        """For every unit the last part that reads its output, -1 where none does."""
        last = [-1] * self.num_units
        for number, part in enumerate(self.parts):
            for unit in part.reads:
                last[unit] = number
        return last

    def parameters(self, stages: Sequence[range], stage: int) -> set[str]:
        """First names of the parameters of one of `stages`, which are ranges of units."""
        held = self.parameters_read(stages, stage)
        held |= {name for name, first in self.unread.items() if stage == (0 if first else len(stages) - 1)}
        return held

    def parameters_read(self, stages: Sequence[range], stage: int) -> set[str]:
        """The same without those that nothing reads."""
        return {name for part in self._parts(stages, stage) for name in part.parameters}

    def units_read(self, stages: Sequence[range], stage: int) -> set[int]:
        """Units, and the entry, whose outputs a stage reads."""
        return {unit for part in self._parts(stages, stage) for unit in part.reads}

    def modules(self, stages: Sequence[range], stage: int) -> set[str]:
        """Modules outside the layers whose output a stage reads."""
        return {name for part in self._parts(stages, stage) for name in part.modules}

    def changed_twice(self, stages: Sequence[range], held: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
        """What several of the stages that a rank holds would change in a forward each, and which these are."""
        for what in self.accumulated:
            runs = tuple(
                stage
                for stage in held
                if (
                    what.module in self.modules(stages, stage)
                    if what.module
                    else what.by.high >= stages[stage].start
                    and (what.by.low < max(stages[stage].stop, 1) or stage == len(stages) - 1)
                )
            )
            if len(runs) > 1:
                return what.name, runs
        return None

    def _parts(self, stages: Sequence[range], stage: int) -> tuple[Part, ...]:
        units = stages[stage]
        found = self.parts[units.start : units.stop] + (self.parts[-1:] if stage == len(stages) - 1 else ())
        if stages[0] or stage > 1:
            return found
        assert self.entry is not None
        return (self.entry.before,) if stage == 0 else (self.entry.behind, *found[1:])
