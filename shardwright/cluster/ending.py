"""How a process of a failed job ends: what it prints, in which order the ranks end, and with which exit code.

Outside of torchrun every rank prints: the others one line each and first, the rank that failed its whole traceback and
last.

Under torchrun what comes last is torchrun's own report, which has seven lines for every rank that did not exit with 0,
and the error file of the one that failed first. So per launcher one rank tells the story, through that file, and exits
with 1; its others exit with 0 before it, which says "not mine" to the launcher and nothing to anybody else: the
launcher fails as soon as one of its ranks does.

[Note: leaving early] An interpreter that ends takes its modules apart, which is over a second of the processor with
torch and transformers in it, and much longer where ranks share few cores. A machine that is taken away gives half a
minute for all of its ranks. So ranks that a signal ends leave behind the last exit handler, before that: the first
thing that CPython (seen in 3.11 to 3.13) lets go of then is what `sys` holds of the script, its arguments among it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from .failure import DIED, INTERRUPTED, LEFT, STALLED, TERMINATED, TIMEOUT, Failure
from .heart import heart
from .job import Job
from .stopped import kill_deaf, kill_left_behind, kill_stopped, neighbors

_OTHERS = 4.5  # seconds that the rank that tells the story waits for the others
_DEAF = 2.0  # seconds for one that did not say where it stands to hear of the end
_STACKS = 2.0  # seconds in which all ranks say what they were doing when a timeout struck
STALLED_CODE = 79  # what a job ends with that was ended because a step took too long
_EXIT = "exit"  # behind the last call of a script, which may take as long as it takes
_KINDS = 3  # of things that ranks were doing, in torchrun's report

_exit_code: int | None = None  # what this process ends with, once that is decided
_telling = threading.RLock()  # reentrant, since a signal may come while the main thread tells
_told = False
_agreed_code = 0  # of sys.exit, with which all ranks end alike
_script_exit: _Exit | None = None  # the last sys.exit that nobody caught


def excepthook(job: Job, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """The script of this rank ends by an exception."""
    job.ending = True
    if isinstance(error, KeyboardInterrupt):
        job.learn(job.first(interrupted(job)))
        job.announce("ended")
        leave_interrupted(job)
    failure = job.failure if job.failure is not None else job.fail(error, _where(job))
    job.announce("ended")
    if failure.kind == TIMEOUT:
        everyone = [f"stack/{rank}" for rank in range(job.world_size) if rank != failure.rank]
        job.wait_for(everyone, _STACKS)
    _tell(job, failure)


def _where(job: Job) -> str:
    if job.steps:
        return f"or after step {job.steps} of execute_pipeline"
    return f"or after backward {job.backwards}" if job.backwards else ""


def _tell(job: Job, failure: Failure) -> None:
    """Print this rank's part of the story and decide the exit code, once: the main thread may come to its end while
    the watch speaks.
    """
    global _told
    with _telling:
        if not _told:
            _told = True
            _tell_now(job, failure)


def _tell_now(job: Job, failure: Failure) -> None:
    global _exit_code
    # The first to speak looks at all ranks, the others at those that they were started with.
    kill_stopped(job, range(job.world_size) if job.rank == failure.speaker else job.local_ranks)
    if failure.kind == INTERRUPTED:
        leave_interrupted(job)
    torchrun = _under_torchrun()
    speaks = job.rank == failure.speaker or (
        torchrun and failure.speaker not in job.local_ranks and job.rank == job.local_ranks[0]
    )
    _exit_code = 0 if torchrun and not speaks else code_of(failure)
    if not speaks:
        if not torchrun:
            _print(f"rank {job.rank}{_place(job)} stopped: {failure.headline}")
        job.tell(f"gone/{job.rank}")
        _keep_the_store(job, failure)
        return
    if torchrun:  # which stops those that have not ended by themselves, and counts them as failed then
        job.wait_for_ends(_OTHERS)
    else:
        job.wait_for_goodbyes(set(range(job.world_size)) - _silent(failure), _OTHERS)
        time.sleep(0.2)  # from their last words to their end
    if failure.kind == STALLED:
        for rank in _silent(failure):
            kill_deaf(job, rank, _DEAF)
    if failure.kind == TIMEOUT:
        alike = _alike(job, failure)
        _report(failure, _brief(alike), _in_full(alike))
    else:
        _report(failure, failure.condensed(), failure.whole())
    job.tell(f"gone/{job.rank}")
    _keep_the_store(job, failure)


def _keep_the_store(job: Job, failure: Failure) -> None:
    """Rank 0 ends last where it serves the store."""
    if job.rank == 0 and not _under_torchrun():
        job.wait_for_goodbyes(set(range(job.world_size)) - _silent(failure), 2 * _OTHERS)


def _silent(failure: Failure) -> set[int]:
    """Ranks that will not say that they go. One that held the others up does, if it has said where it stood."""
    speaks = failure.rank == failure.speaker or (failure.kind == STALLED and failure.frames)
    return set() if speaks else {failure.rank}


class _Alike(NamedTuple):
    """Ranks that were doing the same when a timeout struck."""

    ranks: tuple[int, ...]
    waits: bool
    frames: tuple[str, ...]

    @property
    def head(self) -> str:
        return f"rank {', '.join(map(str, self.ranks))} {'waited in' if self.waits else 'was in'}"

    @property
    def place(self) -> str:
        """The innermost frame, or the one before it where that is the wait itself."""
        return self.frames[-2 if self.waits and len(self.frames) > 1 else -1] if self.frames else "code without a frame"


def _alike(job: Job, failure: Failure) -> tuple[str, list[_Alike]]:
    """Which ranks did not come, and what all ranks were doing, the late ones first."""
    stacks = job.stacks()
    stacks.setdefault(failure.rank, (True, list(failure.frames)))
    ranks: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for rank, (waits, frames) in sorted(stacks.items()):
        ranks.setdefault((waits, tuple(frames)), []).append(rank)
    late = [rank for rank, (waits, _) in stacks.items() if not waits] + [
        r for r in range(job.world_size) if r not in stacks
    ]
    head = (
        (f"timeout: rank {', '.join(map(str, sorted(late)))} did not come")
        if late
        else ("timeout: the ranks wait for each other")
    )
    return head, [_Alike(tuple(who), *what) for what, who in sorted(ranks.items(), key=lambda item: item[0][0])]


def _in_full(found: tuple[str, list[_Alike]]) -> str:
    head, alike = found
    return "\n".join([head, *(line for a in alike for line in (a.head, *(f"  {frame}" for frame in a.frames)))])


def _brief(found: tuple[str, list[_Alike]]) -> str:
    """A line for each of the first few: the place in the script, where it has one."""
    head, alike = found
    lines = [head, *(f"{a.head} {a.place}" for a in alike[:_KINDS])]
    if len(alike) > _KINDS:
        lines.append(f"and {len(alike) - _KINDS} other places: see traceback.txt beside the error_file")
    return "\n".join(lines)


def leave_now(job: Job) -> NoReturn:
    """End a process whose main thread does not come to an end. From the watching thread."""
    global _exit_code
    assert job.failure is not None
    if not job.ending:
        _tell(job, job.failure)
    _leave(code_of(job.failure) if _exit_code is None else _exit_code)


def code_of(failure: Failure) -> int:
    return STALLED_CODE if failure.kind == STALLED else 1


def leave_alone(text: str) -> NoReturn:
    """Nobody can be told: say it, and end with the code of a job that has stalled."""
    _print(text)
    _leave(STALLED_CODE)


def leave_terminated(job: Job) -> NoReturn:
    """SIGTERM. torchrun sends it to the others when it has seen a rank end, and has its reason by then; else it is
    the first to go.
    """
    first = Failure(job.rank, job.rank, job.place, "", LEFT, f"was ended by SIGTERM\n{TERMINATED}", when=time.time())
    failure = job.failure or job.find_dead() or job.first(first)
    if failure == first:
        job.announce("ended")
    if not _under_torchrun():
        _leave(128 + signal.SIGTERM)
    if failure.speaker == job.rank and failure.kind == DIED:
        _print(failure.headline)  # the report is of the dead rank
    elif failure.speaker == job.rank:
        _report(failure, failure.condensed(), failure.whole())
        _leave(code_of(failure))
    _leave(0)


def interrupted(job: Job) -> Failure:
    where = _where(job)
    return Failure(
        job.rank,
        job.rank,
        job.place,
        "",
        INTERRUPTED,
        f"was interrupted{' in ' + where if where else ''}",
        when=time.time(),
    )


def leave_interrupted(job: Job) -> NoReturn:
    """Ctrl-C reaches every rank; one of each launcher says so. Where it reached one rank alone, torchrun's report is
    of that rank.
    """
    where = _where(job)
    if job.rank == job.local_ranks[0]:
        _print(f"Interrupted{' in ' + where if where else ''}; all ranks stop.")
    torchrun = _under_torchrun()
    mine = job.failure is None or job.failure.rank == job.rank
    if torchrun and mine:
        failure = interrupted(job)
        _report(failure, failure.headline, failure.whole())
    _leave(0 if torchrun and not mine else 128 + signal.SIGINT)


def exit_together(code: int) -> NoReturn:
    """`sys.exit(code)`, which all ranks call: it is nobody's failure. See [Note: leaving early]."""
    global _agreed_code
    _agreed_code = code
    sys.exit(code)


def leave_early(code: int) -> None:
    """End this process behind its last exit handler."""
    sys.argv = _Arguments(sys.argv, code)


class _Arguments(list[str]):
    def __init__(self, arguments: Iterable[str], code: int) -> None:
        super().__init__(arguments)
        self._code = code

    def __del__(self) -> None:
        _leave(self._code)


def remember_exits() -> None:
    """Let `sys.exit` note who called it with what, which no exit handler is told."""
    leave = sys.exit
    if getattr(leave, "notes_exits", False):
        return

    def leave_with_note(code: object = None, /) -> NoReturn:
        global _script_exit
        caller = sys._getframe(1)
        number = code if isinstance(code, int) else 0 if code is None else 1
        _script_exit = _Exit(number, f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")
        try:
            leave(code)  # type: ignore[arg-type]
        except SystemExit as error:
            error.until_caught = _UntilCaught(_script_exit)  # type: ignore[attr-defined]
            raise

    leave_with_note.notes_exits = True  # type: ignore[attr-defined]
    sys.exit = leave_with_note


class _Exit(NamedTuple):
    code: int
    where: str


class _UntilCaught:
    """Held by a SystemExit. The interpreter drops one that nobody caught when no frame is left; a frame is there
    when one was caught.
    """

    def __init__(self, note: _Exit) -> None:
        self._note = note

    def __del__(self) -> None:
        global _script_exit
        if _script_exit is self._note and sys._getframe().f_back is not None:
            _script_exit = None


def at_exit(job: Job) -> None:
    """The interpreter ends: after an exception, by sys.exit, or because the script is through."""
    global _exit_code
    if _exit_code is not None:
        return
    if job.failure is not None:  # the script has caught it
        job.tell(f"gone/{job.rank}")
        return
    job.ending = True
    code, where = _script_exit or (0, "")
    if code in (0, _agreed_code):
        patience = 0.0 if code else heart.budgets.of_silence(_EXIT) or 0.0
        others = neighbors(job) if patience else {}  # while there is a store
        job.announce(f"left/{job.rank}", "left: its script had ended")
        job.tell(f"gone/{job.rank}")
        if job.rank == 0 and not _under_torchrun():  # the store ends with this process
            job.wait_for([f"left/{rank}" for rank in range(job.world_size)], _OTHERS)
        for rank in kill_left_behind(others, patience):
            _print(
                f"rank {rank} was stopped when rank {job.rank} was through, and did not go on for {patience:g} s: it "
                "has been ended"
            )
        if code:
            leave_early(code)
        return
    failure = job.first(
        Failure(job.rank, job.rank, job.place, "", LEFT, f"called sys.exit({code}) at {where}", when=time.time())
    )
    job.learn(failure)
    job.announce("ended")
    _tell(job, failure)
    _exit_code = code if failure.rank == job.rank else _exit_code


def last_act() -> None:
    """The end of the last exit handler."""
    if _exit_code is not None:
        _leave(_exit_code)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    _end_workers()
    os._exit(code)


def _end_workers() -> None:
    """As multiprocessing does when an interpreter ends. A loader's worker looks between two batches whether this
    process is there: one that hangs would stay, and with it what reads the output that it holds open.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _place(job: Job) -> str:
    return f" ({job.place})" if job.place else ""


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _report(failure: Failure, brief: str, whole: str) -> None:
    """Tell the story: to torchrun, which prints `brief` as the root cause, with all of it in a file beside; else to
    everybody.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE") if _under_torchrun() else None
    if name is None:
        _print(whole)
        return
    Path(name).with_name("traceback.txt").write_text(whole + "\n")
    message = {
        "message": failure.first_line,
        "extraInfo": {"py_callstack": brief, "timestamp": str(int(failure.when) - 1)},
    }
    Path(name).write_text(json.dumps({"message": message}))
