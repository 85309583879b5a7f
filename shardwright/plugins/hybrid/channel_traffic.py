"""What ranks send for convolutions whose channels they share (see `shardformer.convolution`).

How large channels are is seen in a forward on tensors without data, of a batch of the user's or one that is guessed;
where none runs, calls are counted and bytes are not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...models.dry_run import meta_copy, run_dry
from ...models.example_inputs import training_batches
from ...shardformer.convolution import ChannelNorms, ConvColumn, ConvGroups, ConvRow
from ...shardformer.styles import Decision
from ...utils.pytree import tree_leaves
from .resolved import Traffic
from .traffic import Tokens


@dataclass(frozen=True)
class Sizes:
    """Numbers of one sample that a convolution reads and writes, and whether what it reads has a gradient."""

    read: float
    written: float
    trains: bool


def channel_traffic(
    model: nn.Module, positions: Sequence[Sequence[Decision]], tokens: Tokens, samples: int | None, batch: Any
) -> list[Traffic]:
    """Collectives over tp of one step, at the pipeline position that has most of them.

    samples     of one rank and step, None while they are not known
    batch       a user's, or None
    """
    dealt = [[each for each in decisions if _is_of_channels(each)] for decisions in positions]
    if not any(dealt):
        return []
    sizes = sizes_of_channels(model, [each.site.name for decisions in dealt for each in decisions], batch)
    counted = [[_collectives(each, sizes.get(each.site.name)) for each in decisions] for decisions in dealt]
    busiest = max(counted, key=lambda calls: sum(len(sums) + len(gathers) for sums, gathers in calls))
    ranks = next(each.site.parallel.size for decisions in dealt for each in decisions)
    found = []
    for place, (what, factor) in enumerate((("all-reduce", 2), ("all-gather", 1))):
        calls = [size for of_one in busiest for size in of_one[place]]
        if not calls:
            continue
        known = None
        if samples is not None and None not in calls:
            numbers = sum(size if size is not None else 0 for size in calls)
            known = int(factor * (ranks - 1) * numbers * samples * tokens.itemsize / ranks)
        count = None if tokens.microbatches is None else len(calls) * tokens.microbatches
        found.append(Traffic("tp", f"channels of convolutions and their gradients, {what}", count, known))
    return found


def _is_of_channels(decision: Decision) -> bool:
    style = decision.style
    moves = isinstance(style, ChannelNorms) and bool(getattr(decision.site.module, "track_running_stats", False))
    dealt = isinstance(style, ConvGroups) and style.gather_output
    return moves or dealt or isinstance(style, ConvColumn | ConvRow)


def _collectives(decision: Decision, sizes: Sizes | None) -> tuple[list[float | None], list[float | None]]:
    """Numbers of a sample in each all-reduce, and in each all-gather, of one forward and backward; None where unknown.
    Those of running statistics are few, and counted without their bytes.
    """
    style = decision.style
    read, written = (None, None) if sizes is None else (sizes.read, sizes.written)
    trains = sizes is None or sizes.trains
    if isinstance(style, ConvColumn):
        return [read] * trains, [written] * style.gather_output
    if isinstance(style, ConvRow):
        return [written], [read] * (style.split_input and trains)
    if isinstance(style, ConvGroups):
        return [], [written, *[read] * trains]
    return [], [0.0]


def sizes_of_channels(model: nn.Module, names: Sequence[str], batch: Any) -> dict[str, Sizes]:
    """By name, of the convolutions that a forward reaches; none where no batch runs."""
    found: dict[str, Sizes] = {}
    rows = 1

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            known = found.get(name, Sizes(0, 0, False))
            read, written = (tensor.numel() / rows for tensor in (args[0], output))
            found[name] = Sizes(known.read + read, known.written + written, known.trains or args[0].requires_grad)

        return hook

    with contextlib.suppress(Exception):  # of the model's own code, on batches that were guessed
        copied = meta_copy(model)
        for name in names:
            copied.get_submodule(name).register_forward_hook(note(name))
        for each in (batch,) if batch is not None else training_batches(copied):
            found.clear()
            leaves = tree_leaves(dict(each) if isinstance(each, Mapping) else each)
            rows = min(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
            with contextlib.suppress(Exception):
                run_dry(copied, each)
                return found
    return {}
