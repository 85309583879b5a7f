"""Weight gradients that wait: the backward of a product returns dx at once and leaves dW for later.

Zero-bubble schedules split the backward of a stage into I (input gradients, which the previous stage waits for) and W
(weight gradients, which nobody waits for). The functions of `ops.linear` and `ops.postponed` ask `store_for(parameter)`
in their backward:

    none active     dW is computed and returned to autograd as usual
    a store active  (parameter, x, dy) goes to the store and autograd sees no gradient for the parameter

    store = WeightGradStore()
    with store.deferring((chunk, microbatch)):      # I
        loss.backward()
    ...
    store.run((chunk, microbatch))                  # W: parameter.grad is complete

`run` accumulates into `parameter.grad` as autograd would: in place where there is a gradient (a view of a flat buffer
stays one), in `parameter.grad_dtype` where that is set. A product adds itself to a gradient of its own dtype as it
multiplies, which spares writing and reading dW and rounds as the kernel does; else the result is bitwise that of the
immediate backward, as long as a parameter is used once.

The gradient of a parameter with a script's hooks does not wait: autograd, which would call them without one in I,
accumulates it there. Only hooks that are made for it (`told_late`) fire when `run` has come to the last gradient of a
parameter in a queue, and also in I.

[Note: memory of what waits]
A postponed gradient holds x and dy until it is computed, so a store has a limit in bytes. What exceeds it is computed
at once, the oldest first: the same gradients in the same order, only earlier than the schedule's W asks, which then
finds less to do.

Activation checkpointing: tensors that autograd unpacks are detached aliases, so the queue holds the `Parameter` object
itself.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..comm.compat import gradient_hooks, post_accumulate_hooks


class Part(Protocol):
    """Which elements of a parameter a product multiplies with."""

    def view(self, whole: Tensor) -> Tensor | None:
        """The same elements of the parameter's gradient, to be changed in place; None where they are no view."""

    def add(self, whole: Tensor, grad: Tensor) -> None:
        """Add the gradient of the part to that of the whole parameter."""


class Compute(Protocol):
    """dW, or, added to `into` (of the shape of dW) where that can be done in one, None."""

    def __call__(self, into: Tensor | None, /) -> Tensor | None: ...


class _Waiting(NamedTuple):
    param: Parameter
    part: Part | None
    compute: Compute
    held: tuple[tuple[int, int], ...]  # (address, bytes) of the memory that waits with it
    tensors: Sequence[Tensor]  # that wait with it, and
    versions: list[int]  # how often each had been edited


_EDITED = (
    "the gradient of a weight of shape {shape} waits, as pp_style 'zb', 'zbv' and 'dualpipev' have it, and what it is "
    "computed from was edited in place meanwhile, as a buffer is that every forward updates: multiply with a copy of "
    "it (buffer.clone()), or let nothing wait (deferred_bytes=0)"
)

# innermost last; process-wide, because on CUDA backward runs on a thread of the engine
_active: list[WeightGradStore | None] = []
_any_store = False
_told_late: weakref.WeakSet[Callable[[Tensor], None]] = weakref.WeakSet()
_TAKES_NONE = "_shardwright_takes_none"
_Hook = TypeVar("_Hook")


class WeightGradStore:
    """Queues of postponed weight gradients, one per key; a key is whatever the schedule runs as one W action.

    limit   bytes that may wait; see the note above
    prompt  parameters whose gradients never wait
    bytes   that wait now; memory that several gradients need counts once
    peak    most bytes that ever waited at once
    """

    def __init__(self, limit: float = math.inf, prompt: Collection[Parameter] = ()) -> None:
        self.limit = limit
        self.prompt = frozenset(prompt)
        self.bytes = self.peak = 0
        self._queues: dict[Hashable, deque[_Waiting]] = {}
        # whose hooks `run` is to fire, with how many gradients still wait
        self._met: dict[Hashable, dict[Parameter, int]] = {}
        self._users: Counter[int] = Counter()  # of memory, by address
        self._key: Hashable = None
        global _any_store
        _any_store = True

    @contextmanager
    def deferring(self, key: Hashable = None) -> Iterator[None]:
        """Weight gradients of backwards run in here go to queue `key`. Contexts nest; the innermost one counts."""
        outer, self._key = self._key, key
        _active.append(self)
        try:
            yield
        finally:
            assert _active.pop() is self, "deferring() contexts must be left in the reverse order of entering"
            self._key = outer

    def put(self, param: Parameter, compute: Compute, held: Sequence[Tensor] = (), part: Part | None = None) -> None:
        """Postpone the gradient of `param`, or of a part of it, to be accumulated into `param.grad`.

        held    the tensors that have to wait for it
        """
        memory = tuple(
            (storage.data_ptr(), storage.nbytes()) for tensor in held for storage in (tensor.untyped_storage(),)
        )
        for address, size in memory:
            if not self._users[address]:
                self.bytes += size
            self._users[address] += 1
        self._queues.setdefault(self._key, deque()).append(
            _Waiting(param, part, compute, memory, held, [tensor._version for tensor in held])
        )
        met = self._met.setdefault(self._key, {})
        met[param] = met.get(param, 0) + 1
        while self.bytes > self.limit and self._run_first(lambda key: True):
            pass
        self.peak = max(self.peak, self.bytes)

    def run(self, key: Hashable = None) -> None:
        """Compute and accumulate the gradients of queue `key`, in the order in which backward met them."""
        met, queue = self._met.get(key, {}), self._queues.get(key, ())
        # those whose gradients were computed before
        for param in [param for param, waiting in met.items() if not waiting]:
            _fire_hooks(param)
        while queue:
            param = self._take(key, queue)
            if not met[param]:
                _fire_hooks(param)
        self._queues.pop(key, None)
        self._met.pop(key, None)

    def parameters(self, key: Hashable = None) -> Collection[Parameter]:
        """Whose gradients `run` completes."""
        return self._met.get(key, {}).keys()

    def run_one_of_others(self) -> bool:
        """Compute the oldest gradient of another queue than the one being filled, if there is one: work for while a
        message travels.
        """
        return self._run_first(lambda key: key != self._key)

    def discard(self) -> None:
        """Forget everything postponed (a step that failed)."""
        self._queues.clear()
        self._met.clear()
        self._users.clear()
        self.bytes = 0

    def pending(self, key: Hashable = None) -> int:
        """Number of gradients that queue `key` holds."""
        return len(self._queues.get(key, ()))

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def _run_first(self, wanted: Callable[[Hashable], bool]) -> bool:
        for key, queue in self._queues.items():
            if queue and wanted(key):
                self._take(key, queue)
                return True
        return False

    @torch.no_grad()  # the computation too: x and dy may belong to graphs
    def _take(self, key: Hashable, queue: deque[_Waiting]) -> Parameter:
        # which frees x and dy before the next gradient is computed
        param, part, compute, held, tensors, versions = queue.popleft()
        for address, size in held:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self.bytes -= size
        if [tensor._version for tensor in tensors] != versions:
            raise ValueError(_EDITED.format(shape=tuple(param.shape)))
        _accumulate(param, part, compute)
        self._met[key][param] -= 1
        return param


def active_store() -> WeightGradStore | None:
    """The store that backward should leave weight gradients in, or None."""
    return _active[-1] if _active else None


def told_late(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Mark a post-accumulate hook that may be called when there is no gradient yet, and again when `run` has
    accumulated it; or a hook on gradients that may be called with None, and with all that was accumulated by `run`.
    """
    _told_late.add(hook)
    return takes_none(hook)


def takes_none(hook: _Hook) -> _Hook:
    """Mark a hook that may be called though a node has left the gradient out."""
    setattr(hook, _TAKES_NONE, True)
    return hook


def may_be_left_out(weight: Tensor) -> bool:
    """Whether no hook of `weight` minds that autograd comes to it without a gradient. A script's hooks do: torch calls
    them only for weights that the loss depends on.
    """
    return all(hasattr(hook, _TAKES_NONE) for hook in gradient_hooks(weight) + post_accumulate_hooks(weight))


def store_for(param: Tensor | None) -> WeightGradStore | None:
    """The store that backward should leave the gradient of `param` in, or None: autograd takes it."""
    store = active_store()
    if store is None or not isinstance(param, Parameter) or param in store.prompt:
        return None
    return store if all(hook in _told_late for hook in gradient_hooks(param) + post_accumulate_hooks(param)) else None


def deferral_possible() -> bool:
    """Whether a store was ever made, so that a forward made now may meet one in its backward.

    Plain linears take torch's own, cheaper backward until then. A forward made before the first store computes its
    weight gradients at once, which is correct, only not postponed; make the store before the first forward.
    """
    return _any_store


def _fire_hooks(param: Parameter) -> None:
    """In the order of autograd."""
    grad = param.grad
    for hook in gradient_hooks(param):
        if grad is not None and hook in _told_late:
            hook(grad)
    for hook in post_accumulate_hooks(param):
        hook(param)


def _accumulate(param: Parameter, part: Part | None, compute: Compute) -> None:
    """`param.grad += dW` the way autograd does it, without its hooks."""
    whole = param.grad
    if part is not None and whole is None:
        whole = param.grad = torch.zeros(
            param.shape, dtype=getattr(param, "grad_dtype", None) or param.dtype, device=param.device
        )
    grad = compute(whole if part is None or whole is None else part.view(whole))
    if grad is None:
        return
    if part is not None and whole is not None:
        part.add(whole, grad)
    elif whole is not None:
        whole.add_(grad)
    else:
        param.grad = grad.to(getattr(param, "grad_dtype", None) or param.dtype)


def add_product(a: Tensor, b: Tensor, into: Tensor | None) -> Tensor | None:
    """a b, or added to `into` where that has the same dtype: a [M, K], b [K, N], or stacks of them."""
    if into is None or into.dtype != a.dtype:
        return a.matmul(b)
    if a.dim() == 2:
        into.addmm_(a, b)
    else:
        into.baddbmm_(a, b)
    return None
