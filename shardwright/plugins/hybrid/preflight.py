"""Everything about a layout that can be known before anything is changed or communicated: whether it fits, and what it
comes to.

    checked = preflight(model, optimizer, settings, mesh, precision, sharder, batch)
    checked.plan        where the model will be cut
    checked.layout      ranks, stages, bytes, schedule, collectives; `str()` of it is a report
    checked.job         what is trained, in which dtypes

Boosting goes on with these and computes none of it again.

The model is whole and unsharded here, and may lie on the meta device. All numbers are arithmetic on shapes: those of
bytes are what `zero.bucket` allocates, those of traffic are the ring formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from ...cluster.mesh import ParallelMesh
from ...lazy.weights import LazyWeights
from ...optim.trial import states_of_small
from ...pipeline.batch.microbatch import microbatch_sizes
from ...pipeline.cut.balance import by_rank
from ...pipeline.cut.partition import chain_costs
from ...pipeline.cut.plan import CutPlan, plan_cut
from ...pipeline.planning.simulate import Costs, simulate
from ...pipeline.planning.sliced_schedule import get_sliced
from ...pipeline.runtime import Part
from ...pipeline.schedules import Schedule, splits_backward
from ...precision.policy import PrecisionPolicy
from ...shardformer.adapters import native_model
from ...shardformer.fused_head import fusable_heads
from ...shardformer.plan import Decision
from ...shardformer.policies.generic import GenericPolicy
from ...shardformer.sharder import ModelSharder
from ...shardformer.small_copy import small_copies
from ...spec import ParamSpec
from ...utils.argument_types import is_whole
from ...utils.device import get_current_device
from ...utils.errors import counted
from ...zero.bucket import master_dtype
from ...zero.entries import Job, check_job, refuse_split
from ...zero.layout import (
    FROZEN,
    SHARED,
    BucketPlan,
    Entry,
    Shards,
    family_of,
    plan_buckets,
    plan_unit_buckets,
)
from ...zero.units import ParamUnit, find_param_units
from ..base import require_trainable
from ..settings import HybridSettings
from .channel_traffic import channel_traffic
from .chunks import prompt_parameters, section_of
from .data_traffic import data_traffic, gathers_of_chunks, gathers_of_units
from .deferral import WeightWork, costs_with, deferral_warning, weight_work
from .experts import expert_notes, expert_traffic, require_experts, specs_of_experts
from .resolved import RankShape, ResolvedLayout, StageShape, Traffic
from .sequence_memory import kept_attention, with_parts
from .sequence_tensor import along_tensor, with_sequences
from .sequence_traffic import part_length, sequence_traffic
from .step_memory import Held, held_activations, leaving_note
from .traffic import Tokens, pipeline_traffic, tensor_traffic


@dataclass(frozen=True)
class BatchShape:
    """The batch of one data-parallel rank: samples, and tokens per sample; None where not known."""

    samples: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.samples), ("sequence_length", self.length)):
            if value is not None and (not is_whole(value) or value < 1):
                raise ValueError(
                    f"{name}={value!r} must be a whole number of at least 1, or None where it is not known"
                )


class Preflight(NamedTuple):
    plan: CutPlan
    layout: ResolvedLayout
    job: Job


def preflight(
    model: nn.Module,
    optimizer: Optimizer | None,
    settings: HybridSettings,
    mesh: ParallelMesh,
    precision: PrecisionPolicy,
    sharder: ModelSharder | None,
    batch: BatchShape,
) -> Preflight:
    """Raises ValueError, the same on every rank, when the layout does not fit the model, the optimizer or the batch.

    Nothing is communicated, with one exception: a model without a policy of its own has its tensor-parallel plan tried
    on a small copy by all ranks, which is why that comes last.
    """
    job = _check_job(model, optimizer, precision)
    require_experts(model, mesh)
    lists = sharder.layer_lists(pipeline=mesh.size("pp") > 1) if sharder is not None else None
    examples = _as_call(settings.sharding.example_inputs)
    plan = plan_cut(
        model,
        settings.pipeline,
        mesh.size("pp"),
        layer_lists=lists,
        example_inputs=examples,
        deferred=1.0,
        message_copies=mesh.size("tp"),
        working=precision.dtype if precision.is_half else None,
        probes=lambda: _small_copies(model),
    )
    decisions = sharder.prepare() if sharder is not None else []
    specs = {
        id(decision.site.module.get_parameter(name)): spec
        for decision in decisions
        for name, spec in decision.specs.items()
    }
    specs |= specs_of_experts(model, specs, mesh)
    if optimizer is not None and not job.elementwise:
        for name in job.groups:
            spec = specs.get(id(model.get_parameter(name)))
            if spec is not None:
                refuse_split(name, spec, optimizer)
    kernels = sharder.kernels() if sharder is not None else ""
    layout = _Resolver(
        model, optimizer, settings, mesh, precision, plan, decisions, specs, job, batch, kernels
    ).layout()
    policy = sharder.policy if sharder is not None else None
    if isinstance(policy, GenericPolicy) and mesh.size("tp") > 1:
        layout = replace(layout, notes=(*layout.notes, *policy.findings.notes()))
    return Preflight(plan, with_parts(with_sequences(layout, settings), settings, batch.length), job)


class _Buckets(NamedTuple):
    """Of a rank: those that are trained, those of frozen weights at stage 3, and the units that number both."""

    trained: list[BucketPlan]
    frozen: list[BucketPlan]
    units: list[ParamUnit]


def _small_copies(model: nn.Module) -> Iterator[nn.Module]:
    """Small models like this one, with numbers; none of a model that is not built from a config."""
    native = native_model(model)
    return small_copies(native, 1) if hasattr(native, "config") else iter(())


def _as_call(batch: Any) -> Any:
    """A batch as a dict of keyword arguments or a tuple of positional ones."""
    if batch is None:
        return None
    return dict(batch) if isinstance(batch, Mapping) else (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)


def _check_job(model: nn.Module, optimizer: Optimizer | None, precision: PrecisionPolicy) -> Job:
    """Model and optimizer by themselves."""
    require_trainable(model, optimizer, moves=True)
    on_meta = [name for name, param in model.named_parameters() if param.is_meta]
    if on_meta and LazyWeights.of(model) is None:
        raise ValueError(
            f"model={type(model).__name__} has {counted(len(on_meta), 'parameter')} on the meta device ({on_meta[0]}, "
            "...) that nothing can fill; build it inside shardwright.lazy.LazyInitContext(), or on the CPU"
        )
    return check_job(optimizer, model, precision, placed=not on_meta)


@dataclass(frozen=True)
class _Resolver:
    model: nn.Module
    optimizer: Optimizer | None
    settings: HybridSettings
    mesh: ParallelMesh
    precision: PrecisionPolicy
    plan: CutPlan
    decisions: Sequence[Decision]
    specs: Mapping[int, ParamSpec]
    job: Job
    batch: BatchShape
    kernels: str

    def layout(self) -> ResolvedLayout:
        params = dict(self.model.named_parameters())
        microbatches = self._microbatches()
        activations = self._held_activations(microbatches)
        held = [self._held(rank, params) for rank in range(self.mesh.size("pp"))]
        shapes = [self._rank_shape(rank, names, params) for rank, names in enumerate(held)]
        # The busiest pipeline position stands for all of them.
        busiest = max(range(len(shapes)), key=lambda rank: shapes[rank][0].trained)
        bubble, peak = self._schedule(microbatches)
        costs = self._stage_costs()
        tokens = Tokens.of(
            self.model,
            self.batch.samples,
            self._held_length,
            microbatches,
            self._activation_itemsize(),
            self._slices,
            self.settings.precision.fp8_communication,
        )
        split = along_tensor(self.settings)
        decided = [self._decisions_of(names, params) for names in held]
        example = self.settings.sharding.example_inputs
        traffic = [
            *self._data_traffic([buckets for _, buckets in shapes], busiest, microbatches),
            *tensor_traffic(decided, tokens, self._recomputes(), split),
            *channel_traffic(self.model, decided, tokens, self.batch.samples, example),
            *expert_traffic(self.model, held, self.mesh, tokens, self._recomputes()),
            *pipeline_traffic(self.plan, tokens, 1 if split is None else self.mesh.size("tp")),
            *sequence_traffic(self.settings, self.model, tokens, self._recomputes()),
        ]
        return ResolvedLayout(
            model=type(self.model).__name__,
            parameters=sum(param.numel() for param in params.values()),
            trained=sum(params[name].numel() for name in self.job.groups),
            world_size=self.mesh.world_size,
            sizes={axis: self.mesh.size(axis) for axis in ("dp", "pp", "tp", "sp")},
            order=tuple(axis for axis in self.mesh.axes if self.mesh.size(axis) > 1),
            precision=self.settings.precision.precision,
            zero_stage=self.settings.zero.stage,
            shared=self._sharing,
            pp_style=self.plan.pp_style,
            num_microbatches=microbatches,
            num_slices=self._slices,
            bubble=bubble,
            peak_live=peak,
            deferred=self._deferred,
            imbalance=_over_mean(costs),
            rank_imbalance=_over_mean(by_rank(costs, self.plan.placement)),
            kernels=self.kernels,
            stages=self._stages(params),
            ranks=tuple(shape for shape, _ in shapes),
            traffic=tuple(traffic),
            activations=() if activations is None else activations.peaks,
            notes=(
                *self._notes(microbatches, activations),
                *self._gradient_notes(microbatches),
                *expert_notes(self.model, self.mesh),
            ),
            warnings=tuple(self._warnings(microbatches, bubble)),
        )

    @property
    def _sharing(self) -> int:
        """Ranks that divide the optimizer among themselves."""
        return self.mesh.size("zero") if self.settings.zero.stage else 1

    @property
    def _held_length(self) -> int | None:
        """Tokens of a sample on one rank."""
        return None if self.batch.length is None else part_length(self.settings, self.batch.length)

    @property
    def _shards(self) -> Shards:
        return Shards(self._sharing, self.mesh.size("expert_zero") if self.settings.zero.stage else 1)

    def _activation_itemsize(self) -> int:
        if self.precision.is_half:
            return self.precision.dtype.itemsize
        return max((param.dtype.itemsize for param in self.model.parameters() if param.is_floating_point()), default=4)

    def _recomputes(self) -> bool:
        """Layers as a whole: those that are recomputed in part repeat no collective."""
        return any(any(layers.whole.values()) for layers in self.plan.checkpointed)

    # Stages.

    def _held(self, rank: int, params: Mapping[str, nn.Parameter]) -> list[str]:
        """Names of the parameters of pipeline position `rank`, in the order of the model."""
        held: set[str] = set()
        for stage in self.plan.placement.stages_of(rank):
            held |= self._of_stage(stage, params)
        return [name for name in params if name in held]

    def _of_stage(self, stage: int, params: Mapping[str, nn.Parameter]) -> set[str]:
        if self.plan.survey is None:
            return set(params)
        return self.plan.survey.parameters(self.plan.stages, stage)

    def _stages(self, params: Mapping[str, nn.Parameter]) -> tuple[StageShape, ...]:
        return tuple(
            StageShape(
                stage,
                self.plan.placement.rank_of(stage),
                tuple(self.plan.units[unit].layer for unit in units),
                sum(params[name].numel() for name in self._of_stage(stage, params)),
                *self.plan.checkpointed[self.plan.placement.rank_of(stage)].of(stage),
                alone=len(self.plan.stages) == 1,
            )
            for stage, units in enumerate(self.plan.stages)
        )

    def _stage_costs(self) -> NDArray[np.float64]:
        """Time of a microbatch by stage, as the cut counts it; attention by the length of this batch where it is
        known.
        """
        plan, pipeline = self.plan, self.settings.pipeline
        if plan.survey is None or plan.costs is None:
            return np.ones(1)
        costs = plan.costs
        if self.batch.length is not None and pipeline.layer_costs is None:
            config = pipeline.gradient_checkpoint_config
            costs = chain_costs(self.model, plan.survey, plan.placement, config=config, length=self.batch.length)
        return costs.of(plan.stages)

    # Bytes.

    def _rank_shape(
        self, rank: int, names: Sequence[str], params: Mapping[str, nn.Parameter]
    ) -> tuple[RankShape, _Buckets]:
        """What the fullest tensor-parallel rank at this position keeps."""
        tp = self.mesh.size("tp")
        specs = [self.specs.get(id(params[name])) or ParamSpec(name, tuple(params[name].shape)) for name in names]
        amounts = [
            sum(math.prod(spec.local_shape(coordinate if spec.is_sharded else 0)) for spec in specs)
            for coordinate in range(tp)
        ]
        fullest = amounts.index(max(amounts))
        shapes = [spec.local_shape(fullest if spec.is_sharded else 0) for spec in specs]
        dtypes = self.job.dtypes
        tied = {
            alias: group.names[0] for group in self.plan.tied_groups if rank in group.ranks for alias in group.names
        }
        prompt = self._prompt[rank]
        entries: dict[nn.Parameter, Entry] = {}
        for name, spec, shape in zip(names, specs, shapes, strict=True):
            kind = params[name]
            local = nn.Parameter(
                torch.empty(shape, dtype=kind.dtype, device="meta"), requires_grad=kind.is_floating_point()
            )
            section = self._section(rank, name, tied, Part.PROMPT if kind in prompt else Part.OTHERS)
            family = family_of(replace(spec, tied=tied.get(name)), dtypes[name], section)
            entries[kind] = Entry(len(entries), name, local, spec, self.job.groups.get(name, FROZEN), family)
        return self._bucket_shape(rank, amounts[fullest], entries)

    def _section(self, rank: int, name: str, tied: Mapping[str, str], part: Part) -> int:
        """The section of a parameter, which are gathered and reduced apart (see `chunks.sections_of`)."""
        if self.plan.survey is None:
            return 0
        held = self.plan.placement.stages_of(rank)
        chunks = [
            chunk for chunk, stage in enumerate(held) if name in self.plan.survey.parameters(self.plan.stages, stage)
        ]
        return SHARED if name in tied or len(chunks) != 1 else section_of(chunks[0], part)

    def _bucket_shape(
        self, rank: int, parameters: int, entries: Mapping[nn.Parameter, Entry]
    ) -> tuple[RankShape, _Buckets]:
        """Bytes by bucket. `entries` by the parameters of the whole model."""
        options = self.settings.zero
        whole = not self.job.elementwise
        trained = [entry for entry in entries.values() if entry.group != FROZEN]
        others = [entry for entry in entries.values() if entry.group == FROZEN]
        units: list[ParamUnit] = []
        kept: list[BucketPlan] = []
        if options.stage == 3:
            sections = {param: entry.family.section for param, entry in entries.items()}
            units = find_param_units(self.model, sections)
            held = [[entries[param] for param in unit.params] for unit in units]
            plans = plan_unit_buckets([[e for e in unit if e.group != FROZEN] for unit in held], self._shards, whole)
            kept = plan_unit_buckets([[e for e in unit if e.group == FROZEN] for unit in held], self._shards, False)
            weights = sum(plan.shard_numel * plan.family.dtype.itemsize for plan in kept)
        else:
            size = options.bucket_numel(get_current_device().type)
            plans = plan_buckets(trained, self._shards, size, whole)
            weights = sum(entry.numel * entry.family.dtype.itemsize for entry in others)
        states = _states_per_element(self.optimizer)
        gradients, masters, state_bytes = 0, 0, 0
        for plan in plans:
            working, master = plan.family.dtype, master_dtype(plan.family.dtype, True)
            weights += plan.numel * working.itemsize if options.stage < 3 else 0
            gradients += (plan.numel if options.stage < 2 else plan.shard_numel) * master.itemsize
            copied = options.stage == 3 or options.cpu_offload or master != working
            masters += plan.shard_numel * master.itemsize if copied else 0
            state_bytes += round(states * plan.shard_numel * master.itemsize)
        numel, shard = sum(entry.numel for entry in trained), sum(plan.shard_numel for plan in plans)
        shape = RankShape(rank, parameters, numel, shard, weights, gradients, masters, state_bytes)
        return shape, _Buckets(plans, kept, units)

    # One step.

    def _microbatches(self) -> int | None:
        options = self.settings.pipeline
        if self.batch.samples is not None:
            return len(microbatch_sizes(self.batch.samples, options.num_microbatches, options.microbatch_size))
        if options.microbatch_size is not None:
            return None
        return options.num_microbatches or 1

    def _schedule(self, microbatches: int | None) -> tuple[float | None, int | None]:
        """Bubble and most activations held."""
        if microbatches is None or self.plan.placement.num_ranks == 1:
            return (None, None) if microbatches is None else (0.0, 1)
        run = simulate(self._actions(microbatches), self._costs)
        return run.bubble, max(run.peak_live)

    @property
    def _costs(self) -> Costs | None:
        return None if self._weight_work is None else costs_with(self._weight_work)

    def _held_activations(self, microbatches: int | None) -> Held | None:
        """At the peak of a step, where the batch is known, layers are not shared by several ranks, but others are."""
        batch = self.batch
        if (
            microbatches is None
            or not batch.samples
            or not batch.length
            or self.mesh.size("pp", "sp") == 1
            or self.mesh.size("tp") > 1
        ):
            return None
        shape = (-(-batch.samples // microbatches), self._held_length or 1)
        dtype = self.precision.dtype if self.precision.is_half else None
        return held_activations(
            self.model,
            self.plan,
            self._actions(microbatches),
            shape,
            dtype,
            self._costs,
            self._deferred or 0.0,
            self._shares,
            self._slices,
            kept_attention(self.settings),
        )

    @property
    def _shares(self) -> Sequence[float] | None:
        """Of activations that wait in host memory, by stage."""
        return self.settings.pipeline.offloaded(self.plan.placement.num_stages)

    def _actions(self, microbatches: int) -> Schedule:
        ranks, chunks, pairs = self.mesh.size("pp"), self.plan.placement.num_chunks, self.mesh.size("tp") > 1
        return get_sliced(self.plan.pp_style, ranks, microbatches, self._slices, chunks, pairs=pairs)

    @property
    def _slices(self) -> int:
        """Of a microbatch, along the sequence."""
        rule = self.plan.slices
        return 1 if rule is None else min(rule.count, self.batch.length or rule.count)

    @cached_property
    def _weight_work(self) -> list[WeightWork] | None:
        """By stage, what a zero-bubble schedule postpones; None for other schedules."""
        if not splits_backward(self.plan.pp_style) or self.plan.survey is None:
            return None
        return weight_work(self.model, self.plan, self.specs, self._prompt)

    @cached_property
    def _prompt(self) -> list[set[nn.Parameter]]:
        """By pipeline rank, whose gradients do not wait where others do."""
        heads = fusable_heads(self.model) if self.settings.sharding.enable_fused_cross_entropy else []
        ranks = range(self.plan.placement.num_ranks)
        return [prompt_parameters(self.plan, self.model, rank, self.settings, heads) for rank in ranks]

    @property
    def _deferred(self) -> float | None:
        work = self._weight_work
        return None if work is None else WeightWork(*map(sum, zip(*work, strict=True))).share

    def _decisions_of(self, names: Sequence[str], params: Mapping[str, nn.Parameter]) -> list[Decision]:
        ids = {id(params[name]) for name in names}
        return [
            decision
            for decision in self.decisions
            if any(id(decision.site.module.get_parameter(name)) in ids for name in decision.specs)
        ]

    def _data_traffic(self, held: Sequence[_Buckets], busiest: int, microbatches: int | None) -> list[Traffic]:
        """Of the pipeline position that has most of it."""
        if self.mesh.size("dp_sp") == 1 or not self.job.groups:
            return []
        options, ranks = self.settings.zero, range(len(held))
        several = options.stage == 3 and len(ranks) > 1 and microbatches is not None  # how often, a schedule says
        schedule = self._actions(microbatches or 1) if several else None
        found = []
        for rank in ranks if several else (busiest,):
            buckets = held[rank]
            every, gathers = [*buckets.trained, *buckets.frozen], None
            if schedule is not None:
                gathers = gathers_of_chunks(every, schedule, self.plan.placement, rank, options.gather_ahead)
            elif options.stage == 3 and microbatches is not None:
                gathers = gathers_of_units(every, buckets.units, self.model, microbatches)
            found.append(data_traffic(buckets.trained, buckets.frozen, self.mesh, options, microbatches, gathers))
        return max(found, key=lambda traffic: sum(each.sent or 0 for each in traffic))

    def _notes(self, microbatches: int | None, held: Held | None) -> list[str]:
        options, ranks = self.settings.pipeline, self.mesh.size("pp")
        notes = [] if self.plan.found is None else [str(self.plan.found)]
        notes += [] if held is None else [held.note]
        if self.plan.found is not None and options.deferred_bytes and self.settings.sharding.example_inputs is None:
            notes.append(
                f"pp_style='auto' took it that deferred_bytes={options.deferred_bytes} is never reached, because it "
                "does not know how much a batch leaves; an example_inputs as large as a batch tells"
            )
        if microbatches is not None and self._shares is not None:
            notes.append(leaving_note(self._actions(microbatches), self._shares))
        if self.optimizer is None:
            notes.append("no optimizer was given: bytes are those of the weights alone")
        if microbatches is not None and microbatches * self._slices < ranks:
            notes.append(
                f"{microbatches} microbatches on {ranks} pipeline ranks leave ranks idle; num_microbatches={2 * ranks} "
                "would fill them"
            )
        if (
            options.num_microbatches is not None
            and self.batch.samples is not None
            and self.batch.samples < options.num_microbatches
        ):
            notes.append(
                f"batch_size={self.batch.samples} has fewer samples than num_microbatches={options.num_microbatches}"
            )
        if (
            self.plan.pp_style == "interleaved"
            and microbatches is not None
            and microbatches > ranks > 1
            and microbatches % ranks
        ):
            fitting = -(-microbatches // ranks) * ranks
            bubbles = [simulate(self._actions(number)).bubble for number in (microbatches, fitting)]
            if bubbles[0] > bubbles[1] + 0.02:
                notes.append(
                    f"{microbatches} microbatches are no multiple of {ranks} pipeline ranks: short rounds are waited "
                    f"for, so that the bubble is {bubbles[0]:.1%} where num_microbatches={fitting} has {bubbles[1]:.1%}"
                )
        return notes

    def _warnings(self, microbatches: int | None, bubble: float | None) -> list[str]:
        pipeline = self.settings.pipeline
        found = []
        if self._deferred is not None:
            possible = None if microbatches is None else simulate(self._actions(microbatches)).bubble
            found.append(deferral_warning(self.plan.pp_style, self._deferred, bubble, possible, any(self._prompt)))
        config = pipeline.gradient_checkpoint_config
        for name, what in (("gradient_checkpointing_ratio", "whole"), ("selective_ratio", "selective")):
            ratio = getattr(config, name, None)
            if ratio and not any(any(getattr(layers, what).values()) for layers in self.plan.checkpointed):
                most = max(map(len, self.plan.stages))
                found.append(
                    f"{name}={ratio:g} of at most {counted(most, 'layer')} per stage rounds down to none: nothing is "
                    f"recomputed; {math.ceil(1000 / most) / 1000:g} is the least that has an effect"
                )
        if self.settings.sharding.enable_all_optimization and not self.kernels:
            found.append(
                f"enable_all_optimization=True: {type(self.model).__name__} has neither attention, norms, gated "
                "activations nor rotary positions that are computed in one here"
            )
        return [text for text in found if text is not None]

    def _gradient_notes(self, microbatches: int | None) -> list[str]:
        """Gradients that are kept within a step beside those of `RankShape`, which are kept between steps."""
        stage, pipeline = self.settings.zero.stage, self.mesh.size("pp") > 1
        if not self.job.groups or microbatches == 1 or stage < 2 or not pipeline:
            return []
        return [f"ZeRO-{stage} with a pipeline reduces gradients in every microbatch; zero_stage=1 reduces once"]


def _over_mean(costs: NDArray[np.float64]) -> float | None:
    return None if len(costs) < 2 else float(costs.max() / costs.mean()) if costs.any() else 1.0


_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "ASGD": 1, "Muon": 1, "Adafactor": 0, "Adadelta": 2, "Rprop": 2}


def _states_per_element(optimizer: Optimizer | None) -> float:
    """Numbers of four bytes that the optimizer keeps per element: torch's by name, others by a step of them."""
    if optimizer is None:
        return 0
    group: dict[str, Any] = optimizer.param_groups[0]
    bases = type(optimizer).__mro__
    kinds = [cls for cls in bases if cls.__module__.startswith("torch.optim") and cls is not Optimizer]
    if not kinds or ("step" in vars(bases[0]) and kinds[0] is not bases[0]):
        return states_of_small(optimizer, group)
    name = kinds[0].__name__
    return (
        _STATES.get(name, 2)
        + bool(group.get("amsgrad"))
        + bool(group.get("centered"))
        + (bool(group.get("momentum")) and name != "Muon")
    )
