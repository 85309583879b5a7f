"""Tests for one GPU, left out of the default run; see `place`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# How layouts are drawn and trained beside one process: the same on every device.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("plugins", "unit") if folder not in sys.path]

from place import DEVICE, REHEARSED

_MOST = 30_000  # characters of a failure, which may be that of many layouts


def pytest_collection_finish(session: pytest.Session) -> None:
    ours = [item for item in session.items if item.get_closest_marker("gpu")]
    if ours and not REHEARSED and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"{len(ours)} tests are marked gpu, and this machine shows no CUDA device (torch {torch.__version__}); "
            "SHARDWRIGHT_GPU_REHEARSAL=1 runs them on the CPU, at small sizes"
        )
    if ours:
        _say({"collected": [item.nodeid for item in ours]})


@pytest.fixture
def device() -> torch.device:
    """What tests compute on."""
    return torch.device(DEVICE)


# What `scripts/gpu-check` reads: a line for every test as it ends, so that a run that is cut short has said it.


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    text = str(report.longrepr or "")
    if report.skipped and isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    if len(text) > _MOST:
        text = f"({len(text) - _MOST} characters are left out)\n{text[-_MOST:]}"
    _say({"name": report.nodeid, "outcome": report.outcome, "text": text, "seconds": report.duration})


def _say(line: dict[str, Any]) -> None:
    if path := os.environ.get("SHARDWRIGHT_GPU_RESULTS"):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
