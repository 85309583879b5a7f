"""Where this process stands, read from outside of the thread that is asked about: its call, its Python stack, the
collective that it waits in and how many every group has seen.

The names and sizes of a collective are read from the frames that launched it or wait for it, so nothing is written down
for them while training runs.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from . import groups
from .failure import collective_operator, condense, main_frames, waits_for_save, waits_in
from .heart import heart

_LONGEST = 8000  # characters of a stack
DEBUGGER, COMPILATION = "a debugger", "a compilation"
_BUSY = {
    DEBUGGER: ("/bdb.py", "/pydevd.py", "/pydevd_frame.py"),
    COMPILATION: ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py"),
}
_LOOKS = 5  # at a thread that goes on meanwhile
_TENSORS = 3  # named of a collective
_LOCALS = ("tensor", "output_tensor", "input_tensor", "output", "input", "tensor_list", "output_tensor_list", "object")
_KEPT = ("_keep", "_tensors", "_buffers")  # attributes of what is in flight: the tensors that it reads or fills


@dataclass(frozen=True)
class Standing:
    """
    rank, place   who it is
    doing         the call, action and bucket: `Heart.words`
    number        calls that it has begun
    waits         whether its main thread waits for other ranks
    collective    "all_reduce of [1024] float32 over ranks 0, 1", "" where it is in none
    groups        by the ranks that each group joins: collectives that this rank has called there
    frames        condensed stack of the main thread, outermost first; `stack` is all of it
    busy          what takes long and is no fault: "a debugger", "a compilation", else ""
    moved         whether it went on while it was looked at, so that its stack may be behind what it is said to be in
    saves         whether its main thread waits for its own save: `waits`, `collective` and the innermost frame are then
                  those of the thread that saves
    """

    rank: int
    place: str
    doing: str
    number: int
    waits: bool
    collective: str
    groups: dict[str, int]
    frames: tuple[str, ...]
    stack: str
    busy: str = ""
    moved: bool = False
    saves: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Standing:
        fields = json.loads(text)
        return Standing(**{**fields, "frames": tuple(fields["frames"])})

    @property
    def who(self) -> str:
        return f"rank {self.rank}" + (f" ({self.place})" if self.place else "")

    def line(self) -> str:
        """One line: who, in what, where."""
        how = f"waits in {self.collective}" if self.collective else "waits" if self.waits else "works"
        if self.saves:
            how = f"waits for its own save, which {how}"
            if not self.waits and self.frames:
                how += f" at {self.frames[-1]}"
        is_inside = (self.waits or self.saves) and len(self.frames) > 1  # the innermost is not what it was called from
        at = f", at {self.frames[-2 if is_inside else -1]}" if self.frames else ""
        went_on = " (it went on while it was looked at)" if self.moved else ""
        return f"{self.who} {how}, in {self.doing}{at}{went_on}"

    def whole(self) -> str:
        counts = "; ".join(f"{count} over ranks {ranks}" for ranks, count in self.groups.items())
        return f"{self.line()}\n  collectives called: {counts or 'none'}\n{self.stack.rstrip()}"


def stand(rank: int, place: str) -> Standing:
    """Words and stack of one moment where they can be had: looked at again while the notes change in between."""
    for _ in range(_LOOKS):
        doing, number, called = notes = _notes()
        frame, frames = main_frames()
        waits = frame is not None and waits_in(frame)
        collective, busy = collective_of(frame) if waits else "", busy_with(frame)
        moved = _notes() != notes
        if not moved:
            break
    del frame  # and what it holds
    stack = "".join(traceback.format_list(frames))
    return Standing(
        rank,
        place,
        doing,
        number,
        waits,
        collective,
        called,
        condense(frames),
        stack if len(stack) <= _LONGEST else "  [...]\n" + stack[-_LONGEST:],
        busy,
        moved,
        waits_for_save(frames),
    )


def _notes() -> tuple[str, int, dict[str, int]]:
    """What changes when a rank goes on: its words, the number of its calls, those of its collectives."""
    return heart.words(), heart.number, sequence_numbers()


def busy_with(frame: FrameType | None) -> str:
    """See `Standing.busy`."""
    while frame is not None:
        for what, files in _BUSY.items():
            if frame.f_code.co_filename.endswith(files):
                return what
        frame = frame.f_back
    return ""


def sequence_numbers() -> dict[str, int]:
    """How many collectives this rank has called in each of its groups, by their ranks; of groups of equal ranks the
    sum. Messages between two ranks are not counted.
    """
    found: dict[str, int] = {}
    for group in groups.all_groups():
        if group.size() > 1:
            name = _ranks_of(group)
            found[name] = found.get(name, 0) + groups.calls_of(group)
    return found


def collective_of(frame: FrameType | None) -> str:
    """The collective or message that a stack waits in: by torch's function and its arguments where that blocks, else
    by what is in flight.
    """
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("distributed/distributed_c10d.py") and not name.startswith("_"):
            values = frame.f_locals
            return _described(name, [values.get(local) for local in _LOCALS], values.get("group"))
        operator = collective_operator(frame)
        if operator:
            return _described(operator, list(frame.f_locals.get("args", ())), None)
        if "shardwright/comm/" in file and name in ("wait", "complete"):
            flying = frame.f_locals.get("self")
            kept = [getattr(flying, attribute, None) for attribute in _KEPT]
            if any(each is not None for each in kept):
                return _described(getattr(flying, "label", "a message"), kept, None)
        frame = frame.f_back
    return ""


def _described(name: str, values: list[Any], group: Any) -> str:
    tensors = _tensors_in(values)
    sizes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors[:_TENSORS])
    more = f" and {len(tensors) - _TENSORS} more" if len(tensors) > _TENSORS else ""
    over = group if isinstance(group, dist.ProcessGroup) else None
    if over is None and name in vars(dist):  # torch's functions take the default group
        over = dist.group.WORLD
    members = f" over ranks {_ranks_of(over)}" if over is not None else ""
    return f"{name}{f' of {sizes}{more}' if sizes else ''}{members}"


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return []


def _ranks_of(group: dist.ProcessGroup) -> str:
    return ", ".join(map(str, dist.get_process_group_ranks(group)))
