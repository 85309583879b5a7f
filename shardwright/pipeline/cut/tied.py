"""Parameters that several stages on different ranks hold copies of.

Tied embeddings (one weight, read by the first stage as a table and by the last as the head), and small modules that
feed every stage. The copies start equal, and each gets the gradient of its own stage only; summing these before
anything else reads them gives every copy the gradient of the one parameter that the model means, and keeps the copies
bitwise equal for the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..planning.placement import Placement
from .survey import Survey


@dataclass(frozen=True)
class TiedGroup:
    """One parameter held by several ranks of the pipeline.

    names   all its names in the model, the canonical one first
    stages  stages that hold it, ascending
    ranks   pipeline ranks that hold a copy, ascending: two or more
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def find_tied_groups(survey: Survey, stages: Sequence[range], placement: Placement) -> list[TiedGroup]:
    """The parameters that are held by more than one rank, in the order of the model's parameters: the same list on
    every rank.
    """
    groups = []
    held = [survey.parameters(stages, stage) for stage in range(len(stages))]
    for name, aliases in survey.names.items():
        holders = tuple(stage for stage, names in enumerate(held) if name in names)
        ranks = tuple(sorted({placement.rank_of(stage) for stage in holders}))
        if len(ranks) > 1:
            groups.append(TiedGroup(aliases, holders, ranks))
    return groups


def create_tied_process_groups(
    groups: Iterable[TiedGroup], rank: int, group_of: Callable[[Sequence[int]], dist.ProcessGroup | None]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Process groups of this pipeline rank's tied groups, by pipeline ranks.

    `group_of(pipeline ranks)` returns the group over those ranks, or None to others (`ParallelMesh.tied_group`). It is
    called on all ranks and in the same order.
    """
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted({group.ranks for group in groups}):
        process_group = group_of(ranks)
        if rank in ranks:
            assert process_group is not None
            created[ranks] = process_group
    return created
