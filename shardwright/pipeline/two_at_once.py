"""A forward and a backward of one rank at the same time, so that the collectives of the one pass while the other
computes.

Both are ordinary Python: any model's forward, and autograd. So they run on two threads, the forward on the caller's and
the backward on one made for it, of which only one goes on at any time. The turn changes where a collective has been
launched (`comm.turns`), strictly back and forth until one of the two has ended:

    forward    compute, launch, pass on                             compute, launch, pass on
    backward                               compute, launch, pass on                             compute, ...

The order of everything, launches included, thus follows from the two computations alone and is the same on all ranks
that share them. If the forward launches nothing, no other thread takes part: the backward then runs behind it.

[Note: what belongs to one of the two]
threads     torch keeps grad mode, autocast, modes, the current device and its stream per thread: the backward gets the
            caller's as they were before the forward (`Surroundings`). On CUDA autograd runs backwards on threads of its
            own, so whoever is not the caller's thread takes the turns of the backward. What a forward of ours notes
            about itself is kept per thread as well
random      both draw from the global generators, which therefore change hands with the turn. The forward goes on with
            the numbers it would have had alone; the backward starts from the state before the pair, sets the generators
            where it recomputes a layer, and leaves nothing behind. So masks of dropout, and every result, are bit by
            bit those of the forward followed by the backward
streams     on CUDA both use the caller's stream, where one waits for a collective only behind what the other has
            launched. Memory is therefore used again in the order of that stream, as in a single computation

[Note: what fails]
An error of one ends the other where it next passes on or gets its turn, by an exception that `except Exception` does
not catch; then it is raised by `run`, and `failed_forward` says whose it is. A collective that was on its way is left
alone, as in any step that fails.

A forward that itself runs a backward on CUDA (`torch.autograd.grad` inside a model) would wait for autograd's thread,
which may be waiting for its turn: such models need a schedule without pairs.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from ..comm import turns
from ..comm.compat import current_modes, with_modes
from ..utils.generators import States, accelerator_module, get_states, set_states

FORWARD, BACKWARD = 0, 1


class _Stop(BaseException):
    """The other of the two has failed."""


class Surroundings:
    """What torch keeps for the calling thread, to be laid around work on another one."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._modes = current_modes()
        self._accelerator = accelerator_module()
        self._stream = None if self._accelerator is None else self._accelerator.current_stream()
        devices = ["cpu"] if self._accelerator is None else ["cpu", torch.accelerator.current_accelerator().type]  # type: ignore[union-attr]
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in devices
            if torch.is_autocast_enabled(device)
        ]

    def run(self, work: Callable[[], None]) -> None:
        self._context.run(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        with self._entered():
            work()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._stream is not None:
                self._accelerator.set_device(self._stream.device)
                stack.enter_context(self._accelerator.stream(self._stream))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype, cached in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
            stack.enter_context(with_modes(self._modes))
            yield


class TwoAtOnce:
    """Runs pairs, one after the other. The thread is made by the first pair that needs it and ends with this object.

    failed_forward  whether the last error that `run` raised was the forward's
    changes         how often the turn has changed
    """

    def __init__(self) -> None:
        self.failed_forward = False
        self.changes = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] | None = None
        # by which one gives the other the turn
        self._wakes: tuple[SimpleQueue[None], SimpleQueue[None]] = SimpleQueue(), SimpleQueue()
        self._caller = 0
        self._turn = FORWARD
        self._begun = self._stopping = False
        self._ended = [False, False]
        self._error: BaseException | None = None
        self._states: list[States | None] = [None, None]
        self._surroundings: Surroundings | None = None
        self._backward: Callable[[], None] | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Both, to their ends. An error of either is raised when neither runs any more."""
        self._caller = threading.get_ident()
        self._turn, self._begun, self._stopping, self._ended, self.failed_forward = (
            FORWARD,
            False,
            False,
            [False, False],
            True,
        )
        self._backward, self._surroundings, self._states = backward, Surroundings(), [None, get_states()]
        self._wakes = SimpleQueue(), SimpleQueue()
        try:
            with turns.taken(self._pass_on):
                try:
                    forward()
                except BaseException:
                    self._stopping = True
                    raise
                finally:
                    self._ended[FORWARD] = True
                    self._end_backward()
            self.failed_forward = False
            if not self._begun:
                backward()
        except _Stop:
            pass  # the backward has failed
        finally:
            error, self._error = self._error, None
            self._backward, self._surroundings, self._states = None, None, [None, None]
        if error is not None:
            self.failed_forward = False
            raise error

    def _pass_on(self) -> None:
        """Called by the one whose turn it is; returns at its next turn."""
        mine = FORWARD if threading.get_ident() == self._caller else BACKWARD
        if self._stopping:
            raise _Stop
        if not self._ended[1 - mine]:
            self._give_turn(mine)
            self._wakes[mine].get()
            if self._stopping:
                raise _Stop

    def _give_turn(self, mine: int) -> None:
        if not self._ended[mine]:
            self._states[mine] = get_states()
        other = 1 - mine
        states = self._states[other]
        assert states is not None
        set_states(states)
        self._turn = other
        self.changes += 1
        if other == FORWARD or self._begun:
            self._wakes[other].put(None)
        else:
            self._begun = True
            self._queue().put(self._run_backward)

    def _end_backward(self) -> None:
        """On the caller's thread: until the backward is through, or has been stopped."""
        if self._begun and self._turn == FORWARD:  # else the caller was interrupted while it waited for its turn
            self._states[FORWARD] = get_states()
        while self._begun and not self._ended[BACKWARD]:
            if self._turn == FORWARD:
                self._give_turn(FORWARD)
            self._wakes[FORWARD].get()

    def _run_backward(self) -> None:
        """On the other thread."""
        assert self._surroundings is not None
        assert self._backward is not None
        try:
            self._surroundings.run(self._backward)
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
            self._stopping = True
        self._ended[BACKWARD] = True
        self._give_turn(BACKWARD)

    def _queue(self) -> SimpleQueue[Callable[[], None] | None]:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            thread = threading.Thread(target=_serve, args=(self._jobs,), name=turns.BACKWARD_THREAD, daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._jobs, thread)
        return self._jobs


def _end(jobs: SimpleQueue[Any], thread: threading.Thread) -> None:
    """When the object is gone, or the process about to end: a thread that wakes later finds an interpreter that is
    taken apart.
    """
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)


def _serve(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which knows the object whose end is to end this thread
