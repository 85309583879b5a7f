"""Joining the job: one process group, one device, one seed."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import itertools
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..utils.arguments import explained
from ..utils.device import device_type_of_backend
from ..utils.errors import nearest
from ..utils.nccl import NCCL
from ..utils.random import set_seed
from . import ending, environment, groups, job
from .config import load_config, set_launch_config
from .determinism import check_deterministic, make_deterministic
from .heart import LEAST, Budgets, heart
from .meeting import agents_store, open_store
from .watch import Watch
from .watchdog import Watchdog

logger = logging.getLogger("shardwright")

StepTimeout = float | str | None
Config = str | Path | Mapping[str, Any] | None
DEFAULT_TIMEOUT = timedelta(minutes=10)
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
_BACKENDS = ("nccl", "gloo", "fake")  # and those that a program has registered
_OTHERS = ("undefined", "mpi", "ucc", "xccl")  # torch's own that nothing here was tried with

_end_watch: Callable[[], None] | None = None  # of the job that this process belongs to
_member = 0  # the process that joined; its forked children inherit all else
_joined = itertools.count()  # jobs of several ranks that this process has joined
_hook: Any = None  # of exceptions, before torch has wrapped it


@explained({})
def launch(
    rank: int,
    world_size: int,
    host: str | None,
    port: int | None,
    backend: str | None = None,
    seed: int = 1024,
    local_rank: int | None = None,
    config: Config = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    verbose: bool = False,
    step_timeout: StepTimeout = "auto",
    deterministic: bool = False,
    idle_timeout: float | None = None,
) -> None:
    """Join the job of `world_size` processes as `rank`; rank 0 listens at `host:port`.

    backend     "nccl", "gloo" or one per device ("cpu:gloo,cuda:nccl"); by default both where CUDA is present, else
                gloo
    seed        seeds python, numpy and torch alike on every rank, so that ranks build the same model
    local_rank  index of this process on its node, which is also the CUDA device it takes; by default rank modulo device
                count
    config      a dict or the path of a Python file; `HybridParallelPlugin.from_config()` reads its `parallel` entry.
                A tensor size of more than 1 in it sets CUDA_DEVICE_MAX_CONNECTIONS=1 unless the user has set it
    timeout     of every collective and message in every group that shardwright makes, and of joining itself; a
                timedelta or seconds. When it strikes, the job ends and says what every rank was doing
    step_timeout  seconds that one step (execute_pipeline, a forward, a backward, an optimizer step) may take. A job in
                which one takes longer ends with exit code 79 and says which rank the others waited for, and where it
                stood. "auto" learns it from the steps before: 20 times the longest, and at least 9/10 of
                `timeout`; None: for ever
    deterministic  two runs of one script on one layout give the same bits: operators that could not are refused by
                their names. False leaves torch as it is
    idle_timeout  seconds that ranks may spend in the script's own code, behind one call of shardwright's and before the
                next: a job in which one takes longer ends as by step_timeout, also where all of them hang there, which
                no other rank waits for. None: for ever; rank 0 says so after `timeout`

    A second call with the same rank and world size only sets the seed and the configuration, and step_timeout and
    idle_timeout where it names others than the defaults, which leave what was set and learned before.
    """
    global _member
    loaded = load_config(config)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must lie in 0..{world_size - 1} for world_size={world_size}")
    resolved = resolve_backend(backend)
    limit = _limit(timeout)
    budgets = Budgets(_step_limit(step_timeout), LEAST * limit.total_seconds())
    idle = _idle_limit(idle_timeout)
    check_deterministic(deterministic)
    is_watched = dist.is_initialized() and job.current() is not None  # by what an earlier call has set up
    if deterministic:
        make_deterministic()
    groups.keep_out_of_forks()
    if dist.is_initialized():
        _check_same_job(rank, world_size, backend, limit)
    else:
        if device_type_of_backend(resolved) == "cuda":
            _order_kernels(loaded)
            _tell_nccl()
            _take_device(rank if local_rank is None else local_rank, explicit=local_rank is not None)
        if _end_watch is not None:
            _end_watch()  # of a job whose process group was destroyed
        _join(rank, world_size, host, port, resolved, limit)
        os.environ.setdefault("LOCAL_RANK", str(rank if local_rank is None else local_rank))
        atexit.unregister(_leave)  # once is enough for a process that joins again
        atexit.register(_leave)
        _member = os.getpid()
    if world_size > 1 and job.current() is None and dist.get_backend() != "fake":
        _fail_together(limit)
    if is_watched and idle is None:
        idle = heart.budgets.idle
    if not is_watched:
        heart.since = math.inf  # of a job before this one
    if step_timeout != "auto" or not is_watched:
        heart.budgets = budgets
    heart.budgets.idle = idle
    set_seed(seed)
    set_launch_config(loaded)
    if verbose and rank == 0:
        logger.warning("shardwright: %d rank(s), backend %s, seed %d", world_size, dist.get_backend(), seed)


@explained({})
def launch_from_torch(
    seed: int = 1024,
    backend: str | None = None,
    verbose: bool = False,
    config: Config = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    step_timeout: StepTimeout = "auto",
    deterministic: bool = False,
    idle_timeout: float | None = None,
) -> None:
    """Join the job that torchrun, srun or mpirun started; under plain python become a job of one process."""
    _launch_as(environment.detect(), backend, seed, config, timeout, verbose, step_timeout, deterministic, idle_timeout)


@explained({})
def launch_from_slurm(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = False,
    config: Config = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    step_timeout: StepTimeout = "auto",
    deterministic: bool = False,
    idle_timeout: float | None = None,
) -> None:
    """Join the job that srun started. `host` defaults to the first node of the step, `port` to one derived from the
    job id.
    """
    _launch_as(
        environment.from_slurm(host=host, port=port),
        backend,
        seed,
        config,
        timeout,
        verbose,
        step_timeout,
        deterministic,
        idle_timeout,
    )


@explained({})
def launch_from_openmpi(
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = False,
    config: Config = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    step_timeout: StepTimeout = "auto",
    deterministic: bool = False,
    idle_timeout: float | None = None,
) -> None:
    """Join the job that OpenMPI's mpirun started. `host` is where rank 0 runs; without it, MASTER_ADDR or this
    machine.
    """
    _launch_as(
        environment.from_openmpi(host=host, port=port),
        backend,
        seed,
        config,
        timeout,
        verbose,
        step_timeout,
        deterministic,
        idle_timeout,
    )


def _launch_as(
    me: environment.ProcessIdentity,
    backend: str | None,
    seed: int,
    config: Config,
    timeout: timedelta | float,
    verbose: bool,
    step_timeout: StepTimeout,
    deterministic: bool,
    idle_timeout: float | None,
) -> None:
    place = me.rank, me.world_size, me.host, me.port
    launch(*place, backend, seed, me.local_rank, config, timeout, verbose, step_timeout, deterministic, idle_timeout)


def resolve_backend(backend: str | None) -> str:
    """The backend string for torch; an explicit one is honoured or refused, never replaced."""
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    for part in backend.split(","):
        name = part.split(":")[-1].strip()
        if name not in _BACKENDS and (name in _OTHERS or name not in dist.Backend.backend_list):
            raise ValueError(
                f"backend={backend!r}: {name!r} is not one of {', '.join(map(repr, _BACKENDS))} "
                f"(or one per device: 'cpu:gloo,cuda:nccl'){nearest(name, _BACKENDS)}"
            )
        if name == "nccl" and not torch.cuda.is_available():
            raise ValueError(
                f"backend={backend!r} needs a CUDA device and this machine shows none; use backend='gloo' "
                "or leave it out"
            )
    return backend


def _join(rank: int, world_size: int, host: str | None, port: int | None, backend: str, timeout: timedelta) -> None:
    _forget_torch_hook()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.set_debug_level(dist.DebugLevel.INFO)  # the checker of DETAIL asks peers, and there are none
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return
    if world_size == 1 and host is None:
        # No peers: an in-memory store needs no port, so many single-process jobs run side by side.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if host is None or port is None:
        raise ValueError(
            f"host={host!r} and port={port!r} must say where rank 0 listens when world_size={world_size} "
            "is more than one"
        )
    under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_ADDR") == host
    try:
        meet = agents_store if under_torchrun else open_store  # torchrun serves a store at this address
        store = meet(host, port, rank, world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} of {world_size} waited {timeout.total_seconds():.0f} s at {host}:{port} and not every rank "
            f"came: check that {world_size} processes were started with the same host and port, and that the port is "
            "reachable from every node"
        ) from error
    except dist.DistNetworkError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise ValueError(
                f"port={port} of {host} is taken by another program (another job on this machine?): give all ranks a "
                "free one, by launch(port=...), MASTER_PORT or torchrun's --master-port"
            ) from error
        raise RuntimeError(
            f"rank {rank} of {world_size} could not join at {host}:{port}: check that rank 0 runs there, that no other "
            "program listens at that port, and that it is reachable from every node"
        ) from error


def _forget_torch_hook() -> None:
    """Every group that torch makes wraps the hook of exceptions once more, for a prefix: the second job of a process
    would print `[rank0]: [rank0]: Traceback`.
    """
    global _hook
    if _hook is not None and getattr(sys.excepthook, "__module__", "") == dist.distributed_c10d.__name__:
        sys.excepthook = _hook
    _hook = sys.excepthook


def _fail_together(timeout: timedelta) -> None:
    """Let this rank hear of the failures of others, and others of its own; see `cluster.job`."""
    global _end_watch
    # Checked on torch 2.13: the store of the default group has no public name. torchrun's outlives the group, with all
    # that was said in it.
    store = dist.PrefixStore(f"shardwright/{next(_joined)}", dist.distributed_c10d._get_default_store())
    me = job.Job(store, dist.get_rank(), dist.get_world_size())
    me.meet_server()  # before it may be stopped or gone
    job.set_current(me)
    groups.set_timeout(timeout)
    watch = Watch(me)
    watchdog = Watchdog(me, lambda: watch.asked)
    watch.install()
    watchdog.start()
    ending.remember_exits()
    default = sys.excepthook
    process = os.getpid()

    def end_by_exception(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() == process:
            ending.excepthook(me, kind, error, tb)
        else:
            default(kind, error, tb)

    def end_watch() -> None:
        global _end_watch
        _end_watch = None
        atexit.unregister(stop)
        watchdog.stop()
        watch.stop()
        if sys.excepthook is end_by_exception:
            sys.excepthook = default
        job.set_current(None)

    def stop() -> None:
        if os.getpid() == process:
            ending.at_exit(me)
            end_watch()

    sys.excepthook = end_by_exception
    _end_watch = end_watch
    # Handlers run last in, first out: this one before `_leave`, where `launch` registered it.
    atexit.register(stop)


def _leave() -> None:
    """Close the process groups at exit.

    gloo's threads abort the interpreter when they outlive it, also after an exception, where the abort would bury the
    traceback. NCCL may wait for its peers, so a failing rank leaves its communicators to the operating system.

    A group that something still refers to (a sharded layer does) stays, and its threads with it. They take Python's
    lock once more after a collective, to let go of its tensors, and a thread that asks for the lock while the
    interpreter is taken apart aborts it: they get a moment to finish.
    """
    if os.getpid() != _member:
        # A forked child has none of the threads that closing would wait for; groups and store must not even be freed.
        if dist.is_initialized():
            for kept in (dist.distributed_c10d._get_default_store(), *groups.all_groups()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return
    ending.last_act()
    failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not (failed and "nccl" in dist.get_backend()):
        if "gloo" in dist.get_backend():
            time.sleep(0.1)
        dist.destroy_process_group()


def _limit(timeout: timedelta | float) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not _is_duration(seconds):
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds or a datetime.timedelta")
    return timedelta(seconds=seconds)


def _is_duration(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0


def _step_limit(step_timeout: StepTimeout) -> StepTimeout:
    if step_timeout is None or step_timeout == "auto":
        return step_timeout
    if not _is_duration(step_timeout):
        raise ValueError(
            f"step_timeout={step_timeout!r} must be a positive number of seconds, 'auto' to learn it from the steps "
            "before, or None for no limit"
        )
    return step_timeout


def _idle_limit(idle_timeout: float | None) -> float | None:
    if idle_timeout is not None and not _is_duration(idle_timeout):
        raise ValueError(f"idle_timeout={idle_timeout!r} must be a positive number of seconds, or None for no limit")
    return idle_timeout


def _tell_nccl() -> None:
    """Let torch's NCCL watchdog end processes whose collectives fail or time out, and write down what was launched.

    What the user has set stays. NCCL reads them when its first communicator is made.
    """
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)


def _check_same_job(rank: int, world_size: int, backend: str | None, timeout: timedelta) -> None:
    """`backend`: what the call names; None where it leaves the choice."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ValueError(
            f"launch(rank={rank}, world_size={world_size}) after this process joined as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}: a process joins one job; call launch once, or "
            "torch.distributed.destroy_process_group() in between"
        )
    running = str(dist.get_backend_config())
    if backend is not None and not {part.split(":")[-1].strip() for part in backend.split(",")} <= set(
        re.split("[:,]", running)
    ):
        logger.warning("launch(backend=%r) has no effect: this process joined its job with %s before", backend, running)
    joined_with = groups.get_timeout()
    if timeout != DEFAULT_TIMEOUT and joined_with is not None and timeout != joined_with:
        logger.warning(
            "launch(timeout=%s) has no effect: this process joined its job with timeout=%s before", timeout, joined_with
        )


def _devices_are_dealt_out() -> bool:
    """Whether every process was given devices of its own to see, as `srun --gpus-per-task=1` does; torchrun's all
    see the same.
    """
    return "CUDA_VISIBLE_DEVICES" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


def _order_kernels(config: Mapping[str, Any]) -> None:
    """Under tensor parallelism, let the device start kernels in the order in which they were launched.

    A backward starts an all-reduce and then the products that are to hide it. They go to different streams, and with
    several hardware queues a product may take the device before the collective has begun. One queue keeps the order;
    where nothing is to be hidden that way it only holds other streams up, so it is for tensor parallelism alone, and
    what the user has set stays. CUDA reads the variable when it starts.
    """
    tensor = config.get("parallel", {}).get("tensor", 1)
    size = tensor.get("size", 1) if isinstance(tensor, Mapping) else tensor
    if isinstance(size, int) and size > 1 and not torch.cuda.is_initialized():
        os.environ.setdefault(ONE_QUEUE, "1")


def _take_device(local_rank: int, explicit: bool) -> None:
    count = torch.cuda.device_count()
    if count == 1 and explicit and local_rank > 0 and _devices_are_dealt_out():
        local_rank = 0  # the one device that this task can see
    if explicit and local_rank >= count:
        raise ValueError(
            f"local_rank={local_rank} needs {local_rank + 1} CUDA devices on this node and {count} are visible: "
            f"start at most {count} processes per node"
        )
    torch.cuda.set_device(local_rank % count)


def get_default_parser() -> argparse.ArgumentParser:
    """The arguments that `launch` understands, for scripts to add their own to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="Python file with the parallel configuration")
    parser.add_argument("--host", type=str, help="where rank 0 listens")
    parser.add_argument("--port", type=int, help="port rank 0 listens at")
    parser.add_argument("--world_size", "--world-size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="rank of this process")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="index of this process on its node")
    parser.add_argument(
        "--backend", type=str, default=None, help="nccl, gloo, or one per device; chosen from the device by default"
    )
    return parser
