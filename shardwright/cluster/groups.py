"""Process groups as a whole: made with the job's timeout, closed so that whoever waits in them wakes, and given new
connections.

[Note: closing groups]
Neither `abort` nor `shutdown` does anything on gloo (torch 2.13). A wait with a timeout that strikes does: gloo then
closes all connections of the group on this rank, so that every operation of the group that waits fails, here and on the
peers that wait for this rank. So a receive that nobody answers is posted and waited for one millisecond. NCCL's `abort`
ends its kernels and wakes its waits.

[Note: new connections]
Groups are referred to from everywhere: layers, buckets, meshes, torch's own wrappers. So the groups stay and get new
backends: `ProcessGroup._register_backend` puts one in the place of another when it comes under a type that the group
has not had yet, and torch 2.13 has four such types to spare, so a job can recover four times. Checked on torch 2.13,
gloo.

[Note: names of groups]
The members of a group meet under its name. torch makes it up from the number of groups that each rank is a member of
(`use_local_synchronization`) or has been asked for, which differ between ranks once a script has made a group of some
of them, or has destroyed one: then they wait for each other under different names. So shared groups are named after
what they are.

[Note: forks]
The end of a gloo group waits for its threads, which a forked child does not have. A group that nobody needs any more
lies about until Python collects garbage, and where that happens in the child, a worker of a DataLoader say, it hangs
(gdb: `~ProcessGroupGloo`). So what is there at a fork is frozen, which keeps the child's collector away from it, and
the parent's goes on with it afterwards. Where something is frozen already, by a script or because this is a child that
forks itself, the parent is left as it is: `gc.unfreeze` knows no part of what is frozen, and would undo the script's
own, or give what was kept out of a child to its collector. Then only the child freezes, when it begins.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import without_store

_NOBODY_SENDS = 0x7FFFFFF0  # a tag
_SPARE_TYPES = ("CUSTOM", "UCC", "MPI", "XCCL")
MOST_RECOVERIES = len(_SPARE_TYPES)

_fork = threading.local()  # `froze`: whether the fork that this thread is at froze anything
_timeout: timedelta | None = None
_shared: dict[Hashable, dist.ProcessGroup] = {}
_shared_by: dist.ProcessGroup | None = None
_jobs = 0  # of several ranks, in which groups were shared
_made: dict[Hashable, int] = {}  # groups per key, in this job


def set_timeout(timeout: timedelta) -> None:
    """Of every group made by `new_group` from now on."""
    global _timeout
    _timeout = timeout


def get_timeout() -> timedelta | None:
    """What `launch(timeout=)` said; None where the process group was made by somebody else."""
    return _timeout


@functools.cache
def keep_out_of_forks() -> None:
    """No child that is forked from now on ends the groups of this process. See [Note: forks]."""
    os.register_at_fork(before=_freeze, after_in_parent=_unfreeze, after_in_child=gc.freeze)


def _freeze() -> None:
    _fork.froze = gc.get_freeze_count() == 0
    if _fork.froze:
        gc.freeze()


def _unfreeze() -> None:
    if _fork.froze:
        gc.unfreeze()


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """`torch.distributed.new_group` under the job's timeout, which torch does not pass on by itself."""
    if _timeout is not None:
        options.setdefault("timeout", _timeout)
    keep_out_of_forks()
    try:
        group = dist.new_group(list(ranks) if ranks is not None else None, **options)
    except dist.DistNetworkError as error:
        raise without_store("a process group could not be made", "the process of rank 0 or torchrun") from error
    assert isinstance(group, dist.ProcessGroup)
    return group


def shared_group(key: Hashable, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """The group that was made under `key`, or a new one: plugins of the same layout use the same connections.

    Every group takes threads, connections and, on NCCL, device memory, and torch keeps it until the job ends. All
    members must find a key, or none of them. See [Note: names of groups].
    """
    global _shared_by, _jobs
    if _shared_by is not dist.group.WORLD:  # another process group than the last time
        _shared.clear()
        _made.clear()
        _shared_by = dist.group.WORLD
        _forget_meshes()
        _jobs += dist.get_world_size() > 1
    if key not in _shared or _shared[key] not in distributed_c10d._world.pg_map:  # the script may have destroyed it
        _made[key] = _made.get(key, 0) + 1
        if _made[key] > 1:
            _forget_meshes()
        with _named(repr(("shardwright", _jobs, key, ranks, _made[key]))):
            _shared[key] = new_group(ranks, **options)
    return _shared[key]


def _forget_meshes() -> None:
    """Let torch forget meshes of groups that are gone.

    DTensors keep what came of an operation together with the mesh that it was first done on, and take meshes of the
    same ranks for the same. Checked on torch 2.13: after a step, HSDP's parameters had the mesh of the job before.
    Other versions may not have the function.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is not None:
            clear()


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Groups made inside get this name. Checked on torch 2.13:
    `torch.distributed.distributed_c10d._process_group_name`.
    """
    torchs = distributed_c10d._process_group_name
    digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    distributed_c10d._process_group_name = lambda *_, **__: digest  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = torchs


def all_groups() -> list[dist.ProcessGroup]:
    """Every group that this process is a member of, whoever made it, in the order in which they were made."""
    return [group for group in distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]


def close_all() -> None:
    """Wake everything that waits in any group of this process; the groups cannot be used afterwards. See [Note:
    closing groups].
    """
    for group in all_groups():
        if group.size() > 1:
            for backend in _backends(group):
                _close(backend, group)


def _close(backend: Any, group: dist.ProcessGroup) -> None:
    if "nccl" in backend.name():
        backend.abort()
        return
    with contextlib.suppress(RuntimeError):  # that it timed out, or that the connections were closed before
        backend.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NOBODY_SENDS).wait(timedelta(milliseconds=1))


def reconnect_all(store: dist.Store, generation: int) -> None:
    """New connections for every group, which all ranks ask for together. `generation` counts the times, from 1.

    See [Note: new connections].
    """
    kind = getattr(dist.ProcessGroup.BackendType, _SPARE_TYPES[generation - 1])
    for group in all_groups():
        if group.size() > 1:
            own = dist.PrefixStore(f"shardwright/{generation}/{group.group_name}", store)
            backend = dist.ProcessGroupGloo(own, group.rank(), group.size(), _timeout or timedelta(minutes=30))
            group._register_backend(torch.device("cpu"), kind, backend)


def calls_of(group: dist.ProcessGroup) -> int:
    """Collectives that this rank has called in the group; 0 where its backend does not count. Checked on torch 2.13:
    gloo and NCCL do, and count no messages.
    """
    with contextlib.suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return 0


def can_reconnect() -> bool:
    return all("nccl" not in backend.name() for group in all_groups() for backend in _backends(group))


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]
