"""A save that is cut off anywhere, and files that rot afterwards: the next load takes the newest checkpoint that is
whole.
"""

from __future__ import annotations

import errno
import resource
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_toys import Toy, check_resumed, killed_at, operations, trained

from shardwright.files import disk
from shardwright.files.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound

SETTINGS = {
    "beside the last one": ("step-2", {}),
    "over the last one": ("step-1", {}),
    "removing the last one": ("step-2", {"keep_last": 1}),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with one checkpoint, after step 1."""
    trained(1).save(tmp_path / "run" / "step-1")
    return tmp_path / "run"


def copied(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:skipped")
def test_killed_at_every_operation(run: Path, setting: str) -> None:
    name, options = SETTINGS[setting]
    toy = trained(2)
    seen = operations(lambda: toy.save(copied(run, "whole") / name, **options))
    assert {operation.split()[0] for operation in seen} >= {"mkdir", "create", "write", "half-way", "fsync", "rename"}
    outcomes = []
    for number in range(len(seen)):
        place = copied(run, f"killed-{number}")
        killed_at(number, lambda place=place: toy.save(place / name, **options))
        outcomes.append(check_resumed(place, (1, 2))["step"])
        if name == "step-1":  # the path itself, too, must lead to it, under whatever name it is at the moment
            assert check_resumed(place / name, (1, 2))["step"] == outcomes[-1]
        trained(3).save(place / name, **options)
        assert check_resumed(place, (3,))["skipped"] == []
        assert not [child for child in place.iterdir() if child.name.startswith(f".{name}")]
        shutil.rmtree(place)
    # The new checkpoint counts from one moment on, and ever after.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}


def test_a_full_disk_at_every_operation(run: Path) -> None:
    toy = trained(2)
    seen = operations(lambda: toy.save(copied(run, "whole") / "step-2"))
    committed = next(number for number, operation in enumerate(seen) if operation.startswith("create COMMITTED"))
    for number in range(len(seen)):
        left = number

        def probe(operation: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

        place = copied(run, f"full-{number}")
        disk.set_probe(probe)
        try:
            with pytest.raises(OSError, match="No space left"):
                toy.save(place / "step-2")
        finally:
            disk.set_probe(None)
        if number <= committed:
            assert sorted(child.name for child in place.glob("*step-*")) == ["step-1"], "what was written is removed"
        check_resumed(place, (1, 2))
        toy.save(place / "step-2")
        check_resumed(place, (2,))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "removed":
        path.unlink()
    else:
        place = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[how.split()[0]]
        data[place] ^= 1 << 4
        path.write_bytes(data)


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("how", ["cut short", "emptied", "removed", "first byte", "middle byte", "last byte"])
def test_damage_to_every_file(run: Path, how: str) -> None:
    trained(2).save(run / "step-2")
    files = sorted(file.name for file in (run / "step-2").iterdir())
    assert files == ["COMMITTED", "manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json"]
    for file in files:
        place = copied(run, f"damaged-{file}")
        damage(place / "step-2" / file, how)
        if file == "COMMITTED" and how == "removed":
            named = "step-2"
        else:
            named = file
        with pytest.warns(RuntimeWarning, match=named):
            state = check_resumed(place, (1,))
        assert any(named in line for line in state["skipped"])
        with pytest.raises(CheckpointError, match=named):
            Toy().load(place / "step-2")


def test_the_only_checkpoint_damaged(run: Path) -> None:
    damage(run / "step-1" / "rank-00000.safetensors", "middle byte")
    with pytest.raises(CheckpointDamaged, match="another checksum") as caught:
        Toy().load(run / "step-1")
    assert caught.value.file == run / "step-1" / "rank-00000.safetensors"
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        Toy().load(run / "step-7")


def test_a_link_that_the_caller_names_is_followed(run: Path) -> None:
    trained(2).save(run / "step-2")
    for link, target, step in (("latest", run / "step-1", 1), ("runs", run, 2)):
        (run.parent / link).symlink_to(target)
        assert check_resumed(run.parent / link, (step,))["step"] == step
    (run / "step-9").symlink_to("step-1")  # below what was named nothing is followed
    assert Path(check_resumed(run, (2,))["path"]).name == "step-2"


def test_the_newest_wins_whatever_the_names(run: Path) -> None:
    trained(3).save(run / "aaa")
    trained(2).save(run / "zzz")  # went back and trained on: what was written last is what counts
    assert Path(check_resumed(run, (2,))["path"]).name == "zzz"


def test_retention(run: Path) -> None:
    for step in range(2, 6):
        trained(step).save(run / f"step-{step}", keep_last=2)
    assert sorted(child.name for child in run.glob("*step-*")) == ["step-4", "step-5"]
    with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
        trained(1).save(run / "step-6", keep_last=0)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="holds other files"):
        trained(1).save(tmp_path / "notes")
    with pytest.raises(ValueError, match="is a file"):
        trained(1).save(tmp_path / "notes" / "diary.txt")
    assert (tmp_path / "notes" / "diary.txt").read_text() == "dear diary"


def test_an_asynchronous_save_is_a_snapshot(run: Path) -> None:
    toy = trained(2)
    toy.save(run / "step-2", use_async=True)
    toy.train(4)  # while it is written
    toy.booster.wait()
    check_resumed(run, (2,))


def test_an_error_in_the_background_surfaces_at_the_next_call(run: Path) -> None:
    toy = trained(2)

    def probe(operation: str, path: Path) -> None:
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    disk.set_probe(probe)
    try:
        toy.save(run / "step-2", use_async=True)
        with pytest.raises(OSError, match="No space left"):
            toy.save(run / "step-2")
    finally:
        disk.set_probe(None)
    toy.save(run / "step-2", use_async=True)
    toy.save(run / "step-3", use_async=True)  # waits for the one before
    toy.booster.wait()
    toy.booster.wait()
    assert sorted(child.name for child in run.glob("*step-*")) == ["step-1", "step-2", "step-3"]
    assert torch.equal(toy.values()[0], trained(2).values()[0])


def test_a_file_that_cannot_grow_is_named(tmp_path: Path) -> None:
    """By the limit of `ulimit -f`, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"too large.*/weights'") as raised:
            disk.write_file(tmp_path / "weights", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
