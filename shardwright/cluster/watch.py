"""The thread that learns of other ranks' failures while the main thread waits, computes or sleeps, and that answers
signals.

Twice a second it writes a sign of life and looks whether a rank has failed; then it closes this rank's groups, so that
a main thread that waits in one of them raises. When the process of the failed rank ends, and this one has not come to
its own end soon after, it ends it.

A main thread that waits in C++ never runs Python's signal handlers. The interpreter writes the number of every signal
to a descriptor (`signal.set_wakeup_fd`) at once, and this thread reads it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import weakref
from types import FrameType
from typing import Any

import torch.distributed as dist

from . import ending
from .failure import STALLED, Failure
from .heart import heart
from .job import POLL, Job
from .processes import is_running
from .stopped import kill_stopped
from .watchdog import answer, last_inquiry

# seconds from the end of the first rank, or from Ctrl-C, until a rank that does not come to an end by itself is ended
_TO_END = 3.0
_WITHOUT_NEWS = 5  # looks from one that asks for everything to the next
_TO_RAISE = 1.5  # seconds for the main thread to raise KeyboardInterrupt by itself


class Watch(threading.Thread):
    def __init__(self, job: Job) -> None:
        super().__init__(name="shardwright-watch", daemon=True)
        self._job = job
        # made while the server is there for sure: it may end before this thread first looks, and is missed at once then
        self._client = job.new_client()
        self._stopping = False
        self._end_at: float | None = None
        # the last inquiry that was answered, with the generation of the job that it was made in
        self._answered = 0, 0
        self._heard: tuple[int, int | None] = 0, None  # generation of the job, and what was announced in it
        self._looks_without_news = 0
        self.asked: float | None = None  # since when the store has been asked for something; None: it has answered
        self._interrupted_at: float | None = None
        self._interrupt_raised = False
        self._listens = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> None:
        """Start, and listen to the signals that nobody else has asked for; they can be asked for from the main
        thread only.
        """
        self.start()
        _keep_from_children(self)
        if threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def stop(self) -> None:
        """End the thread: a thread that asks for Python's lock while the interpreter is taken apart aborts it."""
        self._stopping = True
        self.stop_listening()
        self._writer.send(b"\0")
        self.join(2 * POLL)

    def stop_listening(self) -> None:
        """Signals do again what they did before. Also for a forked child, whose signals would be taken for this
        process's.
        """
        if not self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = False
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_terminate(self, *_: Any) -> None:
        """The thread answers; see `_read_signals`."""

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupt_raised = True
        raise KeyboardInterrupt

    def run(self) -> None:
        beats = 0
        job = self._job
        job.ask_through(self._client)
        next_look = 0.0
        while True:
            readable, _, _ = select.select([self._reader], [], [], POLL if self._end_at is None else 0.1)
            if readable:
                self._read_signals(self._reader.recv(64))
            if self._stopping:
                return
            self._keep_deadlines()
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + 0.8 * POLL
            beats += 1
            self.asked = time.monotonic()
            if job.tell(f"beat/{job.rank}", f"{beats} {job.checks} in {heart.words()}"):
                self._look()
            else:
                self._lose_store()
            self.asked = None

    def _lose_store(self) -> None:
        """Nobody hears of this rank any more, nor it of them: it ends, unless the store went with a script that was
        through, or with a job that all ranks leave.
        """
        job = self._job
        is_over = job.ending or job.server_left or not dist.is_initialized() or is_running(*job.server)
        if job.failure is None and not is_over:
            job.learn(job.lost_store())
            self._end_at = time.monotonic() + _TO_END

    def _look(self) -> None:
        """Hear what the others have to say, and do what follows; now and then also where nothing was announced, by a
        rank that has died between saying it and announcing it.
        """
        job = self._job
        heard = job.generation, job.news()
        self._looks_without_news = 0 if heard != self._heard else self._looks_without_news + 1
        if self._looks_without_news % _WITHOUT_NEWS:
            return
        self._heard = heard
        job.note_server()
        if job.failure is None:
            told = job.ask("failure")
            if told is not None:
                failure = Failure.from_json(told)
                job.learn(failure)
                if failure.kind == STALLED:
                    kill_stopped(job, [failure.rank])
            else:
                self._answer()
                for answer_besides in tuple(job.answers):
                    answer_besides()
        if job.failure is not None and self._end_at is None and job.ask("ended") is not None:
            self._end_at = time.monotonic() + _TO_END

    def _answer(self) -> None:
        """Tell where this rank stands, once to every inquiry."""
        inquiry = last_inquiry(self._job)
        this = self._job.generation, inquiry.number
        if inquiry.is_open and this != self._answered:
            self._answered = this
            answer(self._job, inquiry.number)

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        if self._end_at is not None and now > self._end_at + (3 * _TO_END if self._job.ending else 0):
            ending.leave_now(self._job)
        if self._interrupted_at is not None and not self._interrupt_raised:
            if now > self._interrupted_at + _TO_END:
                ending.leave_interrupted(self._job)
            if now > self._interrupted_at + _TO_RAISE and self._job.failure is None:
                # wakes a main thread that waits for other ranks
                self._job.learn(self._job.first(ending.interrupted(self._job)))

    def _read_signals(self, numbers: bytes) -> None:
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            self._interrupted_at = self._interrupted_at or time.monotonic()
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._on_terminate:
            ending.leave_terminated(self._job)


def _keep_from_children(watch: Watch) -> None:
    """A forked child (of a data loader, a `multiprocessing.Pool`) is no rank: what ends it must not end the rank, and
    must end it.

    The child inherits handlers and descriptor. A signal that reaches it before they are taken away waits until they
    are.
    """
    hears, before = weakref.ref(watch), threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def release_child() -> None:
        here = hears()
        if here is not None:
            here.stop_listening()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_child)
