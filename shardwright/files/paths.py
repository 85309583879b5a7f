"""Files of a checkpoint, by the names that its index gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..utils import paths
from .errors import CheckpointDamaged, UnsafeCheckpoint


def inside(directory: Path, name: Any) -> Path:
    """The path of the file `name`, which exists; see `utils.paths.inside` for what names may be."""
    try:
        path = paths.inside(directory, name)
    except paths.UnsafePath as error:
        raise UnsafeCheckpoint(str(error)) from None
    if not path.exists():
        raise CheckpointDamaged(path, "is missing")
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(path, f"is not JSON ({error})") from None
