"""Writes through `param.data` to parameters whose masters are copies: autograd does not count them, and masters must
follow.

A script that clips weights writes `param.data.clamp_(-c, c)`. It gets a tensor of which this remembers one thing, that
it was handed out: before the next step or save its values are compared with the master, once. What is written later
through a tensor that a script has kept is counted by that tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..comm.compat import TENSOR_DATA, without_torch_function


class DataWrites:
    """Knows which parameters may have been written to through tensors that `.data` gave."""

    def __init__(self) -> None:
        # an alias, and how often it had been written to
        self._handed_out: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._asked: set[nn.Parameter] = set()

    def read_data(self, param: nn.Parameter) -> torch.Tensor:
        """What `param.data` returns."""
        values: torch.Tensor = TENSOR_DATA.__get__(param)
        known = self._handed_out.get(param)
        if known is None or known[0].data_ptr() != values.data_ptr():
            self._handed_out[param] = values, values._version
        self._asked.add(param)
        return self._handed_out[param][0].detach()  # counts writes together with the alias

    def take(self) -> set[nn.Parameter]:
        """Parameters that may have been written to since the last call."""
        with without_torch_function():
            found = self._asked | {
                param for param, (alias, version) in self._handed_out.items() if alias._version != version
            }
            for param in found:
                alias, _ = self._handed_out[param]
                self._handed_out[param] = alias, alias._version
        self._asked = set()
        return found

    def forget(self, params: Iterable[nn.Parameter]) -> None:
        """What was handed out of these is no longer theirs."""
        for param in params:
            self._handed_out.pop(param, None)
