"""The fault matrix: what goes wrong on one rank, at which layout, and what has to come of it.

Every case is run with real processes (`processes.run` of `faulty_script.py`), and `docs/reliability.md` prints what was
seen.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

STALLED, RAISED, KILLED = 79, 1, -signal.SIGKILL
LIMIT = 3.0  # seconds, `launch(step_timeout=)` of all cases
STEP = 4  # in which it happens
BOOST = 60.0  # seconds from the start of the processes, where they end in boost


@dataclass(frozen=True)
class Case:
    """
    fault, layout, rank   as `faulty_script.py` takes them
    codes      exit codes by rank; by_torchrun: torchrun's
    words      what one of the ranks must print
    happens    for the table
    goes_on    whether all steps are taken; else the job ends at step `STEP`
    seconds    until every process has ended, from the last step that any rank took
    by_torchrun  started by it, else as srun does
    """

    fault: str
    layout: str
    rank: int
    codes: tuple[int, ...]
    words: str
    happens: str
    goes_on: bool = False
    seconds: float = LIMIT + 10
    by_torchrun: bool = False

    @property
    def name(self) -> str:
        by = "torchrun-" if self.by_torchrun else ""
        return f"{by}{self.fault.replace(' ', '-')}-{self.layout}-rank{self.rank}"


def _stalled(fault: str, layout: str, rank: int, words: str, happens: str) -> Case:
    codes = [STALLED, STALLED]
    if fault.startswith(("stop", "deaf")):
        codes[rank] = KILLED
    return Case(fault, layout, rank, tuple(codes), words, happens)


def _gone(fault: str, layout: str, rank: int, code: int, words: str, happens: str) -> Case:
    """One rank ends with `code`, the other because of it."""
    codes = [RAISED, RAISED]
    codes[rank] = code
    return Case(fault, layout, rank, tuple(codes), words, happens)


CASES = [
    *(
        _stalled("stop", layout, 1, "held the job up: it gives no sign of life", "SIGSTOP between two steps")
        for layout in ("pp2", "tp2", "zero2", "zero3", "ddp", "fsdp")
    ),
    _stalled("stop", "pp2", 0, "The job's store does not answer: rank 0", "SIGSTOP to the rank that serves the store"),
    Case(
        "stop",
        "tp2pp2",
        0,
        (KILLED, STALLED, STALLED, STALLED),  # by the first of three, who takes the store from the others
        "The job's store does not answer: rank 0",
        "SIGSTOP to the rank that serves the store of four",
    ),
    Case(
        "stop first",
        "zero2",
        0,
        (KILLED, STALLED),
        "it waits, in FirstStep.compare (1), and has heard nothing for",
        "SIGSTOP to the rank that serves the store before the first step",
        seconds=BOOST,
    ),
    Case(
        "stop first",
        "zero2",
        1,
        (STALLED, KILLED),
        "FirstStep.compare had taken",
        "SIGSTOP before the first step",
        seconds=BOOST,
    ),
    *(
        Case(
            "stop at the end",
            "zero2",
            rank,
            codes,
            words,
            f"SIGSTOP behind the last call{' to the rank that serves the store' * (rank == 0)}",
            goes_on=True,
        )
        for rank, codes, words in (
            (0, (KILLED, STALLED), "The job's store does not answer: rank 0"),
            (1, (0, KILLED), "rank 1 was stopped when rank 0 was through"),
        )
    ),
    Case(
        "stop in boost",
        "tp2",
        1,
        (STALLED, KILLED),
        "Booster.boost had taken",
        "SIGSTOP in boost, which may take as long as it takes: twice a step's budget without a sign of life",
        seconds=BOOST,
    ),
    Case(
        "kill in boost",
        "pp2",
        1,
        (RAISED, KILLED),
        "died without a word (killed?)",
        "SIGKILL in boost, where the others wait for it in the job's store",
        seconds=BOOST,
    ),
    *(
        Case(
            "stop in save",
            layout,
            1,
            (STALLED, KILLED),
            "held the job up: it gives no sign of life",
            "SIGSTOP in the middle of a save: twice a step's budget without a sign of life",
            seconds=2 * LIMIT + 13,
        )
        for layout in ("pp2", "zero2")
    ),
    *(
        _stalled(
            fault,
            layout,
            1,
            "clip_grad_by_norm had taken",
            f"{happens} where the others clip gradients by themselves",
        )
        for fault, layout, happens in (
            ("stop before clip", "zero2", "SIGSTOP"),
            ("sleep before clip", "tp2", "waits in its own code"),
        )
    ),
    *(
        _stalled(
            "sleep all",
            layout,
            0,
            "code outside of shardwright had taken",
            "all ranks hang in their own code, under idle_timeout=",
        )
        for layout in ("zero2", "pp2")
    ),
    *(
        _stalled("sleep", layout, rank, "commit: time.sleep(300)", "waits in its own code")
        for layout, rank in (("pp2", 1), ("tp2", 0), ("zero2", 1), ("zero3", 0), ("ddp", 0), ("fsdp", 1))
    ),
    *(
        _stalled("deaf", layout, rank, "it gives no sign of life", "holds Python's lock in a call that does not return")
        for layout, rank in (("zero2", 1), ("tp2", 0))
    ),
    *(
        _stalled("worker sleeps", layout, 1, "did not come, but was in", "a worker of its loader hangs")
        for layout in ("pp2", "tp2", "zero2")
    ),
    *(
        _gone(
            "worker killed", layout, 1, RAISED, "RuntimeError: DataLoader worker", "SIGKILL to a worker of its loader"
        )
        for layout in ("pp2", "zero3")
    ),
    _gone("worker raises", "tp2", 1, RAISED, "OSError: bad file", "an exception in a worker of its loader"),
    _stalled("spin", "tp2", 0, "held the job up: it did not come", "computes for ever in its own code"),
    *(
        _gone("kill", layout, 1, KILLED, "rank 1 (dp=", "SIGKILL between two steps")
        for layout in ("pp2", "tp2", "zero2", "zero3", "fsdp")
    ),
    _gone("kill", "ddp", 1, KILLED, "rank 1 (dp=1) died without a word (killed?)", "SIGKILL between two steps"),
    *(
        _gone("kill", layout, 0, KILLED, "died without a word (killed?)", "SIGKILL to the rank that serves the store")
        for layout in ("pp2", "zero2")
    ),
    Case(
        "kill while away",
        "tp2",
        0,
        (KILLED, RAISED),
        "rank 0 died without a word (killed?), or its machine did: it served the job's store",
        "SIGKILL to the rank that serves the store, while the other is in its own code",
    ),
    *(
        _gone("raise", layout, 1, RAISED, "KeyError: 'in the loop'", "an exception in the loop")
        for layout in ("pp2", "tp2", "zero2", "ddp")
    ),
    *(
        _gone("exit", layout, 1, 3, "called sys.exit(3) at faulty_script.py", "sys.exit(3) on one rank")
        for layout in ("tp2", "zero3")
    ),
    *(
        _gone(
            "leave",
            layout,
            1,
            0,
            "left: its script had ended",
            "a rank leaves the loop early: loaders of other lengths",
        )
        for layout in ("pp2", "zero2", "ddp")
    ),
    *(
        Case("interrupt", layout, 1, (130, 130), "Interrupted", "KeyboardInterrupt on one rank")
        for layout in ("pp2", "dp2")
    ),
    *(
        _gone("terminate", layout, 1, 143, "was ended by SIGTERM", "SIGTERM to one rank alone")
        for layout in ("tp2", "ddp")
    ),
    _gone(
        "criterion",
        "pp2",
        1,
        RAISED,
        "ValueError: in the criterion",
        "an exception in the criterion, on the last stage",
    ),
    *(
        _gone("nan", layout, 1, RAISED, words, "NaN in a weight of one rank, on_nan='stop'")
        for layout, words in (
            ("pp2", "NonFiniteLoss"),
            ("tp2", "mlp.down_proj.weight on rank 1 (dp 0, pp 0, tp 1) held nan in 1 of"),
            (
                "zero2",
                "ranks differ that must hold the same",
            ),  # its copies are looked at first
        )
    ),
    _gone("rate", "zero2", 1, RAISED, "['lr'] is 0.01 on rank 0", "one rank has another learning rate from a step on"),
    *(
        _gone(
            "weights",
            layout,
            1,
            RAISED,
            "ranks differ that must hold the same",
            "one rank's copy of a weight is changed",
        )
        for layout in ("ddp", "dp2")
    ),
    *(
        _gone("batch", layout, 1, RAISED, "must be given the same batch", "a rank gets a batch of another shape")
        for layout in ("tp2", "pp2")
    ),
    *(
        Case("seed", layout, 1, (RAISED, RAISED), "have different weights", "a model from another seed", seconds=BOOST)
        for layout in ("tp2", "pp2")
    ),
    Case(
        "argument",
        "zero2",
        1,
        (RAISED, RAISED),
        "were given different things to boost",
        "another lr in boost",
        seconds=BOOST,
    ),
    *(
        _gone("full disk", layout, 1, RAISED, "No space left on device", "the disk is full in the middle of a save")
        for layout in ("dp2", "pp2")
    ),
    _gone("read-only disk", "zero2", 1, RAISED, "Read-only file system", "its disk can only be read, from a save on"),
    *(
        _gone("nan gradient", layout, 1, RAISED, words, "NaN in a gradient of one rank")
        for layout, words in (
            ("tp2", "in aten.mul in the backward of microbatch 0 on stage 0, at faulty_script.py"),
            ("zero2", "the norm of the gradients of step 4"),
        )
    ),
    _gone(
        "nan batch",
        "dp2",
        1,
        RAISED,
        "inputs_embeds of the batch that rank 1 (dp 1, pp 0, tp 0) was given has nan",
        "NaN in the batch of one rank",
    ),
    *(
        _gone("kill in step", layout, 1, KILLED, "died without a word (killed?)", "SIGKILL in the middle of a step")
        for layout in ("pp2", "tp2")
    ),
    _gone("terminate in step", "tp2", 1, 143, "was ended by SIGTERM", "SIGTERM to one rank in the middle of a step"),
    Case(
        "version",
        "tp2",
        1,
        (RAISED, RAISED),
        "version of transformers is",
        "another version of transformers",
        seconds=BOOST,
    ),
    Case(
        "message",
        "pp2",
        0,
        (RAISED, RAISED),
        "a message between stages has",
        "a message between stages is corrupted",
        seconds=BOOST,
    ),
    Case("port", "dp2", 0, (RAISED, RAISED), "is taken by another program", "the job's port is taken", seconds=BOOST),
    _gone("kill in save", "pp2", 1, KILLED, "died without a word (killed?)", "SIGKILL in the middle of a save"),
    _gone("terminate in save", "tp2", 1, 143, "was ended by SIGTERM", "SIGTERM to one rank in the middle of a save"),
    *(
        Case(fault, layout, 1, (0, 0), words, happens, goes_on=True, seconds=60)
        for fault, layout, words, happens in (
            ("slow", "pp2", "trained", "one rank is late by a second"),
            ("pause", "zero2", "trained", "SIGSTOP, and SIGCONT a second later"),
            ("damaged", "zero2", "went back to step 7", "the newest checkpoint is damaged: the one before is loaded"),
            ("slow disk", "dp2", "trained", "the first writes of a save take a second each"),
        )
    ),
]

# Those that are played under torchrun, too, whose report of what failed first has the same words but for these.
_LAUNCHED = {
    "stop-zero2-rank1": "",
    "stop-pp2-rank0": "held the job up: it gives no sign of life",  # torchrun serves the store
    "sleep-pp2-rank1": "",
    "kill-pp2-rank0": "",
    "kill-tp2-rank1": "",
    "raise-zero2-rank1": "",
    "leave-zero2-rank1": "",
    "leave-ddp-rank1": "",
    "interrupt-dp2-rank1": "was interrupted in or after step 3",
    "terminate-tp2-rank1": "",
    "criterion-pp2-rank1": "",
    "nan-tp2-rank1": "",
    "nan-batch-dp2-rank1": "failed first in or after step 4 of execute_pipeline",
    "full-disk-dp2-rank1": "",
    "kill-in-save-pp2-rank1": "",
    "damaged-zero2-rank1": "",
}
CASES += [
    replace(
        case,
        codes=(0 if case.goes_on else RAISED,),
        words=_LAUNCHED[case.name] or case.words,
        happens=f"{case.happens}, under torchrun".replace(" to the rank that serves the store", ""),
        by_torchrun=True,
    )
    for case in CASES
    if case.name in _LAUNCHED
]
