"""torchrun on one machine, whose agent starts, watches, ends and starts again the ranks of a script.

    ended = torchrun(["script.py", "argument"], directory, restarts=2)

The agent is forked from a process that has loaded torch and transformers, and forks its ranks in place of `python
script.py`: all else is torchrun's own. With SHARDWRIGHT_FORKED=0 it is the command.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shardwright.testing.rank_process import redirect_output
from tests.reliability.processes import FORKED, PATIENCE, Forked, Process, Started, environment


@dataclass(frozen=True)
class Launched:
    """exit code of torchrun, what it and its ranks printed, and seconds from the last mark to its end: the file `hit`
    or a `rank-*` that a rank writes behind each step; where there is none, from its start
    """

    code: int
    printed: str
    seconds: float


def torchrun(
    arguments: list[str],
    directory: Path,
    ranks: int = 2,
    restarts: int = 0,
    limit: float = 100,
    meanwhile: Callable[[int], bool] = lambda agent: True,
    **extra: str,
) -> Launched:
    """`torchrun --nproc-per-node=ranks --max-restarts=restarts arguments`; killed, with its ranks, after `limit`
    seconds. `meanwhile` is given the process id of torchrun again and again, until it says True.
    """
    directory.mkdir(exist_ok=True)
    output, begun, done = directory / extra.pop("OUTPUT", "printed"), time.time(), False
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", *arguments]
    variables = environment(AGENT_OUTPUT=str(output), **extra)
    process: Process
    if FORKED:
        process = Forked([__file__, *options], variables, output)
    else:
        process = Started(["-m", "torch.distributed.run", *options], variables, output)
    while process.code() is None and time.time() - begun < limit * PATIENCE:
        done = done or meanwhile(process.pid)
        time.sleep(0.05)
    code, ended = process.code(), time.time()
    if code is None:
        for rank in children(process.pid):
            os.kill(rank, signal.SIGKILL)
        process.kill()
    marks = [mark.stat().st_mtime for mark in (*directory.glob("rank-*"), directory / "hit") if mark.exists()]
    since = ended - max(marks, default=begun)
    return Launched(-signal.SIGKILL if code is None else code, output.read_text(), since)


def children(process: int) -> list[int]:
    """Processes that it has started and that run."""
    found = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        found += [int(number) for number in tasks.read_text().split()]
    return found


class _Rank:
    """What `subprocess.Popen` is to the agent."""

    def __init__(self, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(arguments, variables)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.02)
        return code


def _be_rank(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    """`python -u script arguments` in a process of the agent's that has nothing else of it."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    os.environ.clear()
    os.environ.update(variables)
    redirect_output(Path(variables["AGENT_OUTPUT"]))
    _end_as_a_program(*arguments[arguments.index("-u") + 1 :])


def _end_as_a_program(script: str, *options: str) -> None:
    """As `python script options`."""
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        uncaught = end  # noqa: F841  as the interpreter does, for those who note that it was caught
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """torchrun in a process that was forked."""
    from torch.distributed.run import main as run

    def popen(handler: Any, arguments: tuple[str, ...], variables: dict[str, str]) -> Any:
        return _Rank(arguments, variables)

    SubprocessHandler._popen = popen  # type: ignore[method-assign]
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
