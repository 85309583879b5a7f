"""Activation checkpointing of the layers of a stage.

Layers are checkpointed here and not by the model's own switch, which sits at different places in different versions of transformers:
a checkpointed layer is run through `torch.utils.checkpoint` (non-reentrant) at its call, so that everything inside, hooks included,
is recomputed exactly once when the backward pass first needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import checkpoint

from .saved_bytes import note_checkpointed


@dataclass(frozen=True)
class PipelineGradientCheckpointConfig:
    """How many layers of each stage are recomputed in the backward pass instead of being kept.

    gradient_checkpointing_ratio  share of every stage's layers, 0 to 1, rounded down; the stage's first layers are taken
    num_ckpt_layers_per_stage     layers of each stage instead: one number per stage (pp_size x num_model_chunks), or one per rank,
                                  which then counts over the rank's chunks in order

    Exactly one of the two must be given.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def __post_init__(self) -> None:
        ratio, numbers = self.gradient_checkpointing_ratio, self.num_ckpt_layers_per_stage
        if (ratio is None) == (numbers is None):
            raise ValueError(
                f"PipelineGradientCheckpointConfig needs exactly one of gradient_checkpointing_ratio={ratio!r} and "
                f"num_ckpt_layers_per_stage={numbers!r}"
            )
        if ratio is not None and not 0 <= ratio <= 1:
            raise ValueError(f"gradient_checkpointing_ratio={ratio!r} must be a share from 0 to 1")
        if numbers is not None and any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
            raise ValueError(f"num_ckpt_layers_per_stage={list(numbers)!r} must hold whole numbers of at least 0")

    def layers_of(self, stages: Sequence[range], rank: int, held: Sequence[int]) -> dict[int, int]:
        """Checkpointed layers of each stage in `held`, the stages of pipeline rank `rank`.

        `stages` are the units of all stages of the pipeline.
        """
        if self.gradient_checkpointing_ratio is not None:
            return {stage: int(self.gradient_checkpointing_ratio * len(stages[stage])) for stage in held}
        numbers = list(self.num_ckpt_layers_per_stage or ())
        num_ranks = len(stages) // len(held)
        if len(numbers) == len(stages):
            for stage, (number, units) in enumerate(zip(numbers, stages, strict=True)):
                if number > len(units):
                    raise ValueError(
                        f"num_ckpt_layers_per_stage={numbers}: stage {stage} has {len(units)} layers, so {number} of them cannot be "
                        f"checkpointed; at most {[len(units) for units in stages]} work"
                    )
            return {stage: numbers[stage] for stage in held}
        if len(numbers) != num_ranks:
            raise ValueError(
                f"num_ckpt_layers_per_stage={numbers} has {len(numbers)} entries; there are {len(stages)} stages on {num_ranks} ranks, "
                f"so {len(stages)} or {num_ranks} entries work"
            )
        available = sum(len(stages[stage]) for stage in held)
        if numbers[rank] > available:
            raise ValueError(
                f"num_ckpt_layers_per_stage={numbers}: rank {rank} has {available} layers, so {numbers[rank]} of them cannot be "
                "checkpointed"
            )
        chosen, left = {}, numbers[rank]
        for stage in held:
            chosen[stage] = min(left, len(stages[stage]))
            left -= chosen[stage]
        return chosen


def run_checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, keeping its inputs only; the backward pass runs it once more."""
    note_checkpointed((args, kwargs))
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
