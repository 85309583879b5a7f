"""Settings shared by all tests."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

# Before anything imports torch: rank processes inherit these, and two cores are shared by up to four ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BEYOND_THE_LIMIT = 60.0  # seconds after which a test that no signal could end ends the whole run

_stderr = 2


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr = os.dup(2)  # not the file that the output of a test goes to


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test over its limit fails by a signal and the next one runs; one that waits where no signal is heard must not wait for ever."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + BEYOND_THE_LIMIT, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
