"""Whatever reads files or messages that somebody else may have written: bytes changed at random, and tables whose
values are changed and whose checksums are right again. Every input is read, or refused by an error for users; none
crashes, hangs, asks for more memory than its files could fill or opens a file outside.

    python -m pytest tests/unit/test_fuzz_readers.py -m sweep          100,000 inputs
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import Toy, trained
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from shardwright.checkpoint.agreement import Agreement
from shardwright.checkpoint.load import as_saved, find
from shardwright.checkpoint.manifest import MANIFEST, MARKER
from shardwright.checkpoint.plain_data import decode, encode
from shardwright.comm.payload import Header, put_together, take_apart
from shardwright.files.disk import crc_of
from shardwright.files.errors import CheckpointError
from shardwright.files.huggingface import HfFiles
from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.plugins.data.own_loader import shard_dataloader
from shardwright.precision.scaler import DynamicScaler, ScalerConfig

REFUSALS = (CheckpointError, ValueError)  # what users are told; UnsafeCheckpoint and CheckpointMismatch are ValueErrors
ROOM = 2 << 30  # bytes that reading may take beyond what the process has
SLOW = 5.0  # seconds of the processor for one input
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**40,
    2**62,
    2**63,
    10**30,
    -(2**63),
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "..",
    "../../../etc/passwd",
    "/etc/passwd",
    "rank-00000.safetensors",
    "F32",
    "tensor",
    "load",
    "\0",
    [],
    [[]],
    [-1],
    [2**40, 2**40],
    {},
    {"__shardwright__": "tensor", "dtype": "F32", "shape": [2**40], "items": []},
    {"__shardwright__": "dict", "items": [[[], 1]]},
    {"__shardwright__": "tuple"},
]


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(found) + 1)
        match draw.randrange(6):
            case 0 if place < len(found):
                found[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(found):
                found[place] = draw.choice([0, 255, ord("9"), ord('"'), ord("["), ord("}")])
            case 2:
                del found[place : place + draw.choice([1, 8, 100])]
            case 3:
                found[place:place] = draw.randbytes(draw.choice([1, 8, 64]))
            case 4:
                found[place:place] = found[: draw.randrange(64)]
            case _:
                found = found[:place] if draw.random() < 0.3 else found + b"[" * draw.choice([1, 3000])
    return bytes(found)


def changed_table(table: Any, draw: random.Random) -> Any:
    """With another value, key or length at one place."""
    path: list[tuple[Any, Any]] = []
    here = table
    while isinstance(here, dict | list) and here and (not path or draw.random() < 0.85):
        key = draw.choice(list(here)) if isinstance(here, dict) else draw.randrange(len(here))
        path.append((here, key))
        here = here[key]
    if not path:
        return draw.choice(STRANGE)
    holder, key = path[-1]
    match draw.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(["", "x", "../x", "weights/x", "rng/torch/0", "extra/step/0.weight"])] = holder.pop(key)
        case 1:
            holder.append(holder[key])
        case 2 if isinstance(here, int) and not isinstance(here, bool):
            holder[key] = draw.choice([here + 1, here - 1, -here, here * 2**32, 2**62 // max(here, 1)])
        case _:
            holder[key] = draw.choice(STRANGE)
    return table


def reseal(directory: Path) -> None:
    """Sizes and checksums of manifest and marker, as whoever writes such a directory on purpose would."""
    table = json.loads((directory / MANIFEST).read_text())
    for name, entry in table["files"].items():
        entry["size"], entry["crc32"] = (directory / name).stat().st_size, crc_of(directory / name)
    (directory / MANIFEST).write_text(json.dumps(table))
    reseal_marker(directory)


def reseal_marker(directory: Path) -> None:
    marker = json.loads((directory / MARKER).read_text())
    marker.pop("crc32")
    marker["manifest_size"], marker["manifest_crc32"] = (
        (directory / MANIFEST).stat().st_size,
        crc_of(directory / MANIFEST),
    )
    crc = zlib.crc32(json.dumps(marker, sort_keys=True).encode())
    (directory / MARKER).write_text(json.dumps({**marker, "crc32": crc}))


@contextmanager
def bounded() -> Iterator[None]:
    """With little more address space than the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Reader:
    """`read(draw)` changes something and reads it."""

    def __init__(self, tmp_path: Path) -> None:
        self.whole, self.place = tmp_path / "whole", tmp_path / "place"
        trained(2).save(self.whole / "step-2", extra={"a": (1, 2.5), "b": [torch.ones(2), {3: None}]})
        self.toy = Toy()
        self.names = sorted(file.name for file in (self.whole / "step-2").iterdir())
        self.files = tmp_path / "files"
        self.files.mkdir()
        save_file({"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int8)}, self.files / "m-1.safetensors")
        self.index = json.dumps({"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}})
        payload = {"x": torch.ones(2, 3), "y": [None, 1, ("s", torch.ones(1, dtype=torch.bfloat16))], 4: True}
        self.header = take_apart(payload)[0].to_bytes()
        numbers: Any = list(range(20))
        self.scaler = DynamicScaler(ScalerConfig(), torch.device("cpu"))
        self.loaders: list[Any] = [
            build_dataloader(numbers, 2, num_replicas=1, rank=0, shuffle=True, seed=3),
            shard_dataloader(DataLoader(numbers, 2, shuffle=True, generator=torch.Generator()), 1, 0),
        ]
        for loader in self.loaders:
            next(iter(loader))
        self.states = json.dumps([encode(each.state_dict(), "here") for each in (self.scaler, *self.loaders)])
        self.plain = json.dumps(encode({"a": (1, 2.5), "b": [torch.ones(2), {3: None}]}, "here"))

    def checkpoint(self, draw: random.Random) -> None:
        place = self.place / "step-2"
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.whole / "step-2", place)
        name = draw.choice(self.names)
        file = place / name
        if draw.random() < 0.3 or (name.endswith(".safetensors") and draw.random() < 0.7):
            file.write_bytes(changed_bytes(file.read_bytes(), draw))
        elif name.endswith(".safetensors"):
            data = file.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.dumps(changed_table(json.loads(data[8 : 8 + length]), draw)).encode()
            file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        else:
            file.write_text(json.dumps(changed_table(json.loads(file.read_text()), draw)))
        if draw.random() < 0.8 and name not in (MANIFEST, MARKER):
            reseal(place)
        elif name == MANIFEST and draw.random() < 0.8:
            reseal_marker(place)
        opened, _ = find(self.place if draw.random() < 0.5 else place, Agreement(1), 0, check=draw.random() < 0.5)
        for entry in opened.index.entries:
            opened.index.read_whole(entry)
        self.toy.load(place)

    def huggingface(self, draw: random.Random) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.files, self.place)
        if draw.random() < 0.5:
            (self.place / "m-1.safetensors").write_bytes(
                changed_bytes((self.place / "m-1.safetensors").read_bytes(), draw)
            )
            (self.place / "model.safetensors.index.json").write_text(self.index)
        else:
            index = changed_table(json.loads(self.index), draw)
            (self.place / "model.safetensors.index.json").write_text(json.dumps(index))
        files = HfFiles(self.place)
        for key in files.keys:
            files.tensor(key).clone()

    def message(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            header = Header.from_bytes(changed_bytes(self.header, draw))
        else:
            header = Header.from_bytes(json.dumps(changed_table(json.loads(self.header), draw)).encode())
        put_together(header, [torch.empty(0) for _ in header.tensors])
        str(header)

    def states_of_a_run(self, draw: random.Random) -> None:
        """Of a loss scale and of loaders, which go on where they say."""
        whole = json.loads(self.states)
        at = draw.randrange(len(whole))
        state = decode(changed_table(whole[at], draw))
        with as_saved(Path("here"), "it"):
            (self.scaler, *self.loaders)[at].load_state_dict(state)
        if at:
            list(self.loaders[at - 1])
        else:
            self.scaler.update(torch.tensor(1.0))

    def plain_data(self, draw: random.Random) -> None:
        decode(changed_table(json.loads(self.plain), draw))


@dataclass
class Found:
    """refused: inputs; the others were read, but for those in `wrong`. slowest: seconds of the processor"""

    refused: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def fuzz(read: Callable[[random.Random], None], count: int, seed: int) -> Found:
    found = Found()
    for number in range(count):
        begun, told = time.process_time(), ""
        try:
            read(random.Random(f"{seed} {number}"))
        except REFUSALS:
            found.refused += 1
        except Exception as error:
            told = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        took = time.process_time() - begun
        found.slowest = max(found.slowest, took)
        if took > SLOW:
            told = f"took {took:.1f} s"
        if told:
            found.wrong.append(f"input {number} of seed {seed}: {told}")
    return found


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "count"),
    [("checkpoint", 60), ("huggingface", 60), ("message", 300), ("plain_data", 300), ("states_of_a_run", 60)],
)
def test_changed_inputs_are_read_or_refused(reader: Reader, name: str, count: int) -> None:
    with bounded():
        found = fuzz(getattr(reader, name), count, seed=1)
    assert not found.wrong, "\n".join(found.wrong)
    assert count // 4 < found.refused <= count


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("checkpoint", 20_000),
        ("huggingface", 20_000),
        ("message", 40_000),
        ("plain_data", 20_000),
        ("states_of_a_run", 5_000),
    ],
)
def test_many_changed_inputs(reader: Reader, name: str, count: int) -> None:
    """All are tried; those that were neither read nor refused are told together."""
    with bounded():
        found = fuzz(getattr(reader, name), count, seed=2)
    print(f"{name}: {count} inputs, {found.refused} refused, slowest {found.slowest:.2f} s")
    assert not found.wrong, "\n".join(found.wrong[:20])
