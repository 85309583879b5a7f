"""What one demo run is asked to do, validated before any rank starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from .layout import Layout, nearest_worlds

DEFAULT_CPU_RANKS = 4


@dataclass(frozen=True)
class DemoSettings:
    """
    steps            optimizer steps
    world_size       ranks; the batch is split evenly over those that take different sequences (see `layout.Layout`)
    batch_size       sequences per step over all ranks
    sequence_length  tokens per sequence
    seed             of text, weights and order
    output           directory for the results
    """

    steps: int = 200
    world_size: int = DEFAULT_CPU_RANKS
    batch_size: int = 16
    sequence_length: int = 64
    seed: int = 1024
    output: Path = Path("demo-results")

    def __post_init__(self) -> None:
        replicas = Layout.for_world(self.world_size, self.batch_size, "cpu").dp
        if self.batch_size % replicas:
            below, above = nearest_worlds(self.batch_size, self.world_size)
            more = -(-self.batch_size // replicas) * replicas
            raise ValueError(
                f"--world-size {self.world_size} takes the data in {replicas} parts, which does not divide "
                f"--batch-size {self.batch_size}: every part has the same number of sequences; a world size of {below} "
                f"or {above}, or a batch size of {more}, would work"
            )

    @property
    def held_out_sequences(self) -> int:
        """About two batches, the same number for every rank."""
        return 2 * self.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def command_line(self) -> str:
        """The command that does the same again."""
        return shlex.join(["shardwright", "demo", f"--world-size={self.world_size}", *self.to_arguments()])

    def to_arguments(self) -> list[str]:
        """The options that make a rank process see these settings."""
        options = {"steps": self.steps, "batch-size": self.batch_size, "seed": self.seed, "output": self.output}
        return [f"--{name}={value}" for name, value in options.items()]
