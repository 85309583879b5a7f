"""Sequences that are split along the ranks of tensor parallelism: what the settings must say, and what stages are told.

See `shardformer.sequence` for what layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ...shardformer.layer.sequence import Stack
from ...shardformer.sequence import AlongTensor, SequencePlan, split_lengths
from ...utils.carried import holding
from ..settings import HybridSettings
from .resolved import ResolvedLayout

TENSOR_MODES = ("split_gather", "ring")


def check_along_tensor(settings: HybridSettings, mode: str) -> None:
    """ValueError for settings under which `mode`, one of `TENSOR_MODES`, has nothing to do or cannot be right."""
    layout, pipeline = settings.layout, settings.pipeline
    if layout.tp_size == 1:
        raise ValueError(
            f"sequence_parallelism_mode={mode!r} with tp_size=1: it splits sequences over the ranks of tensor "
            "parallelism; use tp_size=2 or more, or enable_sequence_parallelism=False"
        )
    if (layout.sp_size or 1) > 1:
        raise ValueError(
            f"sp_size={layout.sp_size} with sequence_parallelism_mode={mode!r}: that mode splits sequences over the "
            "tp_size ranks and has no axis of its own; use sp_size=1, or sequence_parallelism_mode='all_to_all'"
        )
    if pipeline.num_sequence_slices > 1:
        raise ValueError(
            f"num_sequence_slices={pipeline.num_sequence_slices} with sequence_parallelism_mode={mode!r}: both cut "
            "sequences; use num_sequence_slices=1, or enable_sequence_parallelism=False"
        )


def along_tensor(settings: HybridSettings) -> AlongTensor | None:
    """How layers split sequences; None: they do not."""
    mode = settings.sequence_mode
    if mode not in TENSOR_MODES:
        return None
    return AlongTensor(again=settings.sharding.enable_sequence_overlap, ring=mode == "ring")


def without_sequences() -> dict[str, Any]:
    """Options for layers and policies, which are not told: what they do is done to their results."""
    return {
        "enable_sequence_parallelism": False,
        "sequence_parallelism_mode": None,
        "enable_sequence_overlap": False,
    }


def with_sequences(layout: ResolvedLayout, settings: HybridSettings) -> ResolvedLayout:
    """`layout` with a word on how sequences are split."""
    how = along_tensor(settings)
    if how is None:
        return layout
    ranks = layout.sizes["tp"]
    note = f"sequences are split over the {ranks} tensor-parallel ranks between attention and MLPs: 1/{ranks} of the "
    note += "activations there"
    if how.ring:
        note += "; they are gathered and scattered in parts, beside the products"
    if how.again:
        note += "; inputs of column linears are gathered again in backward, and kept as parts too"
    return replace(layout, notes=(*layout.notes, note))


def refuse_hidden_states(model: nn.Module, plan: SequencePlan | None) -> None:
    """Let `model` refuse calls for what its layers return one by one, which are parts of sequences."""
    if plan is None:
        return

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        wanted = kwargs.get("output_hidden_states")
        if wanted is None:
            wanted = getattr(getattr(module, "config", None), "output_hidden_states", False)
        if wanted:
            raise ValueError(
                "output_hidden_states=True with sequences that are split over tensor parallelism: between layers a "
                "rank holds a part of every sequence; leave it out, or use enable_sequence_parallelism=False"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


class StageLengths:
    """Tells the layers of a pipeline stage how long the sequences of a microbatch are, of which stages behind the first
    receive parts.

    numbers     what a forward runs in besides
    """

    def __init__(
        self, numbers: Callable[[], AbstractContextManager[None]], plan: SequencePlan | None, ranks: int
    ) -> None:
        self._numbers, self._plan, self._ranks = numbers, plan, ranks

    @contextmanager
    def __call__(self, batch: Any = None) -> Iterator[None]:
        with holding({}), self._numbers():
            if self._plan is not None and batch is not None:
                for name, length in split_lengths(batch, tuple(self._plan.stacks)).items():
                    Stack(name, trains=self._plan.trains).tell(length, self._ranks)
            yield
