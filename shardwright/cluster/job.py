"""This process as a member of a job whose ranks fail together: who failed first, and whether the communicators can
still be used.

The ranks tell each other through the store of the process group, under keys of the current generation (`recover` starts
the next one):

    failure           the record of the rank that failed first (`Failure`)
    ended             set when a process ends because of it: from then on all others must end too
    stack/<rank>      what a rank was doing when it learned of the failure
    gone/<rank>       the rank has nothing more to say and ends now
    left/<rank>       the rank's script ended, without a failure that it knows of
    beat/<rank>       "<number> <checks passed> in <call, action>", written twice a second: a rank whose number stands
                      still has died
    stalled           who asks where the ranks stand since its step takes too long, and standing/<n>/<rank> the answers
                      (`watchdog`)
    news              counts what every rank is to hear of: a look that finds it unchanged asks for nothing else

A job of one rank has no store to watch, and nothing here does anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from ..utils.memory_notes import note_memory
from . import groups
from .errors import BrokenJobError, JobError, without_store
from .failure import ADVICE, DIED, LEFT, Failure, failure_of, failure_of_store, is_lost_connection, main_stack
from .heart import heart
from .processes import is_running

P = ParamSpec("P")
R = TypeVar("R")

POLL = 0.5  # seconds between two looks at the store
_BLAME = 4.0  # seconds to find out which rank a lost connection is due to
_NEWS = "news"
_AGREE = 2.0  # seconds in which ranks that make the same mistake are expected to raise the same error


class Job:
    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.generation = 0
        self.failure: Failure | None = None
        self.heard = False  # whether this rank's script has been told of the failure
        self.place = ""  # this rank's coordinates
        self.steps = 0  # begun by execute_pipeline
        self.runs = 0  # of steps, those that were run again among them
        self.raised = 0  # forwards that all ranks have raised in alike
        self.backwards = 0  # done by Booster.backward
        self.stepped = 0  # optimizer steps that were through
        self.updating = False  # whether one has begun to change weights
        self.lasting = ""  # what keeps a step that failed in the middle in mind, so that nothing can go on after it
        self.checks = 0  # of batches, passed (`same_batch`)
        self.answers: list[Callable[[], None]] = []  # what the watching thread does besides, twice a second
        self.appointed = 0  # steps that ranks have agreed on, or may (`appointment`)
        self.ending = False  # the main thread is on its way out and needs no help
        self._default_store = store
        self._clones = threading.local()
        self._store_is_gone = False
        self._lock = threading.Lock()
        self._closed = False  # its groups, or they are about to be
        self._releases: list[Callable[[], None]] | None = []  # to be called when they are; None: they are
        self.local_ranks = _local_ranks(rank, world_size)
        self.server, self.served_by = ("", 0), "rank 0"  # host and process id
        self.server_left = False  # its script had ended, and nothing is wrong when its store does, too
        self.server_stopped = False  # when it was last asked for something, and had not answered
        self._introduce()

    def _introduce(self) -> None:
        self.tell(f"host/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self.tell(f"place/{self.rank}", self.place)

    @property
    def store(self) -> dist.Store:
        """A client of the calling thread's own: while one waits, a client serves nobody else."""
        client: dist.Store | None = getattr(self._clones, "client", None)
        if client is None:
            client = self._clones.client = self.new_client()
        return client

    def new_client(self) -> dist.Store:
        """Where the server has just ended, this takes torch a minute and a half of trying again."""
        return self._default_store.clone()  # type: ignore[attr-defined,no-any-return]

    def ask_through(self, client: dist.Store) -> None:
        """What the calling thread uses as `store`."""
        self._clones.client = client

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[None]:
        """The store ends with the process that serves it, which may be rank 0. torch warns at length of every
        question to a lost one.
        """
        try:
            yield
        except RuntimeError:
            self._store_is_gone = True

    def key(self, name: str) -> str:
        return f"shardwright/job/{self.generation}/{name}"

    # Telling.

    def fail(self, error: BaseException, doing: str = "") -> Failure:
        """Tell the job that this rank failed with `error` and wake everybody; returns the first failure, which may
        be another's.
        """
        if self.failure is None:
            if getattr(error, "failed_rank", None) not in (None, self.rank):
                # the error tells of another rank's, whose own story is the better one
                self.wait_for(["failure"], _AGREE)
            frames = failure_of(error, self.rank, "", "").frames
            self.tell(f"stack/{self.rank}", "\n".join(["waits", *frames]))
            mine = (
                self._blame(error, doing)
                if is_lost_connection(error)
                else failure_of(error, self.rank, self.place, doing)
            )
            self.learn(self.first(mine))
        assert self.failure is not None
        self.heard = True
        return self.failure

    def learn(self, failure: Failure) -> None:
        """Take note of the first failure, say what this rank is doing, and close its groups so that it stops
        waiting. From any thread.
        """
        with self._lock:
            self.failure = failure
            if self._closed:
                return
            self._closed = True
        if threading.current_thread() is not threading.main_thread():
            waits, frames = main_stack()
            self.tell(f"stack/{self.rank}", "\n".join(["waits" if waits else "works", *frames]))
        groups.close_all()
        with self._lock:
            releases, self._releases = self._releases or [], None
        for release in releases:
            release()

    def when_closed(self, release: Callable[[], None]) -> None:
        """Call `release` once no backend of this job's groups touches any tensor any more: when they are closed, by
        whichever thread.
        """
        with self._lock:
            if self._releases is not None:
                self._releases.append(release)
                return
        release()

    def first(self, mine: Failure) -> Failure:
        """Publish `mine` unless another was first; returns the first."""
        if not self._store_is_gone:
            with self._while_it_lasts():
                first = Failure.from_json(self.store.compare_set(self.key("failure"), "", mine.to_json()))
                self.store.add(self.key(_NEWS), 1)
                return first
        return mine

    def tell(self, name: str, value: str = "1") -> bool:
        """Whether there is still a store to tell it to."""
        if not self._store_is_gone:
            with self._while_it_lasts():
                self.store.set(self.key(name), value)
        return not self._store_is_gone

    def announce(self, name: str, value: str = "1") -> None:
        """Tell it to every rank's watching thread."""
        if self.tell(name, value):
            with self._while_it_lasts():
                self.store.add(self.key(_NEWS), 1)

    def news(self) -> int | None:
        """How much was announced; None where there is nobody to ask."""
        if not self._store_is_gone:
            with self._while_it_lasts():
                return self.store.add(self.key(_NEWS), 0)
        return None

    def replace(self, name: str, before: str, after: str) -> bool:
        """Announce `after` if the key is `before`, "" where it is not there yet; whether this rank has done so."""
        if not self._store_is_gone:
            with self._while_it_lasts():
                mine = bytes(self.store.compare_set(self.key(name), before, after)).decode() == after
                self.store.add(self.key(_NEWS), 1)
                return mine
        return False

    def ask(self, name: str) -> str | None:
        if not self._store_is_gone:
            with self._while_it_lasts():
                if self.store.check([self.key(name)]):
                    return bytes(self.store.get(self.key(name))).decode()
        return None

    def wait_for(self, names: list[str], seconds: float) -> bool:
        """Until all these keys are there, at most so long."""
        deadline = time.monotonic() + seconds
        while names and not self._store_is_gone and time.monotonic() < deadline:
            names = [name for name in names if self.ask(name) is None]
            if names:
                time.sleep(0.02)
        return not names

    @property
    def has_store(self) -> bool:
        """False once this rank has found it gone."""
        return not self._store_is_gone

    def require_store(self, what: str) -> None:
        """BrokenJobError if the store is gone, of which `what` is what came of it."""
        if self._store_is_gone:
            raise without_store(what, self.served_by)

    def wait_a_little(self, name: str, patience: timedelta) -> None:
        """Until the key is there, or not much longer than `patience`."""
        with contextlib.suppress(RuntimeError):
            self.store.wait([self.key(name)], patience)
        self.ask("failure")  # whether there is still somebody to ask
        self.require_store("a rank did not hear of the others")

    # Finding out.

    def _blame(self, error: BaseException, doing: str) -> Failure:
        """Which rank a lost connection is due to: one that told of a failure, has left or has died."""
        deadline = time.monotonic() + _BLAME
        before = self._beats()
        while time.monotonic() < deadline and not self._store_is_gone:
            text = self.ask("failure")
            if text:
                return Failure.from_json(text)
            for rank in range(self.world_size):
                how = self.ask(f"left/{rank}") if rank != self.rank else None
                if how is not None:
                    return self._about(rank, LEFT, f"{how} while rank {self.rank} still waited for it", doing, error)
                if rank != self.rank and self._has_died_here(rank):
                    return self._about(rank, DIED, "died without a word (killed?)", doing, error)
            time.sleep(0.1)
        if self._store_is_gone:
            return self.lost_store()
        now = self._beats()
        for rank in range(self.world_size):
            if rank != self.rank and before[rank] is not None and before[rank] == now[rank]:
                return self._about(rank, DIED, "died without a word (killed?), or its machine did", doing, error)
        return failure_of(error, self.rank, self.place, doing)

    def _about(self, rank: int, kind: str, what: str, doing: str, error: BaseException | None = None) -> Failure:
        place = self.ask(f"place/{rank}") or ""
        words = self.last_words_of(rank) if kind == DIED else ""
        what += f", last seen in {words}" if words else ""
        what += f"\n{ADVICE[kind]}"
        frames = failure_of(error, rank, "", "").frames if error is not None and kind == LEFT else ()
        return Failure(rank, self.rank, place, doing, kind, what, frames, "", time.time())

    def find_dead(self, ranks: Iterable[int] = ()) -> Failure | None:
        """The record of a rank on this machine that has died, published, if there is one. Without `ranks`: of any."""
        for rank in ranks or self.local_ranks:
            if rank != self.rank and self.ask(f"left/{rank}") is None and self._has_died_here(rank):
                return self.first(self._about(rank, DIED, "died without a word (killed?)", ""))
        return None

    def meet_server(self) -> None:
        """Wait a moment until the rank that serves the store has said which process it is."""
        self.wait_for(["host/0"], _AGREE)
        self.note_server()

    def note_server(self) -> None:
        """Who serves the store, for when it does not answer any more."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not self.server[1]:
            self.server = (socket.gethostname(), os.getppid()) if agents else self.process_of(0)
            self.served_by = "torchrun" if agents else "rank 0"
        if not agents and not self.server_left:
            self.server_left = self.ask("left/0") is not None

    def lost_store(self) -> Failure:
        """The record of the end of the process that served the store, which nobody can be told of any more."""
        return failure_of_store(self.rank, self.place, self.served_by, self.server_stopped)

    def process_of(self, rank: int) -> tuple[str, int]:
        """(host, process id) of a rank; ("", 0) where it has not said so."""
        host, _, pid = (self.ask(f"host/{rank}") or "").partition(" ")
        return host, int(pid or 0)

    def last_words_of(self, rank: int) -> str:
        """What a rank was in when it gave its last sign of life; "" for one that has given none."""
        return (self.ask(f"beat/{rank}") or "").partition(" in ")[2]

    def _beats(self) -> list[str | None]:
        return [self.ask(f"beat/{rank}") for rank in range(self.world_size)]

    def checks_of(self, rank: int) -> int:
        """Checks of batches that `rank` has passed, as of its last beat."""
        beat = self.ask(f"beat/{rank}")
        return int(beat.split()[1]) if beat else 0

    def wait_for_goodbyes(self, ranks: Iterable[int], seconds: float) -> None:
        """Until each of these ranks has said that it goes, or has died; at most so long."""
        deadline, waiting = time.monotonic() + seconds, [rank for rank in ranks if rank != self.rank]
        while waiting and not self._store_is_gone and time.monotonic() < deadline:
            waiting = [r for r in waiting if self.ask(f"gone/{r}") is None and not self._has_died_here(r)]
            if waiting:
                time.sleep(0.02)

    def wait_for_ends(self, seconds: float) -> None:
        """Until the processes of the other ranks that one launcher started with this one have ended; at most so
        long.
        """
        deadline = time.monotonic() + seconds
        others = [rank for rank in self.local_ranks if rank != self.rank]
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not self._has_died_here(rank)]
            if others:
                time.sleep(0.05)

    def _has_died_here(self, rank: int) -> bool:
        """Whether a rank of this machine has no process any more, or one that only waits to be buried."""
        host, pid = self.process_of(rank)
        return host == socket.gethostname() and os.path.exists("/proc/self/stat") and not is_running(host, pid)

    def all_raise(self, point: str) -> bool:
        """Whether every rank raises at this point of the job, so that none waits for another: called by a rank that is
        about to raise.

        A mistake in the settings or the data is made by all ranks alike, before they exchange anything; nothing is
        broken then.
        """
        self.tell(f"raising/{point}/{self.rank}")
        return self.wait_for([f"raising/{point}/{rank}" for rank in range(self.world_size)], _AGREE)

    # Refusing.

    def refuse(self) -> None:
        """Raise what broke the communicators: as its story where the script has not heard of it yet."""
        assert self.failure is not None
        if not self.heard:
            self.heard = True
            raise JobError(f"{self.failure.condensed()}\nrank {self.rank} goes no further because of it")
        advice = "Restart the job from its last checkpoint"
        if not self.why_not_to_recover():
            advice += (
                "; or, if every rank has caught the error, let all ranks call shardwright.recover() and "
                "optimizer.zero_grad() and go on"
            )
        raise BrokenJobError(
            f"this job's communicators were closed when {self.failure.headline}\nNo step, backward or checkpoint can "
            f"run on them. {advice}"
        )

    def why_not_to_recover(self) -> str:
        if not groups.can_reconnect():
            return "recover() can give gloo groups new connections, not NCCL's"
        if self.generation == groups.MOST_RECOVERIES:
            return f"recover() has succeeded {self.generation} times in this process, and torch has no room for more"
        return f"recover() cannot undo a step that failed in the middle under {self.lasting}" if self.lasting else ""

    def begin_anew(self, generation: int, checks: int) -> None:
        """After a recovery, with groups that have new connections. `checks` is alike on all ranks, and more than any
        has told of.
        """
        with self._lock:
            self.checks = checks
            self.generation, self.failure, self.heard, self._closed = generation, None, False, False
            self.raised = 0
            self._releases = []
        self._introduce()

    def stacks(self) -> dict[int, tuple[bool, list[str]]]:
        """What every rank that has said so was doing: {rank: (whether it waited for others, frames)}."""
        found = {}
        for rank in range(self.world_size):
            text = self.ask(f"stack/{rank}")
            if text:
                how, *frames = text.splitlines()
                found[rank] = (how == "waits", frames)
        return found


_job: Job | None = None
_changes = 0  # of `_job`


def current() -> Job | None:
    return _job


def set_current(job: Job | None) -> None:
    global _job, _changes
    _job = job
    _changes += 1


def generation() -> int:
    """How often this job has recovered: whoever keeps an agreement with other ranks must renew it when this has
    changed.
    """
    return _job.generation if _job is not None else 0


def connections() -> tuple[int, int]:
    """Changes when this process joins another job, and when the job recovers: what was under way before never
    arrives.
    """
    return _changes, generation()


def set_place(place: str) -> None:
    """This rank's coordinates, for messages."""
    if _job is not None:
        _job.place = place
        _job.tell(f"place/{_job.rank}", place)


def this_rank() -> str:
    """ "rank 3 (dp=1, pp=1, tp=0)": the global rank, as messages call it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} ({_job.place})" if _job is not None and _job.place else f"rank {rank}"


def require_sound() -> None:
    """Raise `BrokenJobError` if a failed step has broken the communicators. Costs a comparison."""
    if _job is not None and _job.failure is not None:
        _job.refuse()


def when_closed(release: Callable[[], None]) -> None:
    """See `Job.when_closed`. Without a job nobody closes groups, and `release` is never called."""
    if _job is not None:
        _job.when_closed(release)


def stop_waiting() -> None:
    """For loops that wait for other ranks in the store, where no closed group wakes them: raise what has failed
    meanwhile.
    """
    if _job is not None and _job.failure is not None:
        _job.heard = True
        raise JobError(_job.failure.condensed())


def heeds_failures(function: Callable[P, R]) -> Callable[P, R]:
    """For calls in which ranks wait for each other: refused on a broken job, and a lost connection is told as the
    failure it is due to.
    """

    name, is_step = function.__qualname__, function.__name__ == "step"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        require_sound()
        is_outermost, completed = heart.is_idle, False
        try:
            if is_outermost:
                heart.enter(name)
            result = function(*args, **kwargs)
            completed = True
            if is_step and _job is not None:
                _job.stepped += 1
                _job.updating = False
            return result
        except RuntimeError as error:
            note_memory(error)
            if _job is None or not is_lost_connection(error):
                raise
            failure = _job.fail(error, function.__qualname__)
            raise JobError(
                f"{failure.condensed()}\nrank {_job.rank} stopped in {function.__qualname__} because of it"
            ) from None
        finally:
            if is_outermost:
                heart.leave(completed)

    return call


def heeds_failures_alone(function: Callable[P, R]) -> Callable[P, R]:
    """`heeds_failures` where the call is the script's own: within another one, that one heeds them."""
    heeding = heeds_failures(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return heeding(*args, **kwargs) if heart.is_idle else function(*args, **kwargs)

    return call


def begin_update() -> None:
    """From here to the end of the optimizer's step weights change: a failure in between leaves them half old and
    half new.
    """
    if _job is not None:
        _job.updating = True


def note_lasting(what: str) -> None:
    """`what` keeps in mind where in a step it is, with no way to tell it that the step is over: `recover` refuses."""
    if _job is not None:
        _job.lasting = what


def count_backward() -> None:
    if _job is not None:
        _job.backwards += 1


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    """For steps that were taken before, so that messages go on counting as the script does."""
    job = _job
    counted = (job.steps, job.backwards) if job is not None else (0, 0)
    try:
        yield
    finally:
        if job is not None:
            job.steps, job.backwards = counted


@contextlib.contextmanager
def step() -> Iterator[None]:
    """One step of execute_pipeline: an exception in it is told to all ranks.

    An error with an attribute `doing` says where it came up in the exchange of messages. One without came up where
    ranks that make the same mistake have exchanged the same, so nothing is broken if all of them raise it.
    """
    require_sound()
    job = _job
    if job is None:
        yield
        return
    job.steps += 1
    job.runs += 1
    try:
        yield
    except Exception as error:
        doing = getattr(error, "doing", "")
        if not doing and job.failure is None and job.all_raise(f"{job.runs}/{type(error).__name__}"):
            raise
        where = f"step {job.steps} of execute_pipeline"
        _tell_all(job, error, where, f"{where}, {doing}" if doing else where)
        raise


@contextlib.contextmanager
def forward(waits: bool) -> Iterator[None]:
    """A model's forward outside of execute_pipeline: an exception in it is told to all ranks, whatever the script does
    with it.

    waits  ranks wait for each other in it, because weights are gathered or activations are summed; else nothing is told

    Nothing is broken if all ranks raise one of its kind.
    """
    job = _job
    if job is None or not waits:
        yield
        return
    try:
        yield
    except Exception as error:
        if (
            not is_lost_connection(error)
            and job.failure is None
            and job.all_raise(f"forward/{job.raised}/{type(error).__name__}")
        ):
            job.raised += 1
            raise
        _tell_all(job, error, "the forward", "the forward")
        raise


def _tell_all(job: Job, error: Exception, where: str, doing: str) -> None:
    """Tell the job of `error`; where another rank's failure is the reason for it, raise that one's story instead."""
    failure = job.fail(error, doing)
    if failure.rank != job.rank:
        raise JobError(f"{failure.condensed()}\nrank {job.rank} stopped in {where} because of it") from (
            None if is_lost_connection(error) else error
        )


def _local_ranks(rank: int, world_size: int) -> list[int]:
    """The ranks that one launcher (torchrun's agent) started together with this one."""
    size, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return [other for other in range(rank - local, rank - local + size) if 0 <= other < world_size]
