"""The dtype that autograd makes gradients of parameters in half precision in.

[Note: gradients of several uses] Over microbatches and ranks gradients are summed in fp32. Those of a parameter's uses
in one backward (a tied embedding, a layer that runs several times) autograd sums before anybody sees them, in the
parameter's `grad_dtype`. Where that is fp32 it converts each of them first: 6 bytes an element, and room for the copy.
So fp32 is for parameters with several uses. The gradient of a single use is converted as it is copied to where
gradients are summed. How many uses there are the graph of a loss tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..utils.grad_fns import grad_fns_of
from .param_guard import own_gradient

_LOOKS = 4  # at so many losses; a parameter that none of them uses stays as it is


class GradDtypes:
    """Of `params`, which have half precision and are summed in `summed`; `wide`: they start with it."""

    def __init__(self, params: Iterable[nn.Parameter], summed: torch.dtype, wide: bool) -> None:
        self._summed = summed
        self._unknown = set(params)
        self._looks = 0
        if wide:
            for param in self._unknown:
                _set(param, summed)

    def look_at(self, loss: torch.Tensor) -> None:
        """Backward of `loss` is next."""
        if not self._unknown:
            return
        for param, number in uses(loss).items():
            if param in self._unknown and own_gradient(param) is None:
                self._unknown.discard(param)
                _set(param, self._summed if number > 1 else param.dtype)
        self._looks += 1
        if self._looks == _LOOKS:
            self._unknown.clear()


def uses(loss: torch.Tensor) -> Counter[nn.Parameter]:
    """How many gradients autograd will sum for every leaf of the graph."""
    leaves = (leaf for grad_fn in grad_fns_of(loss) for leaf, _ in grad_fn.next_functions)
    return Counter(leaf.variable for leaf in leaves if hasattr(leaf, "variable"))


def _set(param: Any, dtype: torch.dtype) -> None:
    param.grad_dtype = dtype
