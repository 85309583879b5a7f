"""Files that commands write at their end."""

from __future__ import annotations

import os
from pathlib import Path


def refusal(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror}); name a file in a directory that you may write to"


def problem_with(path: Path) -> str:
    """Why `path` could not be written, asked before anything is computed for it; "" where it can."""
    was_there = path.exists()
    try:
        with path.open("ab") as file:
            if not path.is_file():  # a device, which takes what it is sent or does not, even where that is nothing
                os.write(file.fileno(), b"")
        if not was_there:
            path.unlink()
    except OSError as error:
        return refusal(path, error)
    return ""
