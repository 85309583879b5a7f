"""From a finished directory to the checkpoint under its name, and back to the newest one after a crash.

A save fills `.name.new` beside the target, and publishes it in two renames:

    name -> .name.old  (only when there was one),  .name.new -> name,  then .name.old is removed

At every moment one complete checkpoint is there, perhaps under a hidden name, and readers look there too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..files.disk import make_directory, remove_tree, rename, sync_directory
from ..files.errors import CheckpointDamaged, CheckpointNotFound, UnsafeCheckpoint
from .lock import lock
from .manifest import MANIFEST, MARKER, read_marker

_NEW, _REMOVED = ".new", ".removed"


class Candidate(NamedTuple):
    """A directory with a marker; `saved_at` orders them."""

    path: Path
    saved_at: int
    step: int | None


def new_path(target: Path) -> Path:
    return target.parent / f".{target.name}{_NEW}"


def old_path(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def prepare(target: Path, keeps_few: bool = False) -> Path:
    """An empty directory to fill for `target`, after finishing what a crashed save left behind. `keeps_few`: older
    checkpoints beside it will be removed.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(
            f"cannot save to {target}: it is a {'link' if target.is_symlink() else 'file'}, give the path "
            "of a directory"
        )
    if target.exists() and any(target.iterdir()) and not _is_ours(target):
        raise ValueError(
            f"cannot save to {target}: it holds other files; give a path of its own, such as {target / 'step-100'}"
        )
    fresh, old = new_path(target), old_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock(target, whole=keeps_few)
    if fresh.exists():
        if _is_committed(fresh):
            publish(target)
        else:
            remove_tree(fresh)
    if old.exists():
        if not target.exists() or (_is_committed(old) and not _is_committed(target)):
            if target.exists():
                remove_tree(target)
            rename(old, target)
            sync_directory(target.parent)
        else:
            remove_tree(old)
    make_directory(fresh)
    return fresh


def publish(target: Path) -> None:
    """Give the committed directory of `prepare` its name."""
    fresh, old = new_path(target), old_path(target)
    if target.exists():
        if old.exists():
            remove_tree(old)
        rename(target, old)
    rename(fresh, target)
    sync_directory(target.parent)
    if old.exists():
        remove_tree(old)


def discard(target: Path) -> None:
    """Remove what a failed save has written; the checkpoint under the name, if any, stays."""
    fresh = new_path(target)
    if fresh.exists():
        remove_tree(fresh)


def candidates(path: Path) -> tuple[list[Candidate], list[str]]:
    """(committed checkpoints at or below `path`, newest first; a line for every directory that is none, with the
    reason).
    """
    path = path.resolve() if path.is_symlink() else path  # a link that the caller names is one to follow
    if path.is_dir() and (path / MARKER).exists():
        places = [path, new_path(path), old_path(path)]
    else:
        places = [new_path(path), old_path(path)]
        if path.is_dir():
            places += sorted(child for child in path.iterdir() if child.is_dir())
            if _is_ours(path):
                places.append(path)
    found, rejected = [], []
    for place in places:
        if not place.is_dir() or place.is_symlink() or place.name.endswith(_REMOVED):
            continue
        try:
            marker: dict[str, Any] = read_marker(place)
            found.append(Candidate(place, marker["saved_at"], marker.get("step")))
        except (CheckpointDamaged, UnsafeCheckpoint) as error:
            if _is_ours(place):
                rejected.append(f"{error} (an unfinished save)")
    return sorted(found, key=lambda candidate: -candidate.saved_at), rejected


def not_found(path: Path, rejected: list[str]) -> CheckpointNotFound:
    lines = [f"no usable checkpoint at {path}" if path.exists() else f"{path} does not exist", *rejected]
    return CheckpointNotFound("\n  ".join(lines))


def retain(target: Path, keep_last: int) -> list[Path]:
    """Remove all but the `keep_last` newest checkpoints beside `target`, and what crashes left there; returns what
    was removed.
    """
    found, leftovers = [], []
    for child in target.parent.iterdir():
        if not child.is_dir() or child.is_symlink() or child == target:
            continue
        if child.name.endswith(_REMOVED) or (
            child.name.endswith(_NEW) and _is_ours(child) and not _is_committed(child)
        ):
            leftovers.append(child)
        elif _is_committed(child):
            found.append((read_marker(child)["saved_at"], child))
    removed = [child for _, child in sorted(found, reverse=True)[keep_last - 1 :]]
    for child in removed:
        # a name that says so, should the removal be cut off
        doomed = child.parent / f".{child.name.lstrip('.')}{_REMOVED}"
        if doomed.exists():
            remove_tree(doomed)
            leftovers.remove(doomed)
        rename(child, doomed)
        leftovers.append(doomed)
    for child in leftovers:
        remove_tree(child)
    return removed


def _is_committed(path: Path) -> bool:
    try:
        read_marker(path)
    except (CheckpointDamaged, UnsafeCheckpoint):
        return False
    return True


def _is_ours(path: Path) -> bool:
    return (
        any((path / name).exists() for name in (MANIFEST, MARKER))
        or any(path.glob("rank-*.json"))
        or any(path.glob("rank-*.safetensors"))
    )
