"""Times that `shardwright calibrate` has measured on a machine, in a file; and the `Machine` that is made of them.

found = read("calibration.json")
device = calibrated(found, "bf16", world_size=8)        in place of `machines.machine`
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .gpus import like_device
from .machines import COMPUTED, GIB, Host, Machine, check_known
from .machines import machine as _published
from .operators import Operator

FORMAT = 4
_WORDS = "shardwright calibrate"
_STEP_BYTES = 30  # that AdamW moves for an element: gradient, weight, two states, and the weight in half precision
_NEAREST = 4
# of what the host takes, what was measured on one rank; the rest was on ranks that were as busy as those of a job
_ALONE = frozenset({"around", "step", "again", "again in part"})
_LONGEST = 86400.0  # seconds, of anything that is measured
_MOST = 2**63  # that is counted
_CPU_LINK = 1.0  # GB/s between processes of a machine, where it was not measured


class Point(NamedTuple):
    """A call that was measured.

    ranks    that took part
    flops    0 where it is no product
    moved    bytes that it reads and writes; of a collective what each rank sends
    busy     seconds of a rank's processor, of what is sent on a CPU; else 0
    """

    ranks: int
    flops: int
    moved: int
    seconds: float
    busy: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """device     type, name, memory (bytes), cores (of a CPU, else 0), count
    made, versions, clock   when, with what, and by which clock
    host        seconds of the host for an operator: "call" alone, and "forward" and "backward" in a layer; and "around"
                a microbatch and for a "step", beside those; on CPUs also those of `machines.Host`, "hooks" and
                "replicas" below ZeRO-3 and "gathering hooks" and "gathering replicas" in it
    products, attention   by dtype; `moving`: elementwise operators, norms and copies
    sums        on CPUs, adding gradients; `moved` are their bytes
    optimizer   AdamW; `moved` are elements
    collectives by name, and messages between two ranks; empty where there was one device
    whole       on CPUs, by ranks (as text, for JSON): what operators take in a step over what they take one by one, and
                what the host takes over what it was measured to take; and a step by the clock, over what is told of it
                (see `measure_steps`)
    """

    device: Mapping[str, Any]
    made: str
    versions: Mapping[str, str]
    clock: str
    host: Mapping[str, float]
    products: Mapping[str, Sequence[Point]]
    attention: Mapping[str, Sequence[Point]]
    moving: Sequence[Point]
    sums: Sequence[Point]
    optimizer: Sequence[Point]
    collectives: Mapping[str, Sequence[Point]]
    messages: Sequence[Point]
    whole: Mapping[str, Sequence[float]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def words(self) -> str:
        return f"{self.device['name']}, calibrated {self.made[:10]} with torch {self.versions.get('torch', '?')}"


def write(found: Calibration, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> Calibration:
    """ValueError says what is wrong with the file."""
    again = f"make it again with `{_WORDS} -o FILE`"
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"calibration {path} cannot be read ({error.strerror}); {again}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"calibration {path} is no JSON ({error}); {again}") from error
    if not isinstance(plain, dict) or "format" not in plain:
        raise ValueError(f"calibration {path} has no `format`, so {_WORDS} has not written it; {again}")
    if plain["format"] != FORMAT:
        raise ValueError(f"calibration {path} has format {plain['format']!r}, this version reads {FORMAT}; {again}")
    try:
        found = Calibration(
            **{
                **plain,
                **{name: {key: _points(rows) for key, rows in plain[name].items()} for name in _TABLES},
                **{name: _points(plain[name]) for name in _ROWS},
            }
        )
        _check(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"calibration {path} is damaged ({said}); {again}") from error
    return found


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_TABLES = ("products", "attention", "collectives")
_ROWS = ("moving", "sums", "optimizer", "messages")


def _points(rows: Any) -> tuple[Point, ...]:
    found = tuple(Point(*row) for row in rows)
    for point in found:
        known = all(map(_is_number, point)) and point.ranks > 0 and 0 < point.seconds < _LONGEST > point.busy
        if not known or not point.flops + point.moved > 0:
            raise ValueError(f"{list(point)} is no measurement")
    return found


def _is_number(value: Any) -> bool:
    """Of something that is counted or measured; JSON's `true` is none, though Python's is a whole number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def _check(found: Calibration) -> None:
    for name in ("type", "name", "memory", "cores", "count"):
        if name not in found.device:
            raise KeyError(f"device.{name}")
    if found.device["type"] not in ("cpu", "cuda"):
        raise ValueError(f"device.type is {found.device['type']!r}")
    if not isinstance(found.device["name"], str):
        raise ValueError(f"device.name is {found.device['name']!r}")
    for name, least in (("memory", 1), ("cores", int(found.device["type"] == "cpu")), ("count", 1)):
        number = found.device[name]
        if not _is_number(number) or not isinstance(number, int) or number < least:
            raise ValueError(f"device.{name} is {number!r}")
    if not isinstance(found.made, str) or not isinstance(found.versions, dict):
        raise ValueError("made is no text, or versions no table")
    for name in {"call": None, "forward": None, "backward": None, "around": None, "step": None, **found.host}:
        if not _is_number(found.host[name]) or found.host[name] >= _LONGEST:
            raise ValueError(f"host.{name} is {found.host[name]!r}")
    for ranks, times in found.whole.items():
        if not (int(ranks) > 0 and len(times) == 3 and all(_is_number(time) and 0 < time < _LONGEST for time in times)):
            raise ValueError(f"whole.{ranks} is {times!r}")
    for name in found.collectives:
        if name not in _COLLECTIVES:
            raise ValueError(f"collectives.{name} is none of {', '.join(_COLLECTIVES)}")
    tables = [*found.products.values(), *found.attention.values(), *found.collectives.values()]
    if not (found.products and found.attention and found.moving and found.optimizer and all(tables)):
        raise ValueError("a table is empty")
    if not all(point.flops for rows in found.products.values() for point in rows):
        raise ValueError("a product has no operations")
    sent = *found.collectives.values(), found.messages
    if not all(point.moved for rows in (*sent, found.moving, found.sums, found.optimizer) for point in rows):
        raise ValueError("something that is moved or sent has no bytes")


class Rates:
    """Seconds of calls that were not measured: by the rate of those most like them, by operations and bytes. `least`:
    of those that were.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._places = np.array([_place(point.flops, point.moved) for point in points])
        self._low, self._high = self._places.min(0), self._places.max(0)  # beyond which rates stay what they are
        self.least = min(point.seconds for point in points)
        self._rates = np.log(np.array([point.seconds / (point.flops or point.moved) for point in points]))

    def seconds(self, flops: float, moved: float) -> float:
        if not flops and not moved:
            return 0.0
        place = np.clip(np.array(_place(flops, moved)), self._low, self._high)
        apart = np.abs(self._places - place).sum(-1)
        nearest = np.argsort(apart, kind="stable")[:_NEAREST]
        weights = 1 / (apart[nearest] + 0.05) ** 2
        return float(np.exp((self._rates[nearest] * weights).sum() / weights.sum())) * (flops or moved)


def _place(flops: float, moved: float) -> tuple[float, float]:
    return math.log2(flops + 1), math.log2(moved + 1)


@dataclass(frozen=True)
class CalibratedMachine(Machine):
    """A `Machine` whose times are those of a calibration, in jobs of `ranks`. `assumed` are figures that are not
    measured, in words.
    """

    calibration: Calibration = field(kw_only=True, repr=False)
    dtype: str = "float32"
    assumed: str = ""
    ranks: int = 1

    @property
    def source(self) -> str:
        return f"{self.calibration.words}" + (f"; {self.assumed}" if self.assumed else "")

    @cached_property
    def _tables(self) -> dict[str, Rates]:
        found = self.calibration
        return {
            "product": Rates(found.products[self.dtype]),
            "attention": Rates(found.attention[self.dtype]),
            "other": Rates(found.moving),
        }

    @cached_property
    def _links(self) -> dict[int, Rates]:
        """Of collectives, by the ranks that take part."""
        return _by_ranks(point for rows in self.calibration.collectives.values() for point in rows)

    @cached_property
    def _busy(self) -> dict[int, Rates]:
        """Of collectives as `_links`, what they keep a processor busy with."""
        every = (point for rows in self.calibration.collectives.values() for point in rows)
        return _by_ranks(point._replace(seconds=point.busy) for point in every if point.busy > 0)

    @cached_property
    def _message_busy(self) -> Rates | None:
        points = [point._replace(seconds=point.busy) for point in self.calibration.messages if point.busy > 0]
        return Rates(points) if points else None

    @cached_property
    def _sums(self) -> Rates:
        return Rates(self.calibration.sums)

    @cached_property
    def _whole(self) -> Whole:
        return _whole(self.calibration, self.ranks)

    def computing(self, calls: Mapping[Operator, float]) -> float:
        return self._whole.operators * sum(
            count * self._tables[kind].seconds(flops if kind != "other" else 0, moved)
            for (kind, flops, moved, _), count in calls.items()
            if kind in COMPUTED
        )

    def starting(self, calls: Mapping[Operator, float], backward: bool = False) -> float:
        """What the host takes for these operators; a GPU computes meanwhile."""
        host = self.calibration.host["backward" if backward else "forward"]
        taken = self._whole.host * host * sum(count for call, count in calls.items() if call.kind in COMPUTED)
        if self.calibration.device["type"] == "cpu":
            return taken
        return max(taken - self.computing(calls), 0.0)

    def summing(self, size: float, tensors: float) -> float | None:
        if not self.calibration.sums or not tensors:
            return None
        return self._whole.operators * tensors * self._sums.seconds(0, size / tensors)

    def stepping(self, moved: float, flops: float) -> float:
        return self._whole.operators * super().stepping(moved, flops)

    def sent(self, size: float, ranks: int, reach: int) -> float:
        if ranks < 2 or not size:
            return 0.0
        if not self._links or reach > self.per_node:
            return super().sent(size, ranks, reach)
        return _of_ranks(self._links, size, ranks)

    def busy(self, size: float, ranks: int) -> float:
        if ranks < 2 or not size or not self._busy:
            return 0.0
        return _of_ranks(self._busy, size, ranks)

    def message_busy(self, size: float) -> float:
        return self._message_busy.seconds(0, size) if self._message_busy is not None else 0.0

    def message(self, size: float, reach: int) -> float:
        if not size:
            return 0.0
        if not self.calibration.messages or reach > self.per_node:
            return super().message(size, reach)
        return Rates(self.calibration.messages).seconds(0, size)

    def plain(self) -> dict[str, Any]:
        tables = self.calibration
        return {**super().plain(), "calibration": {**tables.device, "made": tables.made, "versions": tables.versions}}


def _by_ranks(points: Iterable[Point]) -> dict[int, Rates]:
    every = list(points)
    ranks = {point.ranks for point in every}
    return {number: Rates([point for point in every if point.ranks == number]) for number in ranks}


def _of_ranks(tables: Mapping[int, Rates], size: float, ranks: int) -> float:
    """Seconds of a collective, by the table of the nearest number of ranks, which more of them take longer than."""
    nearest = _nearest(tables, ranks)
    found = tables[nearest]
    return max(found.seconds(0, size), found.least) * (1 if ranks <= nearest else ranks / nearest)


def _nearest(known: Iterable[int], ranks: int) -> int:
    return min(known, key=lambda number: abs(math.log2(number / ranks)))


class Whole(NamedTuple):
    """See `Calibration.whole`."""

    operators: float = 1.0
    host: float = 1.0
    waits: float = 1.0


def _whole(found: Calibration, ranks: int) -> Whole:
    """In jobs of so many ranks."""
    known = {int(number): times for number, times in found.whole.items()}
    return Whole(*known[_nearest(known, ranks)]) if known else Whole()


def _host(found: Mapping[str, float]) -> Host:
    """What was measured of it: nothing with one rank."""
    names = ("action", "waiting", "answered")
    action, waiting, answered = (found.get(name, 0.0) for name in names)
    hooks, replicas = ((found.get(name, 0.0), found.get(f"gathering {name}", 0.0)) for name in ("hooks", "replicas"))
    again = found.get("again", 0.0), found.get("again in part", 0.0)
    return Host(found.get("collective", 0.0), hooks, replicas, action, waiting, again, answered)


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def calibrated(
    found: Calibration,
    precision: str,
    world_size: int,
    *,
    gpu: str | None = None,
    memory: float | None = None,
    per_node: int | None = None,
    inside: float | None = None,
    between: float | None = None,
) -> CalibratedMachine:
    """The machine that was measured, with what is known better, as `machines.machine` takes it. Ranks of a CPU share
    its cores and its memory.
    """
    check_known(memory, per_node, inside, between)
    dtype = _DTYPES.get(precision, "float32")
    measured = [each for each in found.products if each in found.attention]
    if dtype not in measured:
        raise ValueError(
            f"calibration of {found.device['name']}: precision={precision!r} needs products and attention in {dtype}, "
            f"and those in {', '.join(measured) or 'none'} were measured; take one of these, or leave the calibration "
            "out"
        )
    if inside is not None:  # which is known better, then
        found = replace(found, collectives={}, messages=())
    rate = max(point.flops / point.seconds for point in found.products[dtype])
    step = max(found.optimizer, key=lambda point: point.moved)
    known: dict[str, Any] = {"flops": rate, "bandwidth": _STEP_BYTES * step.moved / step.seconds}
    known |= {"product": 1.0, "moving": 1.0}
    if found.device["type"] == "cpu":
        if gpu is not None:
            raise ValueError(f"gpu={gpu!r} with a calibration of another device, {found.device['name']}; leave one out")
        machine = Machine(found.device["name"], 1.0, 1.0, found.device["memory"] / world_size, 0.0, 0.0)
        links = (inside or _CPU_LINK) * 1e9
        machine = replace(machine, inside=links, between=between * 1e9 if between else links)
        known |= {"per_node": per_node or world_size, "cores": found.device["cores"], "device": "cpu"}
        whole = _whole(found, world_size)
        known["waits"] = whole.waits
        host = {name: (whole.host if name in _ALONE else 1) * seconds for name, seconds in found.host.items()}
        known |= {"around": host["around"], "step": host["step"], "host": _host(host)}
    else:
        name, own = like_device((found.device["name"], found.device["memory"] / GIB))
        if gpu is not None and gpu != name:
            raise ValueError(f"gpu={gpu!r} with a calibration of another device, {found.device['name']}; leave one out")
        machine = _published(name, own if memory is None else memory, per_node, inside, between, precision)
        known["flops"] = machine.flops  # of which MFU is a share
        known["product"] = rate / machine.flops
    if memory is not None:
        known["memory"] = memory * GIB
    pair = [point for point in found.collectives.get("all_reduce", ()) if point.ranks == 2]
    assumed = ""
    if pair:
        largest = max(pair, key=lambda point: point.moved)
        known |= {"latency": min(point.seconds for point in pair), "sending": 1.0}
        known["inside"] = largest.moved / largest.seconds
        if between is None and found.device["type"] == "cpu":
            known["between"] = known["inside"]
    else:
        given = "as given" if inside is not None else "taken to be 1 GB/s" if "device" in known else "as published"
        assumed = f"links {given}, collectives and messages by formulas: not measured"
    own_fields = {each.name: getattr(machine, each.name) for each in fields(Machine)}
    known |= {"calibration": found, "dtype": dtype, "assumed": assumed, "ranks": world_size}
    return CalibratedMachine(**{**own_fields, **known})
