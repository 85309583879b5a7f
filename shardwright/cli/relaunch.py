"""Running a verb on several ranks: a command that is not inside a launcher starts itself again through torchrun."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

_WRONG = 2  # exit status: not a failure, but something to put right
_RANKS_OF_A_CORE, _RANKS_OF_ANY_MACHINE = 4, 16


def most_cpu_ranks() -> int:
    """Ranks that a machine without GPUs still runs: each is a process of some 400 MB that computes all the time."""
    return max(_RANKS_OF_ANY_MACHINE, _RANKS_OF_A_CORE * (os.cpu_count() or 1))


def inside_launcher() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def relaunch(arguments: Sequence[str], world_size: int, module: str = "shardwright.cli") -> int:
    """Run `python -m module *arguments` on `world_size` ranks of this machine and return the exit status.

    The launcher runs inside this process, which saves importing torch once more. When a rank fails all others are
    stopped, and the traceback of the rank that failed first is the last thing printed; but where one has ended with
    status 2, what is wrong with what it was given has been said, and that is the status.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Ranks share the cores; torchrun would set 1 and warn about it.
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("SHARDWRIGHT_COMMAND_LINE", shlex.join(["shardwright", *sys.argv[1:]]))
    launcher = ["--standalone", "--nproc-per-node", str(world_size), "-m", module]
    try:
        run(parse_args([*launcher, *arguments]))
    except ChildFailedError as error:
        if any(failed.exitcode == _WRONG for failed in error.failures.values()):
            return _WRONG
        rank, failure = error.get_first_failure()
        print(
            f"\nRank {rank} failed first (exit status {failure.exitcode}), so all {world_size} ranks were stopped.",
            file=sys.stderr,
        )
        if isinstance(failure.message, dict):
            print(
                failure.message.get("extraInfo", {}).get("py_callstack", failure.message.get("message", "")),
                file=sys.stderr,
            )
        return 1
    except (KeyboardInterrupt, SignalException) as error:
        print("\nInterrupted; all ranks were stopped.", file=sys.stderr)
        # what a shell reports for a program that a signal ended
        return 128 + int(error.sigval if isinstance(error, SignalException) else signal.SIGINT)
    return 0
