"""Activation checkpointing of the layers of a stage.

Layers are checkpointed here and not by the model's own switch, which sits at different places in different versions of
transformers: a checkpointed layer is run through `torch.utils.checkpoint` (non-reentrant) at its call, so that
everything inside, hooks included, is recomputed exactly once when the backward pass first needs it.

A selectively recomputed layer keeps what is dear to compute, the outputs of products and attention and the results of
collectives, and recomputes the rest (`ops.keeping`). So it runs no product and no collective twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.checkpoint import checkpoint

from ..ops.keeping import Region, Selection
from ..utils.carried import carried
from ..utils.errors import counted
from .saved_bytes import note_checkpointed


@dataclass(frozen=True)
class Recomputation:
    """Which layers the stages of one rank recompute: the first `whole` ones of a stage, and in part the `selective`
    ones behind them.
    """

    whole: Mapping[int, int] = field(default_factory=dict)
    selective: Mapping[int, int] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)

    def of(self, stage: int) -> tuple[int, int]:
        """Layers recomputed as a whole, and in part."""
        return self.whole.get(stage, 0), self.selective.get(stage, 0)


@dataclass(frozen=True)
class PipelineGradientCheckpointConfig:
    """How many layers of each stage are recomputed in the backward pass instead of being kept, as a whole or in part.

    gradient_checkpointing_ratio    share of every stage's layers, 0 to 1, rounded down; the stage's first layers are
                                    taken
    num_ckpt_layers_per_stage       layers of each stage instead: one number per stage (pp_size x num_model_chunks), or
                                    one per rank, which then counts over the rank's chunks in order
    selective_ratio                 share of every stage's layers that keep the outputs of products and attention and
                                    recompute only the rest: those behind the ones that are recomputed as a whole, as
                                    far as there are so many
    num_selective_layers_per_stage  layers of each stage instead, counted as above
    selective_keep                  operators whose outputs selectively recomputed layers keep: names, as ["aten.mm",
                                    "aten.addmm"], or a function from a name to whether it is kept; None: by cost (see
                                    `ops.keeping`)

    At least one number must be given, and of the first two, and of the second two, at most one.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None
    selective_ratio: float | None = None
    num_selective_layers_per_stage: Sequence[int] | None = None
    selective_keep: Callable[[str], bool] | Collection[str] | None = None

    def __post_init__(self) -> None:
        given = 0
        for ratio_name, numbers_name in _PAIRS:
            ratio, numbers = getattr(self, ratio_name), getattr(self, numbers_name)
            given += (ratio is not None) + (numbers is not None)
            if ratio is not None and numbers is not None:
                raise ValueError(
                    f"PipelineGradientCheckpointConfig needs exactly one of {ratio_name}={ratio!r} and "
                    f"{numbers_name}={numbers!r}"
                )
            if ratio is not None and not 0 <= ratio <= 1:
                raise ValueError(f"{ratio_name}={ratio!r} must be a share from 0 to 1")
            if numbers is not None and any(
                not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers
            ):
                raise ValueError(f"{numbers_name}={list(numbers)!r} must hold whole numbers of at least 0")
        if not given:
            raise ValueError(
                "PipelineGradientCheckpointConfig needs exactly one of gradient_checkpointing_ratio=None and "
                "num_ckpt_layers_per_stage=None, or of selective_ratio= and num_selective_layers_per_stage=, or one of "
                "each; gradient_checkpointing_ratio=1.0 recomputes all layers"
            )
        whole, in_part = self.gradient_checkpointing_ratio or 0.0, self.selective_ratio or 0.0
        if whole + in_part > 1:
            raise ValueError(
                f"gradient_checkpointing_ratio={whole!r} and selective_ratio={in_part!r} are shares of the same layers "
                f"and sum to {whole + in_part:g}, but they can be 1 at most; selective_ratio={1 - whole:g} would work"
            )
        self._check_keep()

    def _check_keep(self) -> None:
        keep = self.selective_keep
        if keep is None:
            return
        names = () if callable(keep) or isinstance(keep, str) else tuple(keep)
        if not callable(keep) and (
            not names or any(not isinstance(name, str) or name.count(".") != 1 for name in names)
        ):
            raise ValueError(
                f"selective_keep={keep!r} must be names of operators with their namespace, as ['aten.mm', "
                "'aten.addmm'], or a function that is given such a name and says whether its outputs are kept; None "
                "keeps products and attention"
            )
        if self.selective_ratio is None and self.num_selective_layers_per_stage is None:
            raise ValueError(
                f"selective_keep={keep!r} says what selectively recomputed layers keep, but there are none; give "
                "selective_ratio= or num_selective_layers_per_stage= too, or leave it out"
            )

    def of(self, stages: Sequence[range], rank: int, held: Sequence[int]) -> Recomputation:
        """What the stages in `held`, those of pipeline rank `rank`, recompute. `stages` are the units of all stages
        of the pipeline.
        """
        whole = self.layers_of(stages, rank, held)
        return Recomputation(whole, self._selective_of(stages, rank, held, whole), Selection(self.selective_keep))

    def layers_of(self, stages: Sequence[range], rank: int, held: Sequence[int]) -> dict[int, int]:
        """Checkpointed layers of each stage in `held`, the stages of pipeline rank `rank`.

        `stages` are the units of all stages of the pipeline.
        """
        if self.gradient_checkpointing_ratio is not None:
            return {stage: int(self.gradient_checkpointing_ratio * len(stages[stage])) for stage in held}
        lengths = [len(units) for units in stages]
        return _given("num_ckpt_layers_per_stage", self.num_ckpt_layers_per_stage, lengths, rank, held)

    def _selective_of(
        self, stages: Sequence[range], rank: int, held: Sequence[int], whole: Mapping[int, int]
    ) -> dict[int, int]:
        if self.selective_ratio is not None:
            return {
                stage: min(int(self.selective_ratio * len(stages[stage])), len(stages[stage]) - whole[stage])
                for stage in held
            }
        left = [len(units) - whole.get(stage, 0) for stage, units in enumerate(stages)]
        return _given("num_selective_layers_per_stage", self.num_selective_layers_per_stage, left, rank, held)


_PAIRS = (
    ("gradient_checkpointing_ratio", "num_ckpt_layers_per_stage"),
    ("selective_ratio", "num_selective_layers_per_stage"),
)


def _given(
    name: str, numbers: Sequence[int] | None, layers: Sequence[int], rank: int, held: Sequence[int]
) -> dict[int, int]:
    """The user's numbers for the stages in `held`, which pipeline rank `rank` holds; `layers` are those that each
    stage has.
    """
    if numbers is None:
        return dict.fromkeys(held, 0)
    numbers = list(numbers)
    num_ranks = len(layers) // len(held)
    whole = name == "num_ckpt_layers_per_stage"
    what = "checkpointed" if whole else "recomputed selectively"
    besides = "" if whole else " besides those that are recomputed as a whole"
    if len(numbers) == len(layers):
        for stage in range(len(layers)) if whole else held:
            if numbers[stage] > layers[stage]:
                works = f"at most {list(layers)} work" if whole else f"at most {layers[stage]} works there"
                there = f"stage {stage} has {counted(layers[stage], 'layer')}{besides}"
                raise ValueError(f"{name}={numbers}: {there}, so {numbers[stage]} of them cannot be {what}; {works}")
        return {stage: numbers[stage] for stage in held}
    if len(numbers) != num_ranks:
        raise ValueError(
            f"{name}={numbers} has {counted(len(numbers), 'entry', 'entries')}; there are {len(layers)} stages on "
            f"{num_ranks} ranks, so {len(layers)} or {num_ranks} entries work"
        )
    available = sum(layers[stage] for stage in held)
    if numbers[rank] > available:
        raise ValueError(
            f"{name}={numbers}: rank {rank} has {counted(available, 'layer')}{besides}, so {numbers[rank]} of them "
            f"cannot be {what}"
        )
    chosen, left = {}, numbers[rank]
    for stage in held:
        chosen[stage] = min(left, layers[stage])
        left -= chosen[stage]
    return chosen


def run_checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, keeping its inputs only; the backward pass runs it once more."""
    note_checkpointed((args, kwargs))
    return checkpoint(carried(function), *args, use_reentrant=False, **kwargs)


def run_selectively(selection: Selection, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, keeping its inputs and what `selection` says; the backward pass computes the rest once more."""
    region = Region(selection)
    output = checkpoint(carried(function), *args, use_reentrant=False, context_fn=region.contexts, **kwargs)
    note_checkpointed((args, kwargs, region.tensors()))
    return output
