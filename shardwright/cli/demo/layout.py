"""How the demo's ranks are laid out: tensor parallel x pipeline x data parallel, as many of each as the ranks allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...utils.errors import counted

MICROBATCHES = 4
TWO_CHUNKS = ("interleaved", "zbv", "dualpipev")  # schedules in which a rank holds two parts of the model


@dataclass(frozen=True)
class Layout:
    """
    tp, pp, dp  ranks that share every layer; that hold successive layers; that take different sequences
    sp          ranks that share every sequence, by all-to-all
    zero        ZeRO stage
    pp_style    schedule of the pipeline
    device      "cpu" or "cuda"
    batch_size  sequences per step over all ranks
    """

    tp: int
    pp: int
    dp: int
    device: str
    batch_size: int
    sp: int = 1
    zero: int = 1
    pp_style: str = "1f1b"

    @classmethod
    def for_world(cls, world_size: int, batch_size: int, device: str) -> Layout:
        """Two pipeline stages as soon as the ranks come in pairs, layers shared by two when pairs come in pairs,
        data for the rest.
        """
        pp = 2 if world_size % 2 == 0 else 1
        tp = 2 if world_size % 4 == 0 else 1
        return cls(tp=tp, pp=pp, dp=world_size // (tp * pp), device=device, batch_size=batch_size)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.sp * self.dp

    @property
    def fits(self) -> bool:
        """Whether every data-parallel rank gets the same number of sequences."""
        return self.batch_size % self.dp == 0

    def plugin(self) -> Any:
        from ...plugins import HybridParallelPlugin  # imports torch, for which `--help` does not wait

        more: dict[str, Any] = {"num_model_chunks": self.chunks} if self.pp > 1 else {}
        if self.pp > 1:
            more["pp_style"] = self.pp_style
        if self.sp > 1:
            more |= {"sp_size": self.sp, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
        return HybridParallelPlugin(
            tp_size=self.tp,
            pp_size=self.pp,
            num_microbatches=self.microbatches,
            zero_stage=self.zero,
            precision="fp32",
            max_norm=1.0,
            **more,
        )

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return 2 if self.pp > 1 and self.pp_style in TWO_CHUNKS else 1

    @property
    def microbatches(self) -> int:
        """Of each data-parallel rank's part of the batch; without a pipeline there is nothing to gain from more than
        one.
        """
        return min(max(MICROBATCHES, 2 * self.pp), self.batch_size // self.dp) if self.pp > 1 else 1

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def __str__(self) -> str:
        sequence = f" x sequence parallel {self.sp}" if self.sp > 1 else ""
        sizes = f"tensor parallel {self.tp} x pipeline {self.pp}{sequence} x data parallel {self.dp}, ZeRO-{self.zero}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks ({sizes})"
        return f"{ranks}, {self.backend} on the {'GPU' if self.device == 'cuda' else 'CPU'}"

    def describe(self) -> dict[str, str | int]:
        """Every number of the layout, for layout.json and the report."""
        microbatches = counted(self.microbatches, "microbatch", "microbatches")
        return {
            "plugin": "HybridParallelPlugin",
            "ranks": self.ranks,
            "tensor parallel": self.tp,
            "pipeline stages": self.pp,
            "data parallel": self.dp,
            "sequence parallel": self.sp,
            "ZeRO stage": self.zero,
            "schedule": f"{self.pp_style}, {microbatches}" if self.pp > 1 else "no pipeline",
            "sequences per step": self.batch_size,
            "device": self.device,
            "backend": self.backend,
        }


def nearest_worlds(batch_size: int, wanted: int) -> tuple[int, int]:
    """The greatest number of ranks up to `wanted` and the least from `wanted` on (or the greatest at all) whose
    layout fits the batch.
    """
    fitting = [world for world in range(1, 4 * batch_size + 1) if Layout.for_world(world, batch_size, "cpu").fits]
    return max(world for world in fitting if world <= wanted), min(
        (world for world in fitting if world >= wanted), default=fitting[-1]
    )
