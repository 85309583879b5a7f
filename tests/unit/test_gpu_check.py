"""`scripts/gpu-check`: parts that hang or fail neither stop the others nor stay unsaid."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
SAYS = """
import json, os, sys
def say(**row):
    with open(os.environ["SHARDWRIGHT_GPU_RESULTS"], "a") as file:
        file.write(json.dumps(row) + "\\n")
"""
# What stands for a part: how it ends, and what it says of itself.
PARTS = {
    "well": 'say(name="a figure", ms=1.0)',
    "hangs": 'say(name="half a figure", ms=2.0)\nimport time\ntime.sleep(600)',
    "hangs with a child": "import subprocess, time\n"
    'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)\n'
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
    "fails": 'say(name="a figure", ms=3.0)\nraise RuntimeError("what went wrong")',
    "says nothing": "",
    "one figure fails": 'say(name="a figure", error="no memory")',
    "half a line": 'say(name="a figure", ms=4.0)\nopen(os.environ["SHARDWRIGHT_GPU_RESULTS"], "a").write("{")',
    "tests": 'say(collected=["one", "two"])\nsay(name="one", outcome="passed", text="")\n'
    'say(name="one", outcome="failed", text="clearing away")\nsay(name="one", outcome="passed", text="")\n'
    'say(name="three", outcome="failed", text="in the middle")',
}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    handler = signal.getsignal(signal.SIGTERM)
    spec = importlib.util.spec_from_file_location("gpu_check", FOLDER / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # where dataclasses look for names
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GRACE", 0.5)
    yield module
    signal.signal(signal.SIGTERM, handler)


def part(check: Any, name: str, budget: float = 30.0) -> Any:
    class Scripted(check.Part):  # type: ignore[misc]
        def command(self, options: argparse.Namespace, budget: float, out: Path) -> list[str]:
            return [sys.executable, "-c", SAYS + PARTS[name]]

    return Scripted(name, budget, measured="" if name == "tests" else name)


def left_by(check: Any) -> list[str]:
    """Processes of parts, which no other test starts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{check.MARK}=".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
    return found


def test_budgets_fit_into_the_limit(check: Any) -> None:
    """With what it takes to end every part and to write the report; nine minutes are 540 seconds."""
    check.GRACE = 3.0
    assert sum(part.budget + check.GRACE for part in check.PARTS) + check.LAST <= check.TOTAL < 540
    assert check.shares(check.PARTS, check.TOTAL, 1.0) == [part.budget for part in check.PARTS]
    assert check.shares(check.PARTS, 3600.0, check.REHEARSAL) == [7 * part.budget for part in check.PARTS]
    fewer = check.shares(check.PARTS, 200.0, 1.0)
    assert sum(fewer) + check.GRACE * len(fewer) + check.LAST == pytest.approx(200.0)


def test_parts_that_hang_or_fail(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = {"hangs": 1.5, "hangs with a child": 2.5}
    parts = [part(check, name, hanging.get(name, 60.0)) for name in PARTS]
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(check, "LEAST", 0.5)
    monkeypatch.setattr(check, "REHEARSAL", 1.0)
    monkeypatch.setattr(check, "clocks", dict)
    begin = time.monotonic()
    assert check.main(["--cpu", "--out", str(tmp_path)]) == 1
    assert time.monotonic() - begin < 120
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    said = {each["name"]: each["outcome"] for each in report["parts"]}
    assert said == {
        "well": "ended well",
        "hangs": "**stopped at its budget**",
        "hangs with a child": "**stopped at its budget**",
        "fails": "**failed** (exit status 1)",
        "says nothing": "**failed** (it took no figure)",
        "one figure fails": "**failed** (1 figures failed)",
        "half a line": "**failed** (1 lines of its results cannot be read)",
        "tests": "**failed** (2 tests failed, 1 tests were not run)",
    }
    text = (tmp_path / "gpu-report.md").read_text()
    for words in (
        *said.values(),
        "half a figure",
        "RuntimeError: what went wrong",
        "clearing away",
        "in the middle",
        "not run: two",
    ):
        assert words in text, words
    assert not left_by(check)


def test_what_has_no_time_is_named(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [part(check, "hangs", 1.0), part(check, "well", 1000.0)]
    monkeypatch.setattr(check, "PARTS", parts)
    monkeypatch.setattr(check, "clocks", dict)
    monkeypatch.setattr(check, "shares", lambda *_: [1.0, 1.0])
    assert check.main(["--cpu", "--seconds", "11", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "gpu-report.md").read_text()
    assert "not run: no time was left" in text
    assert "not run: well, all of it" in text


def test_a_run_that_is_ended_leaves_a_report_and_no_process(check: Any, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path[:0] = [{str(FOLDER)!r}, {str(Path(__file__).parent)!r}]\n"
        "import check, test_gpu_check as t\n"
        "check.PARTS = (t.part(check, 'hangs'), t.part(check, 'well'))\n"
        f"sys.exit(check.main(['--cpu', '--out', {str(tmp_path)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    report = tmp_path / "gpu-report.md"
    end = time.monotonic() + 60
    while not report.exists() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    process.terminate()
    assert process.wait(30) == 1
    text = report.read_text()
    assert text.count(check.ENDED_EARLY) >= 2
    assert not left_by(check)


def test_the_sanitizer_of_streams_is_there() -> None:
    """By a name that importing torch.cuda does not bring."""
    from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

    assert callable(enable_cuda_sanitizer)
    assert issubclass(CUDASanitizerErrors, Exception)
