"""Weight gradients that wait: the backward of a linear returns dx at once and leaves dW for later.

Zero-bubble schedules split the backward of a stage into I (input gradients, which the previous stage waits for) and W (weight
gradients, which nobody waits for). The functions of `ops.linear` ask `active_store()` in their backward:

    none active     dW is computed and returned to autograd as usual
    a store active  (parameter, x, dy) goes to the store and autograd sees no gradient for the parameter

    store = WeightGradStore()
    with store.deferring((chunk, microbatch)):      # I
        loss.backward()
    ...
    store.run((chunk, microbatch))                  # W: parameter.grad is complete

`run` accumulates into `parameter.grad` as autograd would: in place where there is a gradient (a view of a flat buffer stays one), in
`parameter.grad_dtype` where that is set. The result is bitwise that of the immediate backward, as long as a parameter is used once per
backward. Hooks for after the accumulation fire, so that whoever counts gradients sees these too; hooks on the gradient itself do not,
because autograd never sees it.

Activation checkpointing: tensors that autograd unpacks are detached aliases, so the queue holds the `Parameter` object itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.comm.compat import post_accumulate_hooks

WeightGrad = Callable[[], Tensor]

_active: list[WeightGradStore | None] = []  # innermost last; process-wide, because on CUDA backward runs on a thread of the engine
_any_store = False


class WeightGradStore:
    """Queues of postponed weight gradients, one per key; a key is whatever the schedule runs as one W action."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[tuple[Parameter, WeightGrad]]] = defaultdict(list)
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

    def put(self, param: Parameter, compute: WeightGrad) -> None:
        """Postpone `compute() -> gradient of param`, to be accumulated into `param.grad`."""
        self._queues[self._key].append((param, compute))

    @torch.no_grad()  # the computation too: x and dy may belong to graphs
    def run(self, key: Hashable = None) -> None:
        """Compute and accumulate the gradients of queue `key`, in the order in which backward met them."""
        queue = self._queues.pop(key, [])
        queue.reverse()
        while queue:  # popping frees each x and dy before the next gradient is computed
            param, compute = queue.pop()
            accumulate_grad(param, compute())

    def run_all(self) -> None:
        """Every queue, in the order in which the queues were opened."""
        for key in list(self._queues):
            self.run(key)

    def discard(self) -> None:
        """Forget everything postponed (a step that failed)."""
        self._queues.clear()

    def pending(self, key: Hashable = None) -> int:
        """Number of gradients that queue `key` holds."""
        return len(self._queues.get(key, ()))

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())


@contextmanager
def immediate() -> Iterator[None]:
    """Inside, weight gradients are computed at once even if a store is deferring outside."""
    _active.append(None)
    try:
        yield
    finally:
        _active.pop()


def active_store() -> WeightGradStore | None:
    """The store that backward should leave weight gradients in, or None."""
    return _active[-1] if _active else None


def deferral_possible() -> bool:
    """Whether a store was ever made, so that a forward made now may meet one in its backward.

    Plain linears take torch's own, cheaper backward until then. A forward made before the first store computes its weight gradients at
    once, which is correct, only not postponed; make the store before the first forward.
    """
    return _any_store


@torch.no_grad()
def accumulate_grad(param: Parameter, grad: Tensor) -> None:
    """`param.grad += grad` the way autograd does it."""
    if param.grad is not None:
        param.grad.add_(grad)
    else:
        param.grad = grad.to(getattr(param, "grad_dtype", None) or param.dtype)
    for hook in post_accumulate_hooks(param):
        hook(param)
