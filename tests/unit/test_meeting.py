"""Where the store of a job listens: at the address that the user named, and nowhere else; and whom it brings together:
the ranks of one start, and none of an earlier one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.cluster import meeting
from tests.reliability.agent import torchrun

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


def names_of_a_start(store: dist.Store, world_size: int, late: int) -> list[str]:
    """Of the ranks, of which one comes after all others have looked."""
    names = [""] * world_size

    def come(rank: int) -> None:
        if rank == late:
            time.sleep(0.3)
        # a connection of its own, as of a process of its own
        mine = dist.TCPStore("127.0.0.1", store.port, None, False, timeout=LIMIT)  # type: ignore[attr-defined]
        names[rank] = meeting.agreed_name(mine, rank, world_size, LIMIT)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_starts_do_not_meet_one_another() -> None:
    """Also with other numbers of ranks, and whoever comes last."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LIMIT, wait_for_workers=False)
    found = []
    for world_size, late in ((3, 0), (3, 0), (3, 1), (2, 0), (4, 3), (1, 0), (2, 1)):
        names = names_of_a_start(store, world_size, late)
        assert len(set(names)) == 1
        found.append(names[0])
    assert len(set(found)) == len(found)


def test_a_rank_that_does_not_come() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LIMIT, wait_for_workers=False)
    with pytest.raises(dist.DistStoreError):
        meeting.agreed_name(store, 0, 2, timedelta(seconds=0.2))
    names_of_a_start(store, 2, late=0)
    for rank in (0, 1):  # what an earlier start has left changes nothing
        with pytest.raises(dist.DistStoreError):
            meeting.agreed_name(store, rank, 2, timedelta(seconds=1))


RESTARTED = """
import os, signal, time
import torch, torch.distributed as dist
import shardwright
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "0" and not first:
    time.sleep(1)  # the other rank finds what the killed one has left in torchrun's store
shardwright.launch_from_torch(backend="gloo", timeout=60)
total = torch.ones(1)
dist.all_reduce(total)
if first and dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"ENDED {int(total)}", flush=True)
"""


def test_torchrun_starts_killed_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESTARTED)
    ended = torchrun([str(tmp_path / "script.py")], tmp_path, restarts=1)
    assert ended.code == 0, ended.printed
    assert ended.printed.count("ENDED 4") == 2
