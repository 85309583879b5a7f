"""Scripts of a user's on one or more ranks, in processes forked from a server that has imported torch and transformers.

These imports take seconds of every rank that `python` or torchrun starts, which is longer than most scripts of the
tests run. The processes get what torchrun gives its ranks; that torchrun itself starts such scripts is what
tests/examples and tests/ranks/test_demo.py show.
"""

from __future__ import annotations

import atexit
import multiprocessing.forkserver
import os
import runpy
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.testing.rank_process import end_with_caller, redirect_output
from shardwright.testing.ranks import fork_server

ROOT = Path(__file__).parents[1]
LIMIT = min(280.0, 110.0 * float(os.environ.get("SHARDWRIGHT_PATIENCE", "1")))  # seconds; pytest stops a test at 300


def environment() -> dict[str, str]:
    """One thread per rank, no GPU, this tree's package."""
    names = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **names}


def run_forked(ranks: int, script: Path, *options: str, cwd: Path) -> tuple[list[int | None], str]:
    """Exit codes of the ranks, None for one that did not end in time, and what all of them printed."""
    # As torchrun's agent does it: the store is the starter's, on a port that was free when it was taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    outputs = [cwd / f"output-{ranks}-{rank}" for rank in range(ranks)]
    for path in outputs:
        path.write_text("")
    server = fork_server()
    environs = [_as_rank(rank, ranks, store) for rank in range(ranks)]
    started = [
        server.Process(target=run_script, args=(script, options, cwd, output, environ))
        for output, environ in zip(outputs, environs, strict=True)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            if process.pid is not None:
                process.kill()
                process.join()
    return codes, "\n".join(path.read_text() for path in outputs)


def _as_rank(rank: int, ranks: int, store: dist.TCPStore | None) -> dict[str, str]:
    if store is None:
        return environment()
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": store.port,
    }
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**environment(), **agent, **{name: str(number) for name, number in names.items()}}


def run_script(script: Path, options: tuple[str, ...], cwd: Path, output: Path, environ: dict[str, str]) -> None:
    """What a forked process does: the script, as `python script options` would, and its end."""
    threading.Thread(target=end_with_caller, daemon=True).start()
    redirect_output(output)
    # Ranks of its own it has from the server that it was forked from, which multiprocessing knows how to reach in here,
    # but not to be running.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined, method-assign]
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        uncaught = end  # noqa: F841  as the interpreter does, for those who note that it was caught
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()  # as an interpreter does at its end, and multiprocessing does not
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
