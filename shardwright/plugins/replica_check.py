"""Whether ranks that hold the same are still the same, looked at every so many steps.

Ranks drift apart where one of them steps with another learning rate, loads other weights, edits a parameter, or has a
broken memory; each goes on without an error, and the model that they save is none. So every rank tells

    the number of the step, its loss scale and its learning rates     which are the same on all ranks
    a checksum of what it holds of the parameters                     the same on all ranks that hold the same part

in one exchange of a few digests. Only where digests differ do ranks exchange what they are digests of and name it.

Copies along data parallelism are equal bit by bit, since they step with the same sums. Copies along tensor and sequence
parallelism, and of tied parameters, come of computations of their own, which a device may round otherwise: they may
differ in their sums by `TOLERANCE`, and by the rounding of their number format where that is coarser.

What cannot be looked at does not end a job that is well: the log says it once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.held import Held, held_tensors
from ..logging import get_dist_logger
from .agreement import DIGEST, Facts, describe, digest, exchange, exchange_facts, place_of, several

TOLERANCE = 1e-4  # relative, of sums over a parameter
# What numbers of so many bytes are summed as. 8 are two words: a sign of theirs would be worth 2**63, which weighs the
# same at every place, mod 2**64.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_FACTOR, _SHIFT = 0x5851F42D4C957F2D, 29
_SHOWN = 4  # parameters named
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where torch's DDP is told what every rank has for itself
# Elements summed at a time: torch writes them down with 8 bytes each. What a processor's cache holds takes it a fifth
# of the time; to a device every piece is some more launches.
_PIECE, _PIECE_OF_CPU = 2**22, 2**16


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold the same do not; raised on all ranks."""


class _Sums(NamedTuple):
    """Of one part of a parameter: of its bits, of its numbers and of their sizes; and how far numbers of its format lie
    apart.
    """

    bits: int
    numbers: float
    sizes: float
    spacing: float

    def __str__(self) -> str:
        return f"{self.bits} {self.numbers!r} {self.sizes!r} {self.spacing!r}"

    @staticmethod
    def read(text: str) -> _Sums:
        bits, numbers, sizes, spacing = text.split()
        return _Sums(int(bits), float(numbers), float(sizes), float(spacing))

    def is_near(self, other: _Sums) -> bool:
        finite, others = (all(map(math.isfinite, sums[1:])) for sums in (self, other))
        if not (finite and others):
            return finite == others  # copies that are nan are copies
        limit = max(TOLERANCE, self.spacing) * max(self.sizes, other.sizes)
        return abs(self.numbers - other.numbers) <= limit and abs(self.sizes - other.sizes) <= limit


class ReplicaCheck:
    """Of one boosted model. Called by its optimizer at the beginning of every step, on all ranks.

    every   steps between two looks
    """

    def __init__(self, plugin: Any, model: nn.Module, optimizer: Any, every: int) -> None:
        # the optimizer holds this check, and must go when the script lets go of it
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._plugin, self.every = plugin, every
        self._said = False

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
        kinds = range(len(tables))
        if any(_differ([record[DIGEST * (2 * n + 1) :][: 2 * DIGEST] for record in records]) for n in kinds):
            self._compare(step, tables)

    def _shared(self, step: int) -> Facts:
        facts: Facts = {"step": str(step)}
        optimizer: Any = self._optimizer()
        scaler = optimizer.scaler
        if scaler is not None:
            describe("loss scale", dict(scaler.state_dict()), facts)
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")  # optimizers that find their own have none
            rate = rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate
            describe(f"optimizer.param_groups[{number}]['lr']", rate, facts)
        return facts

    def _held(self) -> list[Held]:
        model = self._model()
        if model is None:  # the script trains on without it
            return []
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names.difference_update(getattr(model, _IGNORED, ()))
        position = self._plugin.position(model)
        try:
            return [held for held in held_tensors(model, position) if names.intersection(held.aliases)]
        except ValueError as error:  # what checkpoints cannot hold, either
            if not self._said:
                self._said = True
                get_dist_logger().warning(f"check_replicas does not look at the weights of this model: {error}")
            return []

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
    """Sums of what this rank holds, by name and part. Each kind is that of other ranks as a whole or not at all: those
    that have the same stage, the same part of it, the same experts, or share a tied parameter.
    """
    tables: dict[str, Facts] = {"split": {}, "experts": {}, "whole": {}, "tied": {}}
    places: dict[torch.device, torch.Tensor] = {}
    sums = [_sums(each.tensor, places) for each in held]
    for each, (bits, numbers) in zip(held, _on_host(sums), strict=True):
        kind = _kind(each)
        part = each.coordinate if each.spec.is_sharded else "all"
        found = _Sums(bits, numbers[0], numbers[1], _spacing(each.tensor.dtype))
        tables[kind][f"{each.name} {each.spec.axis} {part} {each.start}:{each.stop}"] = str(found)
    return tables


def _kind(held: Held) -> str:
    if held.spec.tied is not None:
        return "tied"
    if held.spec.is_of_experts:
        return "experts"
    return "split" if held.spec.is_sharded else "whole"


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _sums(tensor: torch.Tensor, places: dict[torch.device, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """([] int64 of the bits, [2] float64 of the numbers and of their sizes), with little room beside the tensor.

    The bits are weighed by where they lie, so that equal ones in another order have another sum: within a piece by
    `_places`, of which `places` keeps those of each device, and piece by piece by powers of a factor, mod 2**64.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    size = _PIECE_OF_CPU if tensor.device.type == "cpu" else _PIECE
    pieces = tensor.reshape(-1).split(size)
    most = pieces[0].numel() * max(1, tensor.element_size() // 4)
    found = places.get(tensor.device)
    if found is None or len(found) < most:
        found = places[tensor.device] = _places(most, tensor.device)
    first, *others = (_sums_of_piece(piece, found) for piece in pieces)
    bits, numbers = first
    for more_bits, more_numbers in others:
        bits, numbers = bits * _FACTOR + more_bits, numbers + more_numbers
    return bits, numbers


def _places(count: int, device: torch.device) -> torch.Tensor:
    """[count] int64: for each place an odd number without a pattern, so that no difference of two words is lost."""
    mixed = torch.arange(1, 2 * count, 2, device=device) * _FACTOR
    return mixed ^ (mixed >> _SHIFT) | 1


def _sums_of_piece(piece: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    plain = piece.float() if piece.element_size() == 1 else piece  # 8-bit numbers know no sums
    numbers = torch.stack([plain.sum(dtype=torch.float64), plain.abs().sum(dtype=torch.float64)])
    words = piece.view(_BITS[piece.element_size()])
    return (words * places[: words.numel()]).sum(), numbers


def _on_host(sums: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, list[float]]]:
    """One wait for all of them."""
    if not sums:
        return []
    bits = torch.stack([each for each, _ in sums]).tolist()
    return list(zip(bits, torch.stack([each for _, each in sums]).tolist(), strict=True))
