"""Summing the gradients of rows that several ranks of a model axis hold (key/value heads shared by tensor-parallel
ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ..ops.shared_grads import held_runs
from ..spec import ParamSpec


class SharedRows:
    """The shared rows of some parameters along one axis, exchanged in one all-reduce.

    Every rank writes its gradient of the rows it holds into a buffer of all shared rows, the buffer is summed over the
    axis, and every holder reads its rows back. `members` are (number, spec, coordinate on the axis) triples.
    """

    def __init__(self, members: Iterable[tuple[int, ParamSpec, int]], group: dist.ProcessGroup) -> None:
        self._runs = [(number, run) for number, spec, coordinate in members for run in held_runs(spec, coordinate)]
        self._sizes = [run.numel for _, run in self._runs]
        self._group = group
        self._buffer: torch.Tensor | None = None

    @torch.no_grad()
    def sum_(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Sum the shared rows of `grads` (number -> gradient of the local shard) over their holders, in place."""
        first = next(iter(grads.values()))
        if self._buffer is None or self._buffer.dtype != first.dtype:
            self._buffer = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
        places = self._buffer.split(self._sizes)
        pairs = [
            (run.of(grads[number]), place.view(run.shape))
            for (number, run), place in zip(self._runs, places, strict=True)
            if run.offset is not None
        ]
        self._buffer.zero_()
        for here, there in pairs:
            there.copy_(here)
        dist.all_reduce(self._buffer, group=self._group)
        for here, there in pairs:
            here.copy_(there)
