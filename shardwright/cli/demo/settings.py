"""What one demo run is asked to do, validated before any rank starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from .layout import Layout, nearest_worlds

DEFAULT_CPU_RANKS = 4
COMPARED = 12  # steps of every schedule but the first


@dataclass(frozen=True)
class DemoSettings:
    """
    steps            optimizer steps
    world_size       ranks; the batch is split evenly over those that take different sequences (see `layout.Layout`)
    batch_size       sequences per step over all ranks
    sequence_length  tokens per sequence
    seed             of text, weights and order
    output           directory for the results
    tp, pp, sp       ranks that share layers, follow one another, share sequences; None: chosen by the world size
    zero             ZeRO stage
    styles           schedules of the pipeline: the first trains, the others are compared with it
    """

    steps: int = 200
    world_size: int = DEFAULT_CPU_RANKS
    batch_size: int = 16
    sequence_length: int = 64
    seed: int = 1024
    output: Path = Path("demo-results")
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    zero: int = 1
    styles: tuple[str, ...] = ("1f1b",)

    def __post_init__(self) -> None:
        if self.is_laid_out:
            self._check_sizes()
            return
        replicas = self.layout("cpu").dp
        if self.batch_size % replicas:
            below, above = nearest_worlds(self.batch_size, self.world_size)
            more = -(-self.batch_size // replicas) * replicas
            raise ValueError(
                f"--world-size {self.world_size} takes the data in {replicas} parts, which does not divide "
                f"--batch-size {self.batch_size}: every part has the same number of sequences; a world size of {below} "
                f"or {above}, or a batch size of {more}, would work"
            )

    @property
    def is_laid_out(self) -> bool:
        """Whether an option says how ranks are laid out."""
        return (self.tp, self.pp, self.sp) != (None, None, None)

    @property
    def layers(self) -> int:
        """Of the model: one at least for every stage of every schedule, so that all train the same model."""
        layouts = [self.layout("cpu", style) for style in self.styles]
        return max(2, *(layout.pp * layout.chunks for layout in layouts))

    def layout(self, device: str, style: str | None = None) -> Layout:
        """Of one schedule, by default of the first."""
        style = style or self.styles[0]
        if not self.is_laid_out:
            chosen = Layout.for_world(self.world_size, self.batch_size, device)
            return replace(chosen, zero=self.zero, pp_style=style)
        tp, pp, sp = self.tp or 1, self.pp or 1, self.sp or 1
        replicas = self.world_size // (tp * pp * sp)
        return Layout(tp, pp, replicas, device, self.batch_size, sp, self.zero, style)

    def _check_sizes(self) -> None:
        tp, pp, sp = self.tp or 1, self.pp or 1, self.sp or 1
        sizes = f"--tp {tp} x --pp {pp} x --sp {sp}"
        if self.world_size % (tp * pp * sp):
            raise ValueError(
                f"--world-size {self.world_size} is no multiple of {sizes}, which takes {tp * pp * sp} ranks; "
                "leave one of them out, or ask for a multiple"
            )
        replicas = self.world_size // (tp * pp * sp)
        if self.batch_size % replicas:
            more = -(-self.batch_size // replicas) * replicas
            raise ValueError(
                f"{sizes} on {self.world_size} ranks takes the data in {replicas} parts, which does not divide "
                f"--batch-size {self.batch_size}; a batch size of {more} would work"
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
        options: dict[str, object] = {
            "steps": self.steps,
            "batch-size": self.batch_size,
            "seed": self.seed,
            "output": self.output,
        }
        sizes = {"tp": self.tp, "pp": self.pp, "sp": self.sp}
        options |= {name: value for name, value in sizes.items() if value is not None}
        if self.zero != 1:
            options["zero"] = self.zero
        if self.styles != ("1f1b",):
            options["pp-style"] = ",".join(self.styles)
        return [f"--{name}={value}" for name, value in options.items()]
