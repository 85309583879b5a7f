"""Names in files that come from elsewhere: plain names of regular files inside a directory, nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class UnsafePath(ValueError):
    """A name that leads out of its directory, or to something that is not a file."""


def inside(directory: Path, name: Any) -> Path:
    """The path of the file `name` of `directory`, or UnsafePath if that would be anywhere else. The file need not
    exist.

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
        raise UnsafePath(f"{directory} names a file {name!r}: file names must be plain names inside the directory")
    path, root = directory / name, directory.resolve()
    if path.is_symlink():
        target = path.resolve()
        roots = [root]
        if root.parent.name == "snapshots":
            roots.append(root.parent.parent / "blobs")
        if not any(target.is_relative_to(allowed) for allowed in roots):
            raise UnsafePath(f"{path} is a link to {target}, outside its directory")
    if path.exists() and not path.is_file():
        raise UnsafePath(f"{path} is not a regular file")
    return path
