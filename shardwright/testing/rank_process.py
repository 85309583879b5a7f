"""What happens inside one rank process of `run_ranks`: set up, call the function, report.

A rank leaves its traces in the directory of its call, because files survive a process that dies by a signal:
    call.pickle       the function with its arguments (written by the caller)
    store             the file store of the process group
    result-<rank>     the pickled return value
    failure-<rank>    the pickled `Failure` of a rank that raised
    output-<rank>     what it wrote to stdout and stderr, C++ messages included
    stacks-<rank>     its Python stacks, on request by SIGUSR1 or at a fatal signal
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle  # between our own processes only, through a private temporary directory
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..utils.device import device_type_of_backend
from . import staged

DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Failure:
    """An exception as the caller shows it."""

    when: float  # time.monotonic() at the exception: one clock for all processes of a machine
    summary: str  # "ValueError: the message"
    traceback: str


@dataclass(frozen=True)
class Call:
    """What every rank of one call needs before it can unpickle the function."""

    directory: Path
    world_size: int
    backend: str
    timeout: float
    debug: str
    module: str  # module of the function, and
    module_file: str | None  # where that module came from
    environ: dict[str, str]


def main(call: Call, rank: int) -> None:
    """Entry point of a rank process."""
    threading.Thread(target=end_with_caller, daemon=True).start()
    redirect_output(call.directory / f"output-{rank}")
    stacks = open(call.directory / f"stacks-{rank}", "w")  # noqa: SIM115, stays open for signal handlers
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    try:
        _set_up_environment(call, rank)
        load_module(call.module, call.module_file)
        with open(call.directory / "call.pickle", "rb") as file:
            fn, args, kwargs = pickle.load(file)
        _set_up_torch(call, rank)
        result = fn(rank, call.world_size, *args, **kwargs)
        _write(call.directory / f"result-{rank}", _dump(result))
    except BaseException as error:
        failure = Failure(
            time.monotonic(), "".join(traceback.format_exception_only(error)).strip(), _own_traceback(error)
        )
        _write(call.directory / f"failure-{rank}", pickle.dumps(failure))
        # The peers may be inside a collective with this rank: leave at once rather than run clean-up that could wait
        # for them.
        _leave(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def load_module(name: str, file: str | None) -> None:
    """Make `name` importable as the module that lives in `file`.

    Test modules are often not importable by their name (pytest's importlib mode, equal basenames in two directories),
    and another file of that name may come first on sys.path; so the file decides, and the name is what pickles refer
    to.
    """
    present = sys.modules.get(name)
    if present is not None and (file is None or _same_file(getattr(present, "__file__", None), file)):
        return
    if file is None:
        importlib.import_module(name)
        return
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not None and _same_file(found.origin, file):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} is not a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _same_file(first: str | None, second: str) -> bool:
    return first is not None and os.path.realpath(first) == os.path.realpath(second)


def end_with_caller() -> None:
    """A rank must not outlive its caller, however that ends. The fork server does not see to it: ranks keep its pipe
    open.
    """
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def redirect_output(path: Path) -> None:
    """Send file descriptors 1 and 2 to `path`; the ones inherited from the fork server belong to whichever call
    started it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)


def _set_up_environment(call: Call, rank: int) -> None:
    # The server's environment is that of its start; the caller's may have changed since.
    os.environ.clear()
    os.environ.update(call.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(call.world_size), LOCAL_WORLD_SIZE=str(call.world_size)
    )
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = call.debug
    # The loopback device: a host name that does not resolve must not fail a test.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.set_debug_level_from_env()


def _set_up_torch(call: Call, rank: int) -> None:
    torch.set_num_threads(1)
    seed_everything(0)
    if "staged" in call.backend:
        staged.register()
    if device_type_of_backend(call.backend) == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(call.directory / "store"), call.world_size)
    # Longer than the caller's limit, so that a hang is reported by the caller with the stacks of all ranks.
    limit = timedelta(seconds=call.timeout + 60)
    dist.init_process_group(call.backend, store=store, rank=rank, world_size=call.world_size, timeout=limit)
    # A function may end, or fail, while a peer still connects to this rank, which would fail there as a lost
    # connection.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {peer}" for peer in range(call.world_size)], limit)


def seed_everything(seed: int) -> None:
    """The same random numbers on every rank: forked processes inherit whatever state the server happened to have."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _dump(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the return value of a rank must be picklable, got {type(result).__name__}: {error}"
        ) from error


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: the reader never sees a half-written file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _own_traceback(error: BaseException) -> str:
    """The traceback without this file's frames at its top."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
