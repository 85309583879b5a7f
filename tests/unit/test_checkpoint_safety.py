"""Files that lie about themselves: typed errors, nothing opened outside the directory, nothing allocated on their
word.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import Toy, trained
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright import Booster
from shardwright.checkpoint.index import Chunk, TensorIndex, describe
from shardwright.checkpoint.manifest import MANIFEST, MARKER, Manifest, commit
from shardwright.files.boxes import Box, whole
from shardwright.files.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    UnsafeCheckpoint,
)
from shardwright.files.tensor_file import TensorFile, pending, write_tensors


def hf_directory(path: Path) -> Path:
    path.mkdir()
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, path / "a.safetensors")
    index = {"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def load_model(path: Path) -> nn.Module:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(3, 2))
    booster.load_model(model, path)
    return model


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Real paths of all files that are opened while the test runs."""
    paths: list[str] = []
    real = builtins.open, io.open, os.open

    def watching(function: Any) -> Any:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike):
                paths.append(os.path.realpath(path))
            return function(path, *args, **kwargs)

        return watched

    monkeypatch.setattr(builtins, "open", watching(real[0]))
    monkeypatch.setattr(io, "open", watching(real[1]))
    monkeypatch.setattr(os, "open", watching(real[2]))
    return paths


BAD_NAMES = [
    "../secret.safetensors",
    "/etc/passwd",
    "sub/a.safetensors",
    "..",
    ".",
    "",
    "a\\b",
    "a\0b",
    5,
    None,
    ["a.safetensors"],
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_an_index_that_points_elsewhere(tmp_path: Path, name: Any, opened: list[str]) -> None:
    directory = hf_directory(tmp_path / "model")
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "secret.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "a.safetensors", "bias": name}})
    )
    opened.clear()
    with pytest.raises(UnsafeCheckpoint):
        load_model(directory)
    assert all(Path(path).is_relative_to(directory) for path in opened), opened


def test_links(tmp_path: Path, opened: list[str]) -> None:
    directory = hf_directory(tmp_path / "model")
    outside = tmp_path / "outside.safetensors"
    (directory / "a.safetensors").rename(outside)
    (directory / "a.safetensors").symlink_to(outside)
    opened.clear()
    with pytest.raises(UnsafeCheckpoint, match="is a link to"):
        load_model(directory)
    assert str(outside) not in opened
    # The cache of the hub keeps files in a store beside the snapshots and links to them.
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    outside.rename(tmp_path / "hub" / "blobs" / "123")
    (snapshot / "a.safetensors").symlink_to(Path("../../blobs/123"))
    (snapshot / "model.safetensors.index.json").write_text((directory / "model.safetensors.index.json").read_text())
    assert torch.equal(load_model(snapshot).weight, torch.ones(2, 3))


def write_header(path: Path, header: Any, data: bytes = b"\0" * 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


BAD_HEADERS: dict[str, Any] = {
    "longer than the file": {"header": {}, "length": 2**40},
    "beyond 64 bits": {"header": {}, "length": 2**64 - 1},
    "not JSON": {"header": b"{oops"},
    "not text": {"header": b"\xff\xfe\x00"},
    "too deep": {"header": b"[" * 100_000},
    "a list": {"header": [1]},
    "unknown dtype": {"header": {"x": entry(dtype="PICKLE")}},
    "negative size": {"header": {"x": entry(shape=[-2, -3])}},
    "fractional size": {"header": {"x": entry(shape=[2.0, 3])}},
    "huge shape": {"header": {"x": entry(shape=[2**40, 2**40])}},
    "shape of other bytes": {"header": {"x": entry(shape=[2, 4])}},
    "offsets beyond the end": {"header": {"x": entry(data_offsets=[16, 40])}},
    "offsets backwards": {"header": {"x": entry(data_offsets=[24, 0])}},
    "negative offsets": {"header": {"x": entry(data_offsets=[-24, 0])}},
    "offsets missing": {"header": {"x": {"dtype": "F32", "shape": [2, 3]}}},
    "an entry that is no table": {"header": {"x": 3}},
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_that_lie(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeCheckpoint):
        TensorFile(write_header(tmp_path / "x.safetensors", **BAD_HEADERS[name]))


def test_a_file_cut_short(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointDamaged, match="cut short"):
        TensorFile(tmp_path / "x.safetensors")


def sealed(directory: Path, change: Any) -> None:
    """Change the rank's table and sign it again, as somebody would who means harm."""
    path = directory / "rank-00000.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    reseal(directory)


def reseal(directory: Path, names: list[str] | None = None, world_size: int = 1) -> None:
    import zlib

    names = names or [file.name for file in directory.iterdir() if file.name not in (MANIFEST, MARKER)]
    files = {}
    for name in names:
        data = (directory / name).read_bytes() if (directory / name).is_file() else b""
        files[name] = (len(data), zlib.crc32(data))
    for name in (MANIFEST, MARKER):
        (directory / name).unlink()
    commit(directory, Manifest(files, 1, 1, world_size))


def first_chunk(table: Any) -> Any:
    return table["tensors"]["weights/0.weight"]["chunks"][0]


TABLES = {
    "file outside": lambda table: first_chunk(table).update(file="../x.safetensors"),
    "file that is not listed": lambda table: first_chunk(table).update(file="other.safetensors"),
    "box outside": lambda table: first_chunk(table).update(start=[3, 0]),
    "negative box": lambda table: first_chunk(table).update(start=[-1, 0]),
    "box of other dims": lambda table: first_chunk(table).update(size=[15]),
    "chunk that the file does not hold": lambda table: first_chunk(table).update(key="999"),
    "chunk of another shape": lambda table: first_chunk(table).update(
        key=table["tensors"]["weights/0.bias"]["chunks"][0]["key"]
    ),
    "half of a tensor": lambda table: first_chunk(table).update(size=[2, 3]),
    "huge shape": lambda table: table["tensors"]["weights/0.weight"].update(shape=[2**60, 3]),
    "unknown dtype": lambda table: table["tensors"]["weights/0.weight"].update(dtype="F33"),
    "a dtype of a megabyte": lambda table: table["tensors"]["weights/0.weight"].update(dtype="F" * 10**6),
    "shape of many dims": lambda table: (
        table["tensors"]["weights/0.weight"].update(shape=[1] * 300_000),
        first_chunk(table).update(start=[0] * 300_000, size=[1] * 300_000),
    ),
    "no chunks": lambda table: table["tensors"]["weights/0.weight"].pop("chunks"),
    "tensors that are no table": lambda table: table.update(tensors=[1]),
    "no tensors": lambda table: table.pop("tensors"),
    "another shape than the model's": lambda table: (
        table["tensors"]["weights/0.weight"].update(shape=[3, 5]),
        first_chunk(table).update(size=[3, 5]),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_lie(tmp_path: Path, name: str, opened: list[str]) -> None:
    toy = trained(1)
    toy.save(tmp_path / "run")
    sealed(tmp_path / "run", TABLES[name])
    before = Toy()
    values = before.values()
    opened.clear()
    with pytest.raises((UnsafeCheckpoint, CheckpointDamaged, CheckpointMismatch)) as caught:
        before.load(tmp_path / "run")
    assert len(str(caught.value)) < 2000
    assert all(Path(path).is_relative_to(tmp_path / "run") for path in opened if path.startswith(str(tmp_path))), opened
    assert len(values) == len(before.values()), "no optimizer state was taken"


def test_an_index_of_many_chunks_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with few others: with all of them a file of some megabytes would take hours."""
    weights = torch.arange(2000.0).view(2, -1)
    boxes = [Box((row, column), (1, 1)) for row in range(2) for column in range(1000)]
    chunks = [Chunk("weights/x", (2, 1000), box, box.view(weights, (0, 0))) for box in boxes]
    name = "rank-00000.safetensors"
    write_tensors(tmp_path / name, [pending(str(number), chunk.data) for number, chunk in enumerate(chunks)])
    table = describe({name: chunks})
    compared: list[Box] = []
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda one, other: compared.append(other) or intersect(one, other))
    assert torch.equal(TensorIndex(tmp_path, [table]).read_whole("weights/x"), weights)
    assert len(compared) <= 3 * len(chunks)
    overlapping = table["weights/x"]["chunks"]
    overlapping[-1] = {**overlapping[0], "size": [2, 1]}
    overlapping.pop(1)
    with pytest.raises(UnsafeCheckpoint, match="chunks of weights/x overlap"):
        TensorIndex(tmp_path, [table]).read("weights/x", whole((2, 1000)), torch.empty(2, 1000))


def test_a_manifest_that_points_elsewhere(tmp_path: Path) -> None:
    trained(1).save(tmp_path / "run")
    reseal(tmp_path / "run", ["rank-00000.json", "../x", "rank-00000.safetensors", "state.json"])
    with pytest.raises(UnsafeCheckpoint, match="plain names"):
        Toy().load(tmp_path / "run")


@pytest.mark.parametrize("world_size", [0, -1, 2, 10**30])
def test_a_manifest_of_another_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    trained(1).save(tmp_path / "run")
    reseal(tmp_path / "run", world_size=world_size)
    with pytest.raises(CheckpointDamaged, match=f"is of {world_size} ranks and lists files of 1"):
        Toy().load(tmp_path / "run")


@pytest.mark.parametrize("step", [-5, 10**30, True, 1.0])
def test_a_step_that_load_would_refuse_is_not_saved(tmp_path: Path, step: Any) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="must be a whole number from 0 on, or None"):
        booster.save(tmp_path / "run", model=model, step=step)


STATES = {
    "negative step": (lambda state: state.update(step=-5), "-5 is no number of a step"),
    "huge step": (lambda state: state.update(step=10**30), "is no number of a step"),
    "nan": (
        lambda state: state["param_groups"][0].update(lr=float("nan")),
        "the learning rate of param group 0 is nan",
    ),
    "inf": (
        lambda state: state["param_groups"][0].update(lr=float("inf")),
        "the learning rate of param group 0 is inf",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_numbers_that_no_training_has(tmp_path: Path, name: str) -> None:
    change, words = STATES[name]
    trained(1).save(tmp_path / "run")
    path = tmp_path / "run" / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    reseal(tmp_path / "run")
    with pytest.raises(UnsafeCheckpoint, match=words):
        Toy().load(tmp_path / "run")


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "model")
    save_file({"weight": torch.ones(2, 4), "extra": torch.zeros(2)}, directory / "a.safetensors")
    (directory / "model.safetensors.index.json").unlink()
    (directory / "a.safetensors").rename(directory / "model.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        load_model(directory)
    assert caught.value.missing == ["bias"]
    assert caught.value.unexpected == ["extra"]
    assert caught.value.mismatched == ["weight (file (2, 4), model (2, 3))"]
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(3, 2))
    report = booster.load_model(model, directory, strict=False)
    assert (report.missing, report.unexpected) == (["bias"], ["extra"])
    with pytest.raises(CheckpointNotFound, match="neither"):
        load_model(tmp_path)
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        load_model(tmp_path / "nowhere")


def test_what_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    toy = trained(1)
    for extra in ({"model": toy.model}, {"f": len}, {"a": {"b": [{1, 2}]}}, {"path": tmp_path}):
        with pytest.raises(ValueError, match="which a checkpoint cannot hold"):
            toy.save(tmp_path / "run", extra=extra)
    assert not (tmp_path / "run").exists()
    extra = {
        "none": None,
        "tuple": (1, (2.5, float("inf"))),
        3: {"x": [True]},
        "tensor": torch.arange(4),
        "half": torch.ones(2).bfloat16(),
    }
    toy.save(tmp_path / "run", extra=extra)
    loaded = Toy().load(tmp_path / "run")["extra"]
    assert {key: loaded[key] for key in ("none", "tuple", 3)} == {key: extra[key] for key in ("none", "tuple", 3)}
    assert all(
        torch.equal(loaded[key], extra[key]) and loaded[key].dtype == extra[key].dtype for key in ("tensor", "half")
    )
    with pytest.raises(ValueError, match="step='one'"):
        toy.booster.save(tmp_path / "run", model=toy.model, step="one")
    with pytest.raises(ValueError, match="pickle"):
        toy.booster.save_model(toy.model, tmp_path / "hf", use_safetensors=False)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
]
DTYPES += [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.arange(15).view(3, 5) % 2).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "strided": torch.arange(12.0).view(3, 4).t()}
    write_tensors(tmp_path / "ours.safetensors", [pending(*item) for item in tensors.items()])
    theirs = load_file(tmp_path / "ours.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs.safetensors")
    ours = TensorFile(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        for read in (theirs[name], ours.tensor(name)):
            assert read.dtype == tensor.dtype
            assert read.shape == tensor.shape
            assert torch.equal(
                read.float() if read.dtype.itemsize == 1 else read,
                tensor.float() if read.dtype.itemsize == 1 else tensor,
            )


def test_errors_have_types() -> None:
    assert issubclass(UnsafeCheckpoint, ValueError)
    assert issubclass(CheckpointMismatch, ValueError)
    assert issubclass(CheckpointDamaged, CheckpointError)
    assert issubclass(CheckpointNotFound, CheckpointError)
    assert issubclass(CheckpointError, RuntimeError)


def test_lazy_models_look_at_names_too(tmp_path: Path, opened: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    from shardwright.lazy import LazyInitContext
    from shardwright.testing import zoo

    zoo.build("llama-causal-lm").save_pretrained(tmp_path / "model", max_shard_size="50KB")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "../model/model-00001-of-00002.safetensors"
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with LazyInitContext(), pytest.raises(ValueError, match="plain names"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
