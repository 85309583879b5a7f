"""Files of a checkpoint, by the names that its index gives them: plain names of regular files inside its directory,
nothing else.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import CheckpointDamaged, UnsafeCheckpoint


def inside(directory: Path, name: Any) -> Path:
    """The path of the file `name` of `directory`, which exists; UnsafeCheckpoint if that would be anywhere else.

    A link must end in the directory too, or in the blob store beside the snapshot folders of a HuggingFace cache.
    """
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or name != os.path.basename(name)
        or "\\" in name
        or "\0" in name
    ):
        raise UnsafeCheckpoint(
            f"{directory} names a file {name!r}: file names must be plain names inside the directory"
        )
    path, root = directory / name, directory.resolve()
    if path.is_symlink():
        target = path.resolve()
        roots = [root]
        if root.parent.name == "snapshots":
            roots.append(root.parent.parent / "blobs")
        if not any(target.is_relative_to(allowed) for allowed in roots):
            raise UnsafeCheckpoint(f"{path} is a link to {target}, outside its directory")
    if not path.exists():
        raise CheckpointDamaged(path, "is missing")
    if not path.is_file():
        raise UnsafeCheckpoint(f"{path} is not a regular file")
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(path, f"is not JSON ({error})") from None
