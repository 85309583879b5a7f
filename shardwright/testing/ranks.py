"""`run_ranks`: call a function on several rank processes and collect what each returns.

Ranks are forked from a server that has already imported torch and transformers, so that four of them start in a
fraction of a second, and each call gets fresh processes. They meet through a file store: no ports, no clashes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle  # between our own processes only, through a private temporary directory
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from ..utils.errors import one_of
from . import rank_process
from .rank_process import Call, Failure
from .rank_report import RankError, RankOutcome, failure_text, timeout_text, without_watcher

GRACE = 2.0  # seconds that the other ranks get to end by themselves after one has failed
_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")
_DUMP_WAIT = 2.0  # seconds to wait for stack dumps
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "shardwright.testing.rank_process",
    "shardwright.testing.ranks",
]
_PRELOAD_MODELS = [
    "transformers",
    "transformers.modeling_utils",
    # Some ten milliseconds each, once the first one has brought what they share.
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bert", "t5", "opt")
    ),
    # The files behind the packages, whose names are looked up on first use: 0.8 s per rank, which is more than a tiny
    # model takes to train.
    "shardwright.booster.booster",
    *(f"shardwright.plugins.{plugin}" for plugin in ("hybrid.plugin", "low_level_zero", "torch_ddp", "torch_fsdp")),
    "shardwright.testing.zoo",
    "shardwright.testing.matrix.run",
]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    debug: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` on `world_size` processes; returns what each rank returned, by rank.

    Every rank runs with the default process group initialised over `backend`, one torch thread, the same random seeds,
    and the caller's environment plus RANK, LOCAL_RANK and WORLD_SIZE. What ranks print is printed by the caller when
    they have ended.

    fn          a function at the top level of a file; a script needs the `if __name__ == "__main__":` guard
    timeout     seconds from the start of the ranks; when they pass, every rank's Python stacks are in the error.
                Multiplied by SHARDWRIGHT_PATIENCE of the environment, for tests that run side by side
    debug       TORCH_DISTRIBUTED_DEBUG, by default that of the caller's environment, or "DETAIL" where it has none:
                then collectives that do not match between ranks are errors rather than hangs, and take twice as long;
                "INFO" for DistributedDataParallel, whose constructor crashes under "DETAIL" in torch 2.13, and "OFF"
                for timings
    args, kwargs, results   anything picklable, tensors included

    Raises `RankError` when a rank raises, dies or does not end in time.
    """
    call_module, call_file = _origin_of(fn)
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: it must be at least 1")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout}: it must be a positive number of seconds")
    if debug is None:
        debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() or "DETAIL"
    if debug not in _DEBUG_LEVELS:
        raise one_of("debug", debug, _DEBUG_LEVELS)
    timeout *= _patience()
    with tempfile.TemporaryDirectory(prefix="shardwright-ranks-") as directory:
        call = Call(Path(directory), world_size, backend, timeout, debug, call_module, call_file, dict(os.environ))
        with open(call.directory / "call.pickle", "wb") as file:
            pickle.dump((fn, args, kwargs), file)
        processes = _start(call)
        try:
            return _collect(call, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            _print_output(call)


def _patience() -> float:
    said = os.environ.get("SHARDWRIGHT_PATIENCE", "1")
    with contextlib.suppress(ValueError):
        if 0 < float(said) < float("inf"):
            return float(said)
    raise ValueError(
        f"SHARDWRIGHT_PATIENCE={said}: it must be a positive number, by which timeouts of run_ranks are multiplied"
    )


def _origin_of(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """Module name and file that let a rank find `fn`."""
    name, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    module = sys.modules.get(name) if name else None
    if (
        name is None
        or module is None
        or "<" in qualname
        or "." in qualname
        or getattr(module, qualname, None) is not fn
    ):
        raise ValueError(
            f"fn={fn!r}: rank processes import it by name, so it must be a function at the top level of a module"
        )
    file = getattr(module, "__file__", None)
    if name == "__main__":
        if file is None:
            raise ValueError(f"fn={qualname}: it was typed into an interpreter; rank processes need it in a file")
        return "__main__", None  # multiprocessing itself brings the main module to its children
    return name, os.path.realpath(file) if file else None


def fork_server() -> ForkServerContext:
    """Makes processes that have torch and transformers from their start."""
    context = multiprocessing.get_context("forkserver")
    preload = list(_PRELOAD)
    if importlib.util.find_spec("transformers") is not None:
        preload += _PRELOAD_MODELS
    if "pytest" in sys.modules:
        preload.append("pytest")  # children import the caller's main module, which then is pytest's
    context.set_forkserver_preload(preload)  # heeded when the server starts, with the first process
    return context


def _start(call: Call) -> list[ForkServerProcess]:
    context = fork_server()
    processes = [
        context.Process(target=rank_process.main, args=(call, rank), name=f"rank {rank}")
        for rank in range(call.world_size)
    ]
    try:
        for process in processes:
            process.start()
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.kill()
        raise
    return processes


def _collect(call: Call, processes: list[ForkServerProcess]) -> list[Any]:
    """Wait for the ranks, at most `call.timeout`, and at most `GRACE` after the first failure."""
    started = time.monotonic()
    deadline = started + call.timeout
    outcomes: dict[int, RankOutcome] = {}
    failed = False
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(running), left):
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            processes[rank].join()
            outcomes[rank] = _outcome(call, rank, processes[rank])
            if outcomes[rank].failed and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    if running:
        outcomes |= _dump_stacks(call, processes, list(running.values()))
    in_order = [outcomes[rank] for rank in range(call.world_size)]
    if failed:
        raise RankError(failure_text(in_order), in_order)
    if running:
        raise RankError(timeout_text(in_order, call.timeout), in_order)
    results = []
    for rank in range(call.world_size):
        with open(call.directory / f"result-{rank}", "rb") as file:
            results.append(pickle.load(file))
    return results


def _outcome(call: Call, rank: int, process: ForkServerProcess) -> RankOutcome:
    """How a rank that has ended did end."""
    path = call.directory / f"failure-{rank}"
    failure: Failure | None = pickle.loads(path.read_bytes()) if path.exists() else None
    output, stacks = _read(call.directory / f"output-{rank}"), without_watcher(_read(call.directory / f"stacks-{rank}"))
    finished = (call.directory / f"result-{rank}").exists()
    return RankOutcome(rank, process.exitcode, failure, time.monotonic(), finished, output, stacks)


def _dump_stacks(call: Call, processes: list[ForkServerProcess], ranks: list[int]) -> dict[int, RankOutcome]:
    """Ask the ranks that still run for their Python stacks; returns their outcomes."""
    for rank in ranks:
        pid = processes[rank].pid
        assert pid is not None
        # A rank that is not yet past the set-up of its handlers would die of the signal; it has no stacks to show
        # either.
        if (call.directory / f"stacks-{rank}").exists():
            try:
                os.kill(pid, rank_process.DUMP_SIGNAL)
            except ProcessLookupError:
                continue
    deadline = time.monotonic() + _DUMP_WAIT
    while time.monotonic() < deadline and not all(_read(call.directory / f"stacks-{rank}") for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump is written frame by frame
    return {rank: _outcome(call, rank, processes[rank]) for rank in ranks}


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _print_output(call: Call) -> None:
    for rank in range(call.world_size):
        for line in _read(call.directory / f"output-{rank}").splitlines():
            print(f"[rank {rank}] {line}")
