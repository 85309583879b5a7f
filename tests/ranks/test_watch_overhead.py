"""What watching costs, in time of the processor, so that other work on the machine does not change it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forked_scripts import run_forked

MOST = 0.005  # of a step, or of the time that passes


def test_watching_costs_less_than_half_a_percent(tmp_path: Path) -> None:
    """The threads look twice a second; calls are noted by the main thread, here in steps of milliseconds."""
    codes, printed = run_forked(2, Path(__file__).with_name("watched_script.py"), cwd=tmp_path)
    assert codes == [0, 0], printed
    told = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(told) == 2
    for each in told:
        threads, notes = each["look"] / each["poll"], each["calls"] * each["call"] / each["step"]
        print(f"threads {threads:.3%}, notes {notes:.3%} of a step of {1000 * each['step']:.1f} ms")
        assert 0 < threads + notes < MOST, each
