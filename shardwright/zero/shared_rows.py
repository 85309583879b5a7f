"""Summing the gradients of rows that several ranks of a model axis hold (key/value heads shared by tensor-parallel
ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ..spec import ParamSpec


class SharedRows:
    """The shared rows of some parameters along one axis, exchanged in one all-reduce.

    Every rank writes its gradient of the rows it holds into a buffer of all shared rows, the buffer is summed over the
    axis, and every holder reads its rows back. `members` are (number, spec, coordinate on the axis) triples.

    With `rows`, a parameter's gradient is only a part of its shard: [start, stop) along dim 0, as FSDP deals them out;
    `group` must then hold all ranks that have a part.
    """

    def __init__(
        self,
        members: Iterable[tuple[int, ParamSpec, int]],
        group: dist.ProcessGroup,
        rows: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._members = list(members)
        self._group = group
        self._rows = rows or {}
        self._buffer: torch.Tensor | None = None

    @torch.no_grad()
    def sum_(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Sum the shared rows of `grads` (number -> gradient of the local shard) over their holders, in place."""
        first = next(iter(grads.values()))
        if self._buffer is None or self._buffer.dtype != first.dtype:
            self._buffer = torch.empty(self._buffer_size(), dtype=first.dtype, device=first.device)
        pairs = self._pairs(grads, self._buffer)
        self._buffer.zero_()
        for here, there in pairs:
            there.copy_(here)
        dist.all_reduce(self._buffer, group=self._group)
        for here, there in pairs:
            here.copy_(there)

    def _buffer_size(self) -> int:
        return sum(
            _run_numel(spec, coordinate, run.length)
            for _, spec, coordinate in self._members
            for run in spec.shared_runs
        )

    def _pairs(
        self, grads: Mapping[int, torch.Tensor], buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(rows of a gradient, their place in the buffer), where this rank holds them."""
        pairs, offset = [], 0
        for number, spec, coordinate in self._members:
            assert spec.dim is not None
            grad = grads[number]
            low, high = self._rows.get(number, (0, spec.local_shape(coordinate)[0]))
            for run in spec.shared_runs:
                shape = list(spec.local_shape(coordinate))
                shape[spec.dim] = run.length
                numel = _run_numel(spec, coordinate, run.length)
                place = buffer[offset : offset + numel].view(shape)
                offset += numel
                for in_run, in_shard, length in spec.local_runs(coordinate, run.start, run.length):
                    if spec.dim == 0:
                        start, stop = max(in_shard, low), min(in_shard + length, high)
                        if start < stop:
                            pairs.append(
                                (
                                    grad[start - low : stop - low],
                                    place[in_run + start - in_shard : in_run + stop - in_shard],
                                )
                            )
                    elif low < high:
                        pairs.append(
                            (grad.narrow(spec.dim, in_shard, length), place[low:high].narrow(spec.dim, in_run, length))
                        )
        return pairs


def _run_numel(spec: ParamSpec, coordinate: int, length: int) -> int:
    assert spec.dim is not None
    shape = list(spec.local_shape(coordinate))
    shape[spec.dim] = length
    numel = 1
    for size in shape:
        numel *= size
    return numel
