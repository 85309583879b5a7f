"""What a pipeline rank shares with its data-parallel peers, chunk by chunk: gradients are reduced, weights are
gathered.

Gradients of a chunk are reduced as soon as its own are complete.

At stages 0 and 1 gradients accumulate over the microbatches of a step, and the buckets of a chunk leave in its last
backward (or last weight gradients), as each is complete. At stage 2 every microbatch's gradients leave like that, into
the shards.

Parameters that several chunks of the rank use, and those with copies on other ranks, are a section of their own: the
first are complete when all chunks are, and the second are summed with ranks that are at other points of the schedule,
for whom nobody must wait in the middle of it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ...pipeline.stage import StagedModel
from ...spec import get_spec
from ...zero.layout import SHARED
from ...zero.optimizer import ZeroOptimizer
from ...zero.unit_gatherer import UnitGatherer


class ChunkReduction:
    """Tells `optimizer` when gradients of which chunk are made (`pipeline.runtime.Reduction`)."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer

    def begin(self, chunk: int, last: bool, of: Collection[nn.Parameter] | None) -> None:
        self._optimizer.expect_gradients(chunk, last, of)

    def end(self, chunk: int, last: bool) -> None:
        self._optimizer.reduce_grad(chunk, last)
        if chunk == 0:  # where a microbatch's backward on this rank ends
            self._optimizer.reduce_grad(SHARED, last=False)

    def finish(self) -> None:
        self._optimizer.reduce_grad(SHARED)


class ChunkGathering:
    """Gathers the weights of chunks for the pipeline (`pipeline.runtime.Gathering`). Those that several chunks use
    stay for the step.
    """

    def __init__(self, units: UnitGatherer) -> None:
        self._units = units

    def begin(self) -> None:
        self._units.open_section(SHARED)

    def gather(self, chunk: int) -> None:
        self._units.open_section(chunk)

    def wait(self, chunk: int) -> None:
        self._units.wait_section(SHARED)
        self._units.wait_section(chunk)

    def free(self, chunk: int) -> None:
        self._units.close_section(chunk)

    def end(self) -> None:
        self._units.end_backward()


def chunks_gathered(ahead: int | None) -> int:
    """Of how many chunks a rank has the weights at once at stage 3. By default those of an F and a B that take
    turns, and the next one.
    """
    return 3 if ahead is None else 1 + ahead


def sections_of(staged: StagedModel) -> dict[nn.Parameter, int]:
    """For every parameter that this rank holds the number of the chunk that uses it, or `SHARED`."""
    users: dict[nn.Parameter, set[int]] = {}
    for chunk, stage in enumerate(staged.held):
        for param in staged.parameters_of(stage):
            users.setdefault(param, set()).add(chunk)
    sections = {}
    for param in staged.model.parameters():
        chunks, spec = users.get(param, set()), get_spec(param)
        alone = len(chunks) == 1 and (spec is None or spec.tied is None)
        sections[param] = min(chunks) if alone else SHARED
    return sections
