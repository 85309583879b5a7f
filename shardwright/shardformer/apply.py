"""Do to a model what was decided about its parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from .drawing_regions import make_sharded_region
from .layer.embedding import LogitsParallel
from .layer.linear import ColumnParallel, input_size
from .layer.parallel_module import ParallelGroup
from .model import GeneratingModel, ShardedModel
from .plan import Plan
from .regions import Region, find_regions
from .rng import synchronize_rng, uses_dropout
from .styles import Decision


def apply_plan(model: nn.Module, plan: Plan, parallel: ParallelGroup) -> None:
    """Shard `model` in place; raises ValueError, with the model untouched, when the plan does not fit it."""
    decisions = plan.decide(model, parallel)
    apply_decisions(model, decisions, find_regions(model, decisions), parallel)


def apply_decisions(
    model: nn.Module,
    decisions: Sequence[Decision],
    regions: Sequence[Region],
    parallel: ParallelGroup,
    drawing: Sequence[Region] | None = None,
) -> None:
    """drawing: the regions that draw random numbers of their own, where it is not all of them"""
    for decision in decisions:
        try:
            decision.style.convert(decision.site, decision.specs)
        except ValueError as error:
            site = decision.site
            raise ValueError(f"{site.name} ({type(site.module).__name__}), rule {decision.rule!r}: {error}") from None
    _leave_fast_paths(model, decisions)
    _introduce_siblings(regions)
    if parallel.size > 1 and decisions:
        _divide_dropout(regions if drawing is None else drawing, parallel)
    adopt_root(model, parallel)


def adopt_root(model: nn.Module, parallel: ParallelGroup) -> None:
    if any(isinstance(module, LogitsParallel) for module in model.modules()):
        (GeneratingModel if hasattr(model, "generate") else ShardedModel).adopt(model, parallel)


def _leave_fast_paths(model: nn.Module, decisions: Sequence[Decision]) -> None:
    """torch's encoder layers read the weights of their linears by themselves where no gradients are wanted, and then
    compute with this rank's part alone.
    """
    changed = {id(decision.site.parent) for decision in decisions if decision.specs}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and id(module) in changed:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and changed & {id(layer) for layer in module.layers}:
            module.use_nested_tensor = False


def _introduce_siblings(regions: Sequence[Region]) -> None:
    """Column linears of a region that may share an input know each other (see the note in `ops.linear`)."""
    for region in regions:
        columns = [module for module in region.opens if isinstance(module, ColumnParallel)]
        for column in columns:
            column.siblings = tuple(
                other for other in columns if other is not column and input_size(other) == input_size(column)
            )


def _divide_dropout(regions: Sequence[Region], parallel: ParallelGroup) -> None:
    """Dropout between the opening and the closing of a region draws per rank, all other draws the same on every
    rank.
    """
    for region in regions:
        if region.opens and uses_dropout(region.module):
            make_sharded_region(region.module, parallel.group, region.opens, region.closes)
    synchronize_rng(parallel.group)
