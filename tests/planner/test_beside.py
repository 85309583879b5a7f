"""Two computations at once are both done, whatever the process has done before."""

from __future__ import annotations

import subprocess
import sys

# Ids of long texts are real numbers: torch looks through them with all threads, of which a copy has one.
SCRIPT = """
import torch
from shardwright.planner.beside import both

def largest():
    return int(torch.arange(10**6).aminmax()[1])

torch.set_num_threads(2)
largest()
print(*both(largest, largest))
"""


def test_a_copy_of_a_process_with_threads_of_torch_answers() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.split() == ["999999", "999999"]
