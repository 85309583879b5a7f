"""What the tensors of a dry run can be made of; see `flows`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Returned:
    """Tensor `number` of what the gate of a unit returned."""

    unit: int
    number: int


@dataclass(frozen=True)
class Weight:
    """A parameter, by its first name."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """What a buffer, or another tensor that a module keeps, held before the forward."""

    name: str


@dataclass(frozen=True)
class ModuleOutput:
    """What a module outside the layers returned, or has written to."""

    name: str


@dataclass(frozen=True)
class Inside:
    """What was made, or written to, in a unit's layer; of_gate: in its gate, around the layers in there."""

    unit: int
    of_gate: bool = False


@dataclass
class Reads:
    """The atoms of a mask, by kind. places: unit and number of the tensors"""

    places: set[tuple[int, int]] = field(default_factory=set)
    units: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    inside: list[Inside] = field(default_factory=list)

    @staticmethod
    def of(atoms: Iterable[object]) -> Reads:
        found = Reads()
        for atom in atoms:
            match atom:
                case Returned(unit, number):
                    found.places.add((unit, number))
                    found.units.add(unit)
                case Weight(name):
                    found.parameters.add(name)
                case ModuleOutput(name):
                    found.modules.add(name)
                case Inside():
                    found.inside.append(atom)
        return found
