"""The store at which the ranks of a job meet.

[Note: earlier starts] torchrun serves one store for all starts of a job (seen in torch 2.13). Behind a restart there is
in it what the ranks of before have said of themselves, their addresses too, and a rank that looks before the others
have written anew tries to reach the dead. So each start has keys of its own. Their name is rank 0's, drawn at random;
the others cannot tell it from one of before, so each answers with a number of its own, and believes a name under which
it finds this number again.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger("shardwright")

_PAUSES = 0.05, 1.0  # seconds between two looks at a store, the first and the longest; a wait would print its timeout


def open_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Served by rank 0 at `port`: at the address alone that `host` is, or at all of the machine where it is a name.

    Nodes may resolve a name each in its own way (that of a machine is often a loopback address on itself), so that the
    address behind it may be one that the others cannot reach.
    """
    listening = _bound(host, port) if rank == 0 else None
    return dist.TCPStore(
        host, port, world_size, rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listening
    )


def agents_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The one that torchrun serves, with the keys of this start alone; see [Note: earlier starts]."""
    store = dist.TCPStore(host, port, world_size, False, timeout=timeout)
    name = agreed_name(dist.PrefixStore("shardwright/starts", store), rank, world_size, timeout)
    return dist.PrefixStore(f"shardwright/start/{name}", store)


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks of this start have, and none of another one: three messages per rank. Raises
    DistStoreError where not every rank comes.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("name", name)
        others = range(1, world_size)
        asked = [f"{name}/from/{other}" for other in others]
        if asked:
            store.wait(asked, timeout)
        for other, key in zip(others, asked, strict=True):
            store.set(f"{name}/to/{other}", store.get(key).decode())
        return name
    mine, answered = uuid.uuid4().hex, ""
    deadline = time.monotonic() + timeout.total_seconds()
    pause, longest = _PAUSES
    while time.monotonic() < deadline:
        name = store.get("name").decode()
        if name != answered:
            store.set(f"{name}/from/{rank}", mine)
            answered = name
        reply = f"{name}/to/{rank}"
        if store.check([reply]) and store.get(reply).decode() == mine:
            return name
        time.sleep(pause)  # no answer yet, or one of an earlier start: this one's rank 0 is still to come
        pause = min(1.5 * pause, longest)
    raise dist.DistStoreError(f"rank 0 of this start did not answer rank {rank}")


def _bound(host: str, port: int) -> int | None:
    """File descriptor of a socket at the address `host`, which torch's server closes; None where it finds its own."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's own, for jobs that start again at once
        found.bind((str(address), port))
    except OSError as error:
        found.close()
        # A taken port is told by torch, whose server this process may have there already.
        if error.errno != errno.EADDRINUSE:
            logger.warning(
                "host=%r cannot be listened at (%s): the store of this job listens at port %d of all addresses of this "
                "machine",
                host,
                error.strerror,
                port,
            )
        return None
    return found.detach()
