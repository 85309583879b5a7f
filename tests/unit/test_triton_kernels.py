"""Runs tests/unit/triton_kernels.py where Triton is told, before anything imports it, to interpret its kernels, and
tests/unit/compiled_kernels.py where it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
def test_triton_kernels_equal_torch() -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    cases = Path(__file__).with_name("triton_kernels.py")
    run = subprocess.run(
        [*command, str(cases)], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    """Down to machine code, which needs no GPU."""
    script = Path(__file__).with_name("compiled_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert int(run.stdout.split()[0]) >= 40
