"""The dtype that autograd makes gradients of parameters in half precision in.

[Note: gradients of several uses] Over microbatches and ranks gradients are summed in fp32. Those of a parameter's uses
in one backward (a tied embedding, a layer that runs several times) autograd sums before anybody sees them, in the
parameter's `grad_dtype`. Where that is fp32 it converts each of them first: 6 bytes an element, and room for the copy.
So fp32 is for parameters with several uses. The gradient of a single use is converted as it is copied to where
gradients are summed. How many uses there are the graph of a loss tells: of every loss, since a layer that ran once may
run several times later, and the walk takes half a microsecond a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .param_guard import own_gradient

_LEAF = "AccumulateGrad"  # by name: a script's Function may keep a `variable`, too, and is called "...Backward"


class GradDtypes:
    """Of `params`, which have half precision and are summed in `summed`; `wide`: they start with it. From the first
    loss with several uses of a parameter on it is wide for good.
    """

    def __init__(self, params: Iterable[nn.Parameter], summed: torch.dtype, wide: bool) -> None:
        self._summed = summed
        self._used_once = set(params)  # at most, in every loss so far
        self._narrow = set() if wide else set(self._used_once)
        if wide:
            for param in self._used_once:
                _set(param, summed)

    def look_at(self, roots: Iterable[torch.Tensor]) -> None:
        """Backward of `roots` is next."""
        if not self._used_once:
            return
        for param, number in uses(roots).items():
            if param not in self._used_once or own_gradient(param) is not None:
                continue
            if number > 1:
                self._used_once.discard(param)
                _set(param, self._summed)
            elif param not in self._narrow:
                self._narrow.add(param)
                _set(param, param.dtype)


def uses(roots: Iterable[torch.Tensor]) -> Counter[nn.Parameter]:
    """How many gradients autograd will sum for every leaf of the graph."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves: dict[Any, int] = {}
    seen = set(waiting)
    while waiting:
        for before, _ in waiting.pop().next_functions:
            if before in leaves:
                leaves[before] += 1
            elif before is not None and before not in seen:
                if type(before).__name__ == _LEAF:
                    leaves[before] = 1
                else:
                    seen.add(before)
                    waiting.append(before)
    return Counter({leaf.variable: number for leaf, number in leaves.items()})


def _set(param: Any, dtype: torch.dtype) -> None:
    param.grad_dtype = dtype
