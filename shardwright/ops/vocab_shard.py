"""Which ids of a vocabulary a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..spec import ParamSpec


@dataclass(frozen=True)
class VocabShard:
    """One rank's rows of an embedding, or columns of the logits: `length` real ids from `start` on, then padding up to
    `local`.

    group    the ranks that share the vocabulary
    size     number of ids in the whole vocabulary, padding not counted
    start    first id that this rank holds (0 when `length` is 0)
    length   number of ids that this rank holds; 0 on a rank that holds only padding
    local    rows of this rank's shard, padding included
    """

    group: dist.ProcessGroup
    size: int
    start: int
    length: int
    local: int

    def __post_init__(self) -> None:
        assert 0 <= self.length <= self.local
        assert self.length == 0 or 0 <= self.start <= self.start + self.length <= self.size

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        return self  # a value; and process groups cannot be copied

    @classmethod
    def even(cls, size: int, group: dist.ProcessGroup, multiple_of: int = 1) -> VocabShard:
        """The vocabulary padded to a multiple of `multiple_of` times the number of ranks and dealt in equal runs."""
        ranks, rank = group.size(), group.rank()
        local = -(-size // (ranks * multiple_of)) * multiple_of
        start = rank * local
        length = max(0, min(local, size - start))
        return cls(group, size, start if length else 0, length, local)

    @classmethod
    def from_spec(cls, spec: ParamSpec, group: dist.ProcessGroup) -> VocabShard:
        """The shard that `spec` gives this rank of a parameter split along its vocabulary dim."""
        assert spec.dim is not None, f"{spec.name} is not sharded"
        pieces = spec.pieces[group.rank()]
        real = [piece for piece in pieces if not piece.is_padding and piece.length]
        assert not real or (len(real) == 1 and pieces[0] == real[0]), (
            f"{spec.name}: a vocabulary shard is one run of ids, then padding: {pieces}"
        )
        start, length = real[0] if real else (0, 0)
        return cls(group, spec.full_shape[spec.dim], start, length, sum(piece.length for piece in pieces))
