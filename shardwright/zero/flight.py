"""Gradients on their way to their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.handle import Handle
from ..comm.turns import Waitable
from .bucket import Bucket


@dataclass
class Flight:
    """A piece of a bucket on its way: elements [start, stop) of every shard. The reducer that launched it waits for it.

    fresh    whether the shard holds nothing of this step yet
    scatter  the reduce-scatter, in the buffers `lent`; None for what was scattered before
    groups   that are still to be all-reduced over
    final    whether the shard is complete after them
    part     what the reduce-scatter brought, in the dtype of the wire
    """

    bucket: Bucket
    start: int
    stop: int
    fresh: bool
    scatter: Handle[torch.Tensor] | None
    lent: list[torch.Tensor]
    groups: list[dist.ProcessGroup]
    final: bool
    part: torch.Tensor | None = None
    work: Waitable | None = None

    @property
    def scattering(self) -> bool:
        return self.scatter is not None and self.scatter.pending

    @property
    def shard(self) -> torch.Tensor:
        """Where the sum belongs."""
        return self.bucket.shard_grad[self.start : self.stop]
