"""The list of a checkpoint's files with their sizes and checksums, and the marker that makes the checkpoint count.

The marker holds the manifest's own checksum and is written last. Without it a directory is what a crash left behind.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.disk import crc_of, sync_directory, write_file
from ..files.errors import CheckpointDamaged, UnsafeCheckpoint
from ..files.paths import inside, read_json

MANIFEST, MARKER = "manifest.json", "COMMITTED"
FORMAT = 1
_MAX_MARKER = 4096
_TABLE = re.compile(r"rank-\d+\.json")  # one of each rank


@dataclass(frozen=True)
class Manifest:
    """`files`: name -> (size, crc). `saved_at`: nanoseconds since 1970 by rank 0's clock, ascending from save to
    save.
    """

    files: Mapping[str, tuple[int, int]]
    saved_at: int
    step: int | None
    world_size: int


def commit(directory: Path, manifest: Manifest) -> None:
    """Write manifest and marker; the checkpoint counts from the moment the marker is on disk."""
    table = {
        "format": FORMAT,
        "saved_at": manifest.saved_at,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": {name: {"size": size, "crc32": crc} for name, (size, crc) in sorted(manifest.files.items())},
    }
    size, crc = write_file(directory / MANIFEST, json.dumps(table, indent=1).encode())
    sync_directory(directory)
    marker = {"manifest_size": size, "manifest_crc32": crc, "saved_at": manifest.saved_at, "step": manifest.step}
    write_file(directory / MARKER, json.dumps({**marker, "crc32": _crc_of(marker)}).encode())
    sync_directory(directory)


def read_marker(directory: Path) -> dict[str, Any]:
    """The marker of a committed checkpoint; CheckpointDamaged if there is none."""
    path = inside(directory, MARKER)
    if path.stat().st_size > _MAX_MARKER:
        raise CheckpointDamaged(path, f"is larger than any marker ({path.stat().st_size} bytes)")
    marker = read_json(path)
    keys = ("manifest_size", "manifest_crc32", "saved_at")
    if not isinstance(marker, dict) or not all(isinstance(marker.get(key), int) for key in keys):
        raise CheckpointDamaged(path, "is not a marker")
    if marker.pop("crc32", None) != _crc_of(marker):
        raise CheckpointDamaged(path, "has another checksum than when it was written")
    return marker


def _crc_of(marker: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker, sort_keys=True).encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest, after its checksum was compared with the marker's."""
    marker = read_marker(directory)
    path = inside(directory, MANIFEST)
    if path.stat().st_size != marker["manifest_size"] or crc_of(path) != marker["manifest_crc32"]:
        raise CheckpointDamaged(path, "has another checksum than its marker says")
    table = read_json(path)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else None
        raise CheckpointDamaged(path, f"is of format {found!r}; this version reads format {FORMAT}")
    try:
        files = {name: (int(entry["size"]), int(entry["crc32"])) for name, entry in table["files"].items()}
        manifest = Manifest(files, int(table["saved_at"]), table["step"], int(table["world_size"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnsafeCheckpoint(f"{path}: not a manifest ({error!r})") from None
    tables = sum(_TABLE.fullmatch(name) is not None for name in files)
    if manifest.world_size != tables or tables == 0:
        raise CheckpointDamaged(path, f"is of {manifest.world_size} ranks and lists files of {tables}")
    return manifest


def verify(directory: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> None:
    """Compare sizes of all files, and checksums of every n-th file from the i-th on for `share` (i, n), with the
    manifest.
    """
    number, of = share
    for position, (name, (size, crc)) in enumerate(sorted(manifest.files.items())):
        path = inside(directory, name)
        actual = path.stat().st_size
        if actual != size:
            raise CheckpointDamaged(path, f"has {actual} bytes instead of {size}")
        if position % of == number and crc_of(path) != crc:
            raise CheckpointDamaged(path, "has another checksum than when it was written")
