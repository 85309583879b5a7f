"""Random faults for some minutes: SIGKILL, SIGSTOP, SIGTERM and losses that are nan, drawn for each rank and step. Jobs
that were hit are started again until they are through, and end with the bits of one that never was.

    SOAK_MINUTES=30 python -m pytest tests/reliability/test_soak.py -m sweep -s
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.reliability.test_elastic_jobs import final, never_hit, train

MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
STARTS = 40  # of one job, until it must be through


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_jobs_that_are_hit_at_random_end_alike(tmp_path: Path) -> None:
    expected, until = never_hit("zero2", tmp_path / "well"), time.monotonic() + 60 * MINUTES
    faults, jobs, starts = Counter[str](), 0, 0
    while jobs == 0 or time.monotonic() < until:
        jobs += 1
        directory = tmp_path / f"job-{jobs}"
        told = ""
        for _ in range(STARTS):
            starts += 1
            told = "\n--\n".join(train("zero2", directory, SOAK=f"{jobs}:0.25").printed)
            if (directory / "final.safetensors").exists():
                break
        weights = final(directory)
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items()), told
        faults.update(mark.read_text() for mark in directory.glob("hit-*"))
    print(f"{jobs} jobs, {starts} starts, {dict(faults)}: all ended with the same bits")
