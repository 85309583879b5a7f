"""Settings shared by all tests."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch: rank processes inherit these, and two cores are shared by up to four ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # limits were chosen for one test at a time
    os.environ.setdefault("SHARDWRIGHT_PATIENCE", "3")

# Where torch checks that the collectives of all ranks match, which takes as long again as what else a rank does: what
# sends them, random layouts of everything together, DDP (which such groups must be kept from), and mistakes. A level in
# the environment holds for all tests.
CHECKED = (
    *("tests/ranks/", "tests/mistakes/", "tests/models/test_tp_collectives.py"),
    *("tests/plugins/test_layout_fuzz.py", "tests/plugins/test_data_parallel.py"),
)
GIVEN_LEVEL = os.environ.get("TORCH_DISTRIBUTED_DEBUG")

# See there. What a parameter adds to others of its test is looked for now and then, not with every change.
LEFT_OUT = tuple(
    line for line in Path(__file__).with_name("sweep.txt").read_text().splitlines() if line and line[0] != "#"
)

BEYOND_THE_LIMIT = 60.0  # seconds after which a test that no signal could end ends the whole run

_limit = pytest.StashKey[float]()
_stderr = 2
_reporter: Any = None  # what prints, in the process that has a terminal: workers have none


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): without effect, for want of pytest-timeout")
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr = os.dup(2)  # not the file that the output of a test goes to


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LEFT_OUT):
            item.add_marker("sweep")


def pytest_sessionstart(session: pytest.Session) -> None:
    global _reporter
    _reporter = session.config.pluginmanager.getplugin("terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failure when it happens: a run that is ended before its summary would say of none which it was."""
    if report.failed and _reporter is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = f": {crash.message.splitlines()[0][:300]}" if crash is not None and crash.message else ""
        _reporter.write_line(f"\nfailed: {report.nodeid} ({report.when}){message}", red=True)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process was started by no launcher; a job that it launches, and probes of its disk, end with the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    import torch.distributed as dist

    from shardwright.files import disk

    disk.set_probe(None)
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    checked = item.nodeid.startswith(CHECKED)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = GIVEN_LEVEL or ("DETAIL" if checked else "OFF")
    return (yield)


# A test over its limit fails by a signal and the next one runs; one that waits where no signal is heard must not wait
# for ever. Around the timer of pytest-timeout, which knows every way to say a limit; where it is not installed (on a
# machine that is lent for a GPU, say) there are none.


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    item.stash[_limit] = settings.timeout
    _end_the_run_after(settings.timeout)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A failure has stopped all timers: a debugger might have been started."""
    if _limit in item.stash:
        _end_the_run_after(item.stash[_limit])
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Iterator[None]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


def _end_the_run_after(limit: float) -> None:
    faulthandler.dump_traceback_later(limit + BEYOND_THE_LIMIT, exit=True, file=_stderr)
