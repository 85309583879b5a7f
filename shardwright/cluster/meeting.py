"""The store at which the ranks of a job meet."""

from __future__ import annotations

import ipaddress
import logging
import socket
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger("shardwright")


def open_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Served by rank 0 at `port`: at the address alone that `host` is, or at all of the machine where it is a name.

    Nodes may resolve a name each in its own way (that of a machine is often a loopback address on itself), so that the
    address behind it may be one that the others cannot reach.
    """
    listening = _bound(host, port) if rank == 0 else None
    return dist.TCPStore(
        host, port, world_size, rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listening
    )


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
        if "in use" not in str(error):
            logger.warning(
                "host=%r cannot be listened at (%s): the store of this job listens at port %d of all addresses of this "
                "machine",
                host,
                error.strerror,
                port,
            )
        return None
    return found.detach()
