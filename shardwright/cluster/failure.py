"""What is known about the first failure of a job: a record that fits into the store, and the sentences made from it.

The record travels as JSON. Tracebacks come in two lengths: all of it, and `frames`, a few lines of user code and of the
place that raised.
"""

from __future__ import annotations

import json
import re
import sysconfig
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from sys import _current_frames
from types import FrameType, TracebackType

from ..comm.turns import BACKWARD_THREAD

RAISED, TIMEOUT, DIED, LEFT, INTERRUPTED = "raised", "timeout", "died", "left", "interrupted"
STALLED = "stalled"  # a step took longer than its budget
# What to do about what a rank cannot say itself.
ADVICE = {
    DIED: "Its output says why, or the system's log (dmesg: was memory out?). Restart the job from its last checkpoint",
    LEFT: "All ranks must take equally many steps: plugin.prepare_dataloader gives them equally many batches",
}
TERMINATED = "shardwright.elastic.run, Trainer and SaveOnSignal let all ranks save first"
# Files in whose frames a thread waits for other ranks, or for the store: what calls into it from C++ leaves no other.
_WAITING = (
    *("torch/distributed/", "torch/nn/parallel/distributed.py", "shardwright/comm/", "shardwright/cluster/job.py"),
    *("shardwright/cluster/recovery.py", "shardwright/checkpoint/roll_call.py"),
)
# Of these, where DTensor decides and computes what it is made of; who waits there has a frame of `_OPERATORS`.
_COMPUTING = "torch/distributed/tensor/"
_SENDING = "torch/distributed/tensor/_collective_utils.py"
# torch's frames of an operator that is called from Python: of one of these namespaces it launches a collective, or
# waits for one, as DTensor, FSDP's norm of gradients and compiled code do.
_OPERATORS = "torch/_ops.py"
_OF_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.", "c10d.")
_SAVES = "shardwright/checkpoint/background.py"  # waits for the thread that it saves in
FRAMES = 3  # of a condensed traceback
_LONGEST = 20_000  # characters of a traceback in the store
_PACKAGE = str(Path(__file__).parents[1])
_FOREIGN = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["platlib"],
    "<frozen",
    "<string>",
)
# What gloo, NCCL and the store say when a peer has gone or when this process has closed its own connections.
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset|refused)|Application timeout caused pair closure|Broken pipe|Pair is not connected|"
    r"NCCL communicator was aborted|ncclRemoteError|ncclInternalError|Socket (closed|Timeout)|"
    r"recvValueWithTimeout failed|failed to recv|Failed to (send|recv)|Read error|Write error|connection was closed",
    re.IGNORECASE,
)
# torch raises what a worker of a DataLoader raised anew, with the worker's traceback as text.
_IN_WORKER = re.compile(
    r"Caught \w+ in (?P<where>[^\n]+)\.\nOriginal Traceback \(most recent call last\):\n(?P<trace>.+)", re.DOTALL
)
_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<source>\S.*)\n)?', re.MULTILINE
)
_TIMED_OUT = re.compile(
    r"Timed out waiting \d+ *ms|ran for \d+ milliseconds before timing out|wait timeout after \d+ ?ms", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """The first failure of a job, as every rank learns of it.

    rank       global rank that failed; `speaker` the one that tells of it, which is another where a rank died without a
               word
    place      its coordinates: "dp=1, pp=0, tp=1", or "" before there is a mesh
    doing      "step 3 of execute_pipeline, action 1F2 (stage 1, chunk 0, microbatch 2)", or ""
    kind       one of the kinds above
    error      the last lines of the traceback: "ValueError: bad batch"
    frames     condensed traceback, outermost first
    traceback  all of it
    """

    rank: int
    speaker: int
    place: str
    doing: str
    kind: str
    error: str
    frames: tuple[str, ...] = ()
    traceback: str = ""
    when: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        fields = json.loads(text)
        return Failure(**{**fields, "frames": tuple(fields["frames"])})

    @property
    def who(self) -> str:
        return f"rank {self.rank}" + (f" ({self.place})" if self.place else "")

    @property
    def headline(self) -> str:
        """One line: who, where, what."""
        where = f" in {self.doing}" if self.doing else ""
        match self.kind:
            case "died" | "left" | "interrupted" | "stalled":
                return f"{self.who} {self.first_line}"
            case "timeout":
                return f"{self.who} waited too long{where}: {self.first_line}"
            case _:
                return f"{self.who} failed first{where}: {self.first_line}"

    @property
    def first_line(self) -> str:
        return self.error.strip().splitlines()[0] if self.error.strip() else "an error without a message"

    def condensed(self) -> str:
        """The headline and, where there is one, the short traceback."""
        rest = self.error.strip().splitlines()[1:2]
        return "\n".join([self.headline, *(f"  {line}" for line in self.frames), *(f"  {line}" for line in rest)])

    def whole(self) -> str:
        return f"{self.headline}\n{self.traceback.rstrip()}" if self.traceback else self.condensed()


def failure_of_store(speaker: int, place: str, served_by: str, stopped: bool) -> Failure:
    """The job's store has gone: the process that served it ("rank 0", or the launcher of rank `speaker`, which is at
    `place`) has died. One that had been `stopped` was ended by another rank, since it would have stayed for ever.
    """
    if served_by == "rank 0":
        rank, place, who, died = (
            0,
            "",
            "it",
            "died without a word (killed?), or its machine did: it served the job's store",
        )
    else:
        rank, who = speaker, served_by
        died = f"lost the job's store: {who}, which served it, has died, or its machine has"
    if stopped:
        held = f"held the job up: {who} was stopped, and with it the job's store, until another rank ended it"
        return Failure(rank, speaker, place, "", STALLED, held, when=time.time())
    return Failure(rank, speaker, place, "", DIED, f"{died}\n{ADVICE[DIED]}", when=time.time())


def describe(error: BaseException) -> tuple[str, tuple[str, ...], str]:
    """(last lines, condensed frames, whole traceback) of an exception; of its cause, where it only says where the
    cause came up.
    """
    root = root_cause(error)
    tb = error.__traceback__
    # An error that is told before it has come all the way up: the frames above are those of the callers.
    callers = (
        list(traceback.extract_stack(tb.tb_frame.f_back)) if tb is not None and tb.tb_frame.f_back is not None else []
    )
    whole = "".join(traceback.format_exception(type(error), error, tb))
    if callers:
        whole = f"In the call (most recent call last):\n{''.join(traceback.format_list(callers))}{whole}"
    text = "".join(traceback.format_exception_only(type(root), root)).strip()
    text, in_worker = _raised_in_worker(text)
    frames = condense(
        callers + _frames_of(tb) + (_frames_of(root.__traceback__) if root is not error else []) + in_worker
    )
    return text, frames, whole if len(whole) <= _LONGEST else "[...]\n" + whole[-_LONGEST:]


def _raised_in_worker(text: str) -> tuple[str, list[traceback.FrameSummary]]:
    """The text of an error and its frames in the process that it came up in: "OSError: bad file (in DataLoader
    worker process 0)".
    """
    found = _IN_WORKER.search(text)
    if found is None:
        return text, []
    trace = found["trace"]
    frames = [
        traceback.FrameSummary(
            frame["file"], int(frame["line"]), frame["name"], lookup_line=False, line=frame["source"]
        )
        for frame in _FRAME.finditer(trace)
    ]
    lines = trace[trace.rfind("\n  File ") + 1 :].splitlines()
    first = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
    if first is None:
        return text, []
    lines[first] += f" (in {found['where']})"
    return "\n".join(lines[first:]), frames


def root_cause(error: BaseException) -> BaseException:
    """The error that another one, which only adds where it happened (it has an attribute `doing`), was raised from."""
    while hasattr(error, "doing") and error.__cause__ is not None:
        error = error.__cause__
    return error


def condense(frames: list[traceback.FrameSummary], limit: int = FRAMES) -> tuple[str, ...]:
    """User code's outermost and innermost frames and the innermost of all, in a line each: "train.py:31 main:
    step(batch)".
    """
    if not frames:
        return ()
    own = [frame for frame in frames if not frame.filename.startswith((*_FOREIGN, _PACKAGE))]
    chosen = [own[0], *own[-(limit - 2) :]] if limit > 2 and own else own[-1:]
    kept = [frame for i, frame in enumerate(chosen) if frame not in chosen[:i]]
    if frames[-1] not in kept:
        kept.append(frames[-1])
    return tuple(f"{Path(f.filename).name}:{f.lineno} {f.name}" + (f": {f.line[:100]}" if f.line else "") for f in kept)


def main_stack() -> tuple[bool, tuple[str, ...]]:
    """What the main thread of this process is doing: (whether it waits for other ranks, condensed frames)."""
    frame, stack = main_frames()
    return frame is not None and waits_in(frame), condense(stack)


def main_frames() -> tuple[FrameType | None, list[traceback.FrameSummary]]:
    """(innermost frame, all of them) of the main thread, or of the one that runs for it. Where it waits for its own
    save, those of the thread that saves are behind its own: that one writes, or waits for other ranks.
    """
    frame, stack = _stack_of(threading.main_thread())
    saving = _saving_for(frame)
    if saving is not None:
        innermost, behind = _stack_of(saving)
        return (frame, stack) if innermost is None else (innermost, stack + behind)
    if _waits_for_its_turn(frame):  # the other one of two runs
        others = [_stack_of(thread) for thread in threading.enumerate() if thread.name == BACKWARD_THREAD]
        frame, stack = next((each for each in others if not _waits_for_its_turn(each[0])), (frame, stack))
    return frame, stack


def waits_in(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other ranks, or for the store."""
    file = frame.f_code.co_filename
    if file.endswith(_OPERATORS):
        return bool(collective_operator(frame))
    if _COMPUTING in file and not file.endswith(_SENDING):
        return False
    return any(part in file for part in _WAITING)


def collective_operator(frame: FrameType) -> str:
    """ "wait_tensor", where this is torch's frame of an operator that launches a collective or waits for one, else
    "".
    """
    if not frame.f_code.co_filename.endswith(_OPERATORS):
        return ""
    name = str(frame.f_locals.get("self", ""))
    return name.split(".")[1] if name.startswith(_OF_COLLECTIVES) else ""


def _stack_of(thread: threading.Thread) -> tuple[FrameType | None, list[traceback.FrameSummary]]:
    """(its innermost frame, all of them), read at once: what is behind a frame is forgotten when it has returned."""
    frame = _current_frames().get(thread.ident or 0)
    return frame, list(traceback.extract_stack(frame)) if frame is not None else []


def _waits_for_its_turn(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.endswith("pipeline/two_at_once.py")


def _saving_for(frame: FrameType | None) -> threading.Thread | None:
    """The thread of `Background` that a thread whose innermost frame this is waits for the end of."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.endswith(_SAVES):
        return None
    background = frame.f_locals.get("self")
    saving = getattr(background, "_thread", None)
    return saving if isinstance(saving, threading.Thread) else None


def waits_for_save(stack: list[traceback.FrameSummary]) -> bool:
    """Whether a stack of `main_frames` is of one that waits for its own save."""
    return any(frame.name == "wait" and frame.filename.endswith(_SAVES) for frame in stack)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says no more than that another rank, or this rank's own connections, are gone."""
    return isinstance(root_cause(error), RuntimeError) and _LOST_CONNECTION.search(str(root_cause(error))) is not None


def is_timeout(error: BaseException) -> bool:
    return isinstance(root_cause(error), RuntimeError) and _TIMED_OUT.search(str(root_cause(error))) is not None


def failure_of(error: BaseException, rank: int, place: str, doing: str) -> Failure:
    """The record of an exception on this rank."""
    text, frames, whole = describe(error)
    kind = TIMEOUT if is_timeout(error) else RAISED
    return Failure(rank, rank, place, doing, kind, text, frames, whole, time.time())


def _frames_of(tb: TracebackType | None) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(tb))
