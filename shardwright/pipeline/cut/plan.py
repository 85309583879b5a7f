"""Where a model is cut: planned without changing or communicating anything, then applied by every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...models.layer_chain import Unit, find_units
from ...models.skipped_layers import skipping
from .. import schedules
from ..batch.images import find_towers
from ..checkpointing import PipelineGradientCheckpointConfig, Recomputation
from ..loss.check import LossCheck
from ..loss.router_logits import RouterLogits, find_router_logits, without_router_logits
from ..planning.placement import Placement
from ..planning.rank_memory import Deferral
from ..planning.search import Found, search, transfers
from ..settings import PipelineSettings
from ..slices.sequence_slices import SliceRule
from ..slices.slice_check import slice_rule
from ..stage import StagedModel
from .balance import ChainCosts
from .bounded_cut import BoundedCut, room_to_wait
from .partition import chain_costs, given_units, partition_units, sequence_length
from .stage_check import StageCheck
from .survey import Survey
from .surveyor import survey_model
from .tied import TiedGroup, find_tied_groups


@dataclass(frozen=True)
class CutModel:
    """What one rank holds after the cut.

    staged       the model with its stages
    placement    where all stages live
    tied_groups  parameters that several ranks hold: the same list on every rank
    rank         this rank's position in the pipeline
    loss_check, costs, pp_style, slices, stage_check   see `CutPlan`
    """

    staged: StagedModel
    placement: Placement
    tied_groups: tuple[TiedGroup, ...]
    rank: int
    loss_check: LossCheck | None = None
    costs: ChainCosts | None = None
    pp_style: str = "1f1b"
    slices: SliceRule | None = None
    stage_check: StageCheck | None = None

    @property
    def holds_last_stage(self) -> bool:
        return self.placement.rank_of(self.placement.num_stages - 1) == self.rank


@dataclass(frozen=True)
class CutPlan:
    """Where a model will be cut: the same on every rank, found without changing the model.

    units, survey  the chain of layers and the facts about them (no survey with one stage)
    placement      where all stages live
    stages         units of every stage
    checkpointed   per pipeline rank: recomputed layers of its stages
    tied_groups    parameters that several ranks hold
    loss_check     finds out what losses do before they run; None where one microbatch on one rank is everything
    costs          of the units, by which the model was cut; None with one stage
    pp_style       the schedule, by name
    found          what the search found, where that was asked for
    routers        whose logits the last stage collects; None: it collects none
    towers         modules that run for images alone; None where the dry run had no images
    slices         how microbatches are cut along the sequence; None: they are not
    stage_check    finds out whether stages have what a batch has them read; None with one stage
    """

    units: tuple[Unit, ...]
    survey: Survey | None
    placement: Placement
    stages: tuple[range, ...]
    checkpointed: tuple[Recomputation, ...]
    tied_groups: tuple[TiedGroup, ...]
    loss_check: LossCheck | None = None
    costs: ChainCosts | None = None
    pp_style: str = "1f1b"
    found: Found | None = None
    routers: RouterLogits | None = None
    towers: frozenset[str] | None = None
    slices: SliceRule | None = None
    stage_check: StageCheck | None = None

    def recomputed_parameters(self, model: nn.Module, rank: int) -> set[nn.Parameter]:
        """Of the layers that the stages of pipeline rank `rank` recompute as a whole wherever they run them."""
        again, others = set[nn.Parameter](), set[nn.Parameter]()
        for stage in self.placement.stages_of(rank):
            whole, _ = self.checkpointed[rank].of(stage)
            for place, index in enumerate(self.stages[stage]):
                layer = model.get_submodule(self.units[index].layer)
                (again if place < whole else others).update(layer.parameters())
        return again - others

    def apply(self, model: nn.Module, rank: int = 0) -> CutModel:
        """Cut `model` in place into the stages of `rank`. It may have been sharded since it was planned."""
        held = self.placement.stages_of(rank)
        staged = StagedModel(
            model, self.units, self.survey, self.stages, held, self.checkpointed[rank], self.routers, self.towers
        )
        return CutModel(
            staged,
            self.placement,
            self.tied_groups,
            rank,
            self.loss_check,
            self.costs,
            self.pp_style,
            self.slices,
            self.stage_check,
        )


def plan_cut(
    model: nn.Module,
    settings: PipelineSettings,
    num_ranks: int = 1,
    *,
    layer_lists: Sequence[str] | None = None,
    example_inputs: Any = None,
    deferred: float = 0.0,
    message_copies: int = 1,
    working: torch.dtype | None = None,
    probes: Callable[[], Iterable[nn.Module]] = tuple,
) -> CutPlan:
    """Plan the stages of `model`, whole and not sharded yet. Communicates nothing; the same input errors are raised on
    every rank.

    layer_lists     names of the ModuleLists to cut along, where they cannot be found (a policy's word)
    example_inputs  a batch for models whose inputs cannot be guessed
    deferred        share of the weight gradients that a zero-bubble schedule can put off, for pp_style="auto" and
                    bounds
    message_copies  ranks that share a layer's arithmetic but send all of its output each, for pp_style="auto"
    working         dtype that layers compute in; None: that of the model
    probes          small models with numbers that are like this one, to try on what only numbers tell
    """
    config = settings.gradient_checkpoint_config
    if config is None and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    if num_ranks == 1:
        return _plan_one_stage(model, settings, config, layer_lists)
    if (where := skipping(model)) is not None:
        raise ValueError(
            f"pp_size={num_ranks}: {where} leaves out whole layers at random, which pipeline stages do not agree on; "
            "set it to 0, or use pp_size=1"
        )
    # they travel by themselves, not as something that the tail reads inside of layers
    with without_router_logits(model):
        survey = survey_model(model, layer_lists, example_inputs, _cuts_towers(model, settings, layer_lists))
    length = sequence_length(example_inputs)
    routers = find_router_logits(model, survey.units, example_inputs)

    def costs_of(placement: Placement) -> ChainCosts:
        return chain_costs(model, survey, placement, measured=settings.layer_costs, config=config, length=length)

    numbers = settings.deferred_bytes, settings.num_microbatches
    deferral = Deferral(deferred, room_to_wait(*numbers, model, survey, example_inputs is not None, working))
    found = None
    if settings.pp_style == "auto":
        assert settings.num_microbatches is not None
        measured, taps = (
            settings.layer_costs is not None,
            () if routers is None else tuple(tap.unit for tap in routers.taps),
        )
        exchanged = transfers(model, costs_of(Placement(num_ranks)), survey, message_copies, measured, taps)
        found = search(
            num_ranks,
            survey.num_units,
            settings.num_microbatches,
            costs_of,
            partial(partition_units, survey),
            transfers=exchanged,
            deferral=deferral,
            allowed=settings.auto_memory,
            offloaded=(settings.offloaded(1) or [0.0])[0],
        )
        style, placement, stages = found.best.pp_style, found.best.placement, found.best.stages
    else:
        style, placement = (
            settings.pp_style,
            schedules.get_placement(settings.pp_style, num_ranks, settings.num_model_chunks),
        )
        if settings.num_layers_per_stage is not None:
            stages = given_units(survey, settings.num_layers_per_stage, placement.num_stages)
        else:
            away, parts = settings.offloaded(placement.num_stages), settings.num_sequence_slices
            bounded = BoundedCut(style, settings.num_microbatches, settings.cut_memory, deferral, away, parts)
            stages = bounded.partition(survey, costs_of, placement, pairs=message_copies > 1)
    for rank in range(num_ranks):
        twice = survey.changed_twice(stages, placement.stages_of(rank))
        if twice is not None:
            raise ValueError(
                f"pp_style={style!r} gives rank {rank} the stages {list(twice[1])}, each of which runs the model's "
                f"code beside its layers, where every forward makes a new {twice[0]} of the old one: it would change "
                f"{len(twice[1])} times with every microbatch; use a pp_style with one stage per rank ('1f1b', 'zb')"
            )
    costs = costs_of(placement)
    checkpointed = tuple(
        config.of(stages, rank, placement.stages_of(rank)) if config is not None else Recomputation()
        for rank in range(num_ranks)
    )
    tied = tuple(find_tied_groups(survey, stages, placement))
    check = LossCheck.of(model, survey.units)
    towers = find_towers(model, survey.outside, survey.example)
    slices = (
        slice_rule(model, survey, settings.num_sequence_slices, probes) if settings.num_sequence_slices > 1 else None
    )
    return CutPlan(
        survey.units,
        survey,
        placement,
        tuple(stages),
        checkpointed,
        tied,
        check,
        costs,
        style,
        found,
        routers,
        towers,
        slices,
        StageCheck.of(model, survey, stages, placement),
    )


def _cuts_towers(model: nn.Module, settings: PipelineSettings, layer_lists: Sequence[str] | None) -> bool:
    """Not where sequences are cut into parts, which have no images, nor where the user counts the main layers alone."""
    numbers = settings.num_layers_per_stage
    if numbers is not None and all(isinstance(number, int) for number in numbers):
        return settings.num_sequence_slices == 1 and sum(numbers) != len(find_units(model, layer_lists))
    return settings.num_sequence_slices == 1


def _plan_one_stage(
    model: nn.Module,
    settings: PipelineSettings,
    config: PipelineGradientCheckpointConfig | None,
    layer_lists: Sequence[str] | None,
) -> CutPlan:
    needed = config is not None or settings.num_layers_per_stage is not None or layer_lists is not None
    try:
        units = find_units(model, layer_lists)
    except ValueError:
        if needed:
            raise
        units = []
    stages = (range(len(units)),)
    numbers = settings.num_layers_per_stage
    if numbers is not None and (any(number < 1 for number in numbers) or sum(numbers) != len(units)):
        raise ValueError(
            f"num_layers_per_stage={list(numbers)} must sum to the model's {len(units)} layers; "
            f"[{len(units)}] would work"
        )
    checkpointed = config.of(stages, 0, [0]) if config is not None else Recomputation()
    one = settings.microbatch_size is None and settings.num_microbatches in (None, 1)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    check = None if one and alone else LossCheck.of(model, units)
    return CutPlan(tuple(units), None, Placement(1), stages, (checkpointed,), (), check)


def cut_model(
    model: nn.Module,
    settings: PipelineSettings,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    layer_lists: Sequence[str] | None = None,
    example_inputs: Any = None,
) -> CutModel:
    """Plan and cut in one go, for a model that is not sharded; see `plan_cut`."""
    return plan_cut(model, settings, num_ranks, layer_lists=layer_lists, example_inputs=example_inputs).apply(
        model, rank
    )
