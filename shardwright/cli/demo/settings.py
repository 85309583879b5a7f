"""What one demo run is asked to do, validated before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_CPU_RANKS = 4


@dataclass(frozen=True)
class DemoSettings:
    """
    steps            optimizer steps
    world_size       ranks; the batch is split evenly over them
    batch_size       sequences per step over all ranks
    sequence_length  tokens per sequence
    seed             of text, weights and order
    output           directory for the results
    """

    steps: int = 200
    world_size: int = DEFAULT_CPU_RANKS
    batch_size: int = 32
    sequence_length: int = 64
    seed: int = 1024
    output: Path = Path("demo-results")

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            below, above = nearest_divisors(self.batch_size, self.world_size)
            raise ValueError(
                f"--world-size {self.world_size} does not divide --batch-size {self.batch_size}: every rank takes the same number of "
                f"sequences; a world size of {below} or {above}, or a batch size of {self._next_multiple()}, would work"
            )

    def _next_multiple(self) -> int:
        return -(-self.batch_size // self.world_size) * self.world_size

    @property
    def held_out_sequences(self) -> int:
        """About two batches, the same number for every rank."""
        return 2 * self.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def to_arguments(self) -> list[str]:
        """The options that make a rank process see these settings."""
        options = {"steps": self.steps, "batch-size": self.batch_size, "seed": self.seed, "output": self.output}
        return [f"--{name}={value}" for name, value in options.items()]


def nearest_divisors(number: int, wanted: int) -> tuple[int, int]:
    """The greatest divisor of `number` up to `wanted`, and the least from `wanted` on (`number` itself when there is none)."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return max(d for d in divisors if d <= wanted), min((d for d in divisors if d >= wanted), default=number)
