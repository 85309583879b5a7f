"""Whether ranks that hold the same are still the same, looked at every so many steps.

Ranks drift apart where one of them steps with another learning rate, loads other weights, edits a parameter, or has a
broken memory; each goes on without an error, and the model that they save is none. So every rank tells

    the number of the step, its loss scale and its learning rates     which are the same on all ranks
    a checksum of what it holds of the parameters                     the same on all ranks that hold the same part

in one exchange of a few digests. Only where digests differ do ranks exchange what they are digests of and name it.

Copies along data parallelism are equal bit by bit, since they step with the same sums. Copies along tensor and sequence
parallelism, and of tied parameters, come of computations of their own, which a device may round otherwise: they may
differ by `TOLERANCE` in their sums.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.held import Held, held_tensors
from .agreement import DIGEST, Facts, describe, digest, exchange, exchange_facts, place_of, several

TOLERANCE = 1e-5  # relative, of sums over a parameter
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 4  # parameters named


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold the same do not; raised on all ranks."""


class _Sums(NamedTuple):
    """Of one part of a parameter: of its bits, of its numbers and of their sizes."""

    bits: int
    numbers: float
    sizes: float

    def __str__(self) -> str:
        return f"{self.bits} {self.numbers!r} {self.sizes!r}"

    @staticmethod
    def read(text: str) -> _Sums:
        bits, numbers, sizes = text.split()
        return _Sums(int(bits), float(numbers), float(sizes))

    def is_near(self, other: _Sums) -> bool:
        limit = TOLERANCE * max(self.sizes, other.sizes)
        return not (abs(self.numbers - other.numbers) > limit or abs(self.sizes - other.sizes) > limit) and all(
            map(math.isfinite, self[1:] + other[1:])
        )


class ReplicaCheck:
    """Of one boosted model. Called by its optimizer at the beginning of every step, on all ranks.

    every   steps between two looks
    """

    def __init__(self, plugin: Any, model: nn.Module, optimizer: Any, every: int) -> None:
        # the optimizer holds this check, and must go when the script lets go of it
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._plugin, self.every = plugin, every

    def __call__(self, step: int) -> None:
        if step > 1 and (step - 1) % self.every == 0 and several():
            self.check(step - 1)

    @torch.no_grad()
    def check(self, step: int) -> None:
        """ReplicasDiffer on all ranks if they differ after `step`. Collective over all ranks."""
        shared = self._shared(step)
        tables = _by_kind(self._held())
        mine = digest(shared) + b"".join(digest(dict.fromkeys(table, "")) + digest(table) for table in tables.values())
        records = exchange(mine)
        if len({record[:DIGEST] for record in records}) > 1:
            self._refuse_shared(step, exchange_facts({**shared, "place": place_of(self._plugin)}))
        if any(_differ([record[DIGEST * (2 * n + 1) :][: 2 * DIGEST] for record in records]) for n in range(3)):
            self._compare(step, tables)

    def _shared(self, step: int) -> Facts:
        facts: Facts = {"step": str(step)}
        optimizer: Any = self._optimizer()
        scaler = optimizer.scaler
        if scaler is not None:
            describe("loss scale", dict(scaler.state_dict()), facts)
        for number, group in enumerate(optimizer.param_groups):
            facts[f"optimizer.param_groups[{number}]['lr']"] = repr(float(group["lr"]))
        return facts

    def _held(self) -> list[Held]:
        model = self._model()
        if model is None:  # the script trains on without it
            return []
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        position = self._plugin.position(model)
        return [held for held in held_tensors(model, position) if names.intersection(held.aliases)]

    def _refuse_shared(self, step: int, tables: list[Facts]) -> None:
        names = dict.fromkeys(name for table in tables for name in table)
        found = []
        for name, both in _pairs(names, tables):
            values = (f"{table.get(name, 'not there')} on rank {rank} ({table['place']})" for rank, table in both)
            found.append(f"{name} is {', '.join(values)}")
        self._raise(step, found)

    def _compare(self, step: int, tables: dict[str, Facts]) -> None:
        flat = {f"{kind} {key}": sums for kind, table in tables.items() for key, sums in table.items()}
        everyone = exchange_facts({**flat, "place": place_of(self._plugin)})
        places = [table.pop("place") for table in everyone]
        found = []
        for key in dict.fromkeys(key for table in everyone for key in table):
            holders = [(rank, _Sums.read(table[key])) for rank, table in enumerate(everyone) if key in table]
            other = next((each for each in holders[1:] if not _agree(key, holders[0], each, places)), None)
            if other is not None:
                name = key.split(" ")[1]
                ranks = " and ".join(f"rank {rank} ({places[rank]})" for rank in (holders[0][0], other[0]))
                found.append(f"{name} on {ranks}")
        if found:
            self._raise(step, found)

    def _raise(self, step: int, found: list[str]) -> None:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ReplicasDiffer(
            f"after step {step} ranks differ that must hold the same: {'; '.join(found[:_SHOWN])}{more}. Whatever "
            "changes weights, learning rates or steps must do so on all ranks alike; where nothing in the script does, "
            "suspect the memory of one of these ranks' devices. Go on from the last checkpoint. "
            "Booster(check_replicas=None) does not look"
        )


def _differ(records: list[bytes]) -> bool:
    """Whether ranks that hold the same parts have other digests of them."""
    found: dict[bytes, set[bytes]] = {}
    for record in records:
        found.setdefault(record[:DIGEST], set()).add(record[DIGEST:])
    return any(len(values) > 1 for values in found.values())


def _pairs(names: Any, tables: list[Facts]) -> Iterator[tuple[str, list[tuple[int, Facts]]]]:
    """For each entry that differs the first rank and one that has something else."""
    for name in names:
        if name == "place":
            continue
        other = next((rank for rank, table in enumerate(tables) if table.get(name) != tables[0].get(name)), None)
        if other is not None:
            yield name, [(0, tables[0]), (other, tables[other])]


def _agree(key: str, first: tuple[int, _Sums], other: tuple[int, _Sums], places: list[str]) -> bool:
    (rank, sums), (other_rank, others) = first, other
    if sums.bits == others.bits:
        return True
    own_work = key.startswith("tied ") or _without_dp(places[rank]) != _without_dp(places[other_rank])
    return own_work and sums.is_near(others)


def _without_dp(place: str) -> str:
    """ "pp 1, tp 0" of "dp 0, pp 1, tp 0"."""
    return ", ".join(part for part in place.split(", ") if not part.startswith("dp "))


def _by_kind(held: list[Held]) -> dict[str, Facts]:
    """Sums of what this rank holds, by name and part: of parameters that are split, that are whole, and that are
    tied, which other ranks hold as well.
    """
    tables: dict[str, Facts] = {"split": {}, "whole": {}, "tied": {}}
    sums = [_sums(each.tensor) for each in held]
    for each, (bits, numbers) in zip(held, _on_host(sums), strict=True):
        kind = "tied" if each.spec.tied is not None else "split" if each.spec.is_sharded else "whole"
        part = each.coordinate if each.spec.is_sharded else "all"
        tables[kind][f"{each.name} {each.spec.axis} {part} {each.start}:{each.stop}"] = str(_Sums(bits, *numbers))
    return tables


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    plain = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit numbers know no sums
    numbers = torch.stack([plain.sum(dtype=torch.float64), plain.abs().sum(dtype=torch.float64)])
    return tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64), numbers


def _on_host(sums: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, list[float]]]:
    """One wait for all of them."""
    if not sums:
        return []
    bits = torch.stack([each for each, _ in sums]).tolist()
    return list(zip(bits, torch.stack([each for _, each in sums]).tolist(), strict=True))
