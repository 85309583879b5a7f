"""Where the store of a job listens: at the address that the user named, and nowhere else."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

import pytest

from shardwright.cluster import meeting

LIMIT = timedelta(seconds=20)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.3"])
def test_an_address_is_the_only_one(host: str) -> None:
    port = free_port()
    store = meeting.open_store(host, port, 0, 1, LIMIT)
    store.set("key", "value")
    assert store.get("key") == b"value"
    own = "127.0.0.1" if host == "localhost" else host
    assert answers(own, port)
    assert not answers("127.0.0.2", port)
    again = meeting.open_store(host, port, 0, 1, LIMIT)  # a process that joins again, with the first store still there
    assert again.get("key") == b"value"


def test_a_name_is_all_addresses() -> None:
    """It may lead elsewhere from another machine."""
    assert meeting._bound("localhost.localdomain", free_port()) is None


def test_an_address_of_another_machine(caplog: pytest.LogCaptureFixture) -> None:
    """As behind a router, or outside of a container."""
    with caplog.at_level(logging.WARNING, "shardwright"):
        assert meeting._bound("192.0.2.1", 4000) is None
    assert "host='192.0.2.1' cannot be listened at" in caplog.text
    assert "port 4000 of all addresses" in caplog.text
