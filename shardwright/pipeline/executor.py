"""`execute_pipeline`: one batch in, the loss of the global batch out, through whatever stages this rank holds.

pipeline = cut_model(model, settings, rank, num_ranks)       every rank, no communication: stages, tied groups
executor = PipelineExecutor(pipeline, settings, ...groups)   messages and runtime
result = executor.execute(data_iter, criterion, optimizer, return_loss=True, return_outputs=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..cluster import job
from ..cluster.same_batch import SameBatch, describe
from ..comm.p2p import PipeComm
from ..comm.payload import Header
from ..comm.shape_rules import MessageKey, ShapeRule, split_sizes
from ..ops.vocab_mode import detached
from ..ops.vocab_shard import VocabShard
from ..utils.tensors import map_tensors
from . import schedules
from .balance import ChainCosts
from .bounded_cut import BoundedCut, room_to_wait
from .checkpointing import PipelineGradientCheckpointConfig, Recomputation
from .images import check_images, find_towers
from .layer_chain import Unit, find_units
from .loss_check import LossCheck
from .loss_weight import GlobalLoss, check_grad
from .lowering import lower
from .message_shapes import MessageShapes
from .microbatch import batch_size, items_of
from .partition import chain_costs, given_units, partition_units, sequence_length
from .placement import Placement
from .rank_memory import Deferral
from .ready import as_microbatches
from .router_logits import RouterLogits, find_router_logits, without_router_logits
from .router_loss import RouterLoss
from .runtime import Gathering, PipelineRuntime, Reduction, Unfinished
from .schedules import Schedule
from .search import Found, search, transfers
from .sequence_slices import SlicedInputs, SliceOutputs, SliceRule
from .simulate import Costs
from .slice_check import slice_rule
from .sliced_schedule import get_sliced
from .stage import Payload, StagedModel
from .step import Step
from .step_inputs import StepInputs
from .survey import Survey, survey_model
from .tied import TiedGroup, find_tied_groups, sync_tied_gradients


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut and a batch is run.

    pp_style, num_model_chunks   schedule and stages per rank; "auto" searches for both (`search`)
    num_microbatches             microbatches of a batch (fewer for a batch with fewer samples)
    microbatch_size              or samples per microbatch; with neither a batch is one microbatch
    num_sequence_slices          parts into which every microbatch is cut along its sequence
    num_layers_per_stage         layers of each of the pp_size x num_model_chunks stages; None: balanced by cost
    gradient_checkpoint_config   which layers are recomputed; None: all of them if the model's own checkpointing is on, else none
    overlap_p2p                  receive while computing; the numbers are the same without
    enable_metadata_cache        describe a message only where its shapes do not follow from earlier ones; False: describe every message
    deferred_bytes               what weight gradients that a zero-bubble schedule postpones may hold on a rank; None: what fits into
                                 the memory that 1F1B needs
    offload_activations          share of the activations of every stage that waits in host memory between forward and backward, or one per
                                 stage; None: none
    auto_memory                  activations that "auto" may hold, over those that 1f1b holds with layers dealt evenly
    cut_memory                   the same of a schedule named by hand: the cut keeps to it; None: it follows time alone
    layer_costs                  time of every layer, forward and backward, in any unit, as measured; None: estimated
    """

    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    num_layers_per_stage: Sequence[int] | None = None
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None
    overlap_p2p: bool = True
    enable_metadata_cache: bool = True
    deferred_bytes: int | None = None
    layer_costs: Sequence[float] | None = None
    offload_activations: float | Sequence[float] | None = None
    auto_memory: float = 1.5
    cut_memory: float | None = None
    num_sequence_slices: int = 1

    def offloaded(self, num_stages: int) -> Sequence[float] | None:
        """`offload_activations` by stage; None where nothing leaves."""
        given = self.offload_activations
        shares = [float(given)] * num_stages if isinstance(given, int | float) else given
        return shares if shares is not None and any(shares) else None


@dataclass(frozen=True)
class CutModel:
    """What one rank holds after the cut.

    staged       the model with its stages
    placement    where all stages live
    tied_groups  parameters that several ranks hold: the same list on every rank
    rank         this rank's position in the pipeline
    loss_check, costs, pp_style, slices   see `CutPlan`
    """

    staged: StagedModel
    placement: Placement
    tied_groups: tuple[TiedGroup, ...]
    rank: int
    loss_check: LossCheck | None = None
    costs: ChainCosts | None = None
    pp_style: str = "1f1b"
    slices: SliceRule | None = None

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

    def apply(self, model: nn.Module, rank: int = 0) -> CutModel:
        """Cut `model` in place into the stages of `rank`. It may have been sharded since it was planned."""
        held = self.placement.stages_of(rank)
        staged = StagedModel(model, self.units, self.survey, self.stages, held, self.checkpointed[rank], self.routers, self.towers)
        return CutModel(staged, self.placement, self.tied_groups, rank, self.loss_check, self.costs, self.pp_style, self.slices)


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
    """Plan the stages of `model`, whole and not sharded yet. Communicates nothing; the same input errors are raised on every rank.

    layer_lists     names of the ModuleLists to cut along, where they cannot be found (a policy's word)
    example_inputs  a batch for models whose inputs cannot be guessed
    deferred        share of the weight gradients that a zero-bubble schedule can put off, for pp_style="auto" and bounds
    message_copies  ranks that share a layer's arithmetic but send all of its output each, for pp_style="auto"
    working         dtype that layers compute in; None: that of the model
    probes          small models with numbers that are like this one, to try on what only numbers tell
    """
    config = settings.gradient_checkpoint_config
    if config is None and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    if num_ranks == 1:
        return _plan_one_stage(model, settings, config, layer_lists)
    with without_router_logits(model):  # they travel by themselves, not as something that the tail reads inside of layers
        survey = survey_model(model, layer_lists, example_inputs)
    length = sequence_length(example_inputs)
    routers = find_router_logits(model, survey.units, example_inputs)

    def costs_of(placement: Placement) -> ChainCosts:
        return chain_costs(model, survey, placement, measured=settings.layer_costs, config=config, length=length)

    numbers = settings.deferred_bytes, settings.num_microbatches
    deferral = Deferral(deferred, room_to_wait(*numbers, model, survey, example_inputs is not None, working))
    found = None
    if settings.pp_style == "auto":
        assert settings.num_microbatches is not None
        measured, taps = settings.layer_costs is not None, () if routers is None else tuple(tap.unit for tap in routers.taps)
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
        style, placement = settings.pp_style, schedules.get_placement(settings.pp_style, num_ranks, settings.num_model_chunks)
        if settings.num_layers_per_stage is not None:
            stages = given_units(survey, settings.num_layers_per_stage, placement.num_stages)
        else:
            away, parts = settings.offloaded(placement.num_stages), settings.num_sequence_slices
            bounded = BoundedCut(style, settings.num_microbatches, settings.cut_memory, deferral, away, parts)
            stages = bounded.partition(survey, costs_of, placement, pairs=message_copies > 1)
    costs = costs_of(placement)
    checkpointed = tuple(
        config.of(stages, rank, placement.stages_of(rank)) if config is not None else Recomputation() for rank in range(num_ranks)
    )
    tied = tuple(find_tied_groups(survey, stages, placement))
    check = LossCheck.of(model, survey.units)
    towers = find_towers(model, survey.outside, survey.example)
    slices = slice_rule(model, survey, settings.num_sequence_slices, probes) if settings.num_sequence_slices > 1 else None
    return CutPlan(survey.units, survey, placement, tuple(stages), checkpointed, tied, check, costs, style, found, routers, towers, slices)


def _plan_one_stage(
    model: nn.Module, settings: PipelineSettings, config: PipelineGradientCheckpointConfig | None, layer_lists: Sequence[str] | None
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
        raise ValueError(f"num_layers_per_stage={list(numbers)} must sum to the model's {len(units)} layers; [{len(units)}] would work")
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
    return plan_cut(model, settings, num_ranks, layer_lists=layer_lists, example_inputs=example_inputs).apply(model, rank)


def _as_they_are(inputs: Any) -> Any:
    return inputs


class PipelineExecutor:
    """Runs batches through the stages of this rank and of the others.

    cut           this rank's stages
    pipe_group    the pipeline's ranks, in stage order; None with one rank
    message_groups  see `PipeComm`; with them building an executor is collective over the pipeline
    loss_group    ranks that hold other samples of the same global batch (data parallel); None: no others
    tied_process_groups  see `tied.create_tied_process_groups`
    reduction     of the gradients of this rank's chunks; see `PipelineRuntime`
    gathering     of their weights
    gathered      of how many chunks weights are there at once, with `gathering`
    grad_factor   what the loss is multiplied by for the backward pass only. Gradients are those of the global batch when they are
                  *summed* over data-parallel ranks; a plugin that averages them passes the number of these ranks
    device        where batches are moved; None: where the model's parameters are
    postpone_weights  see `PipelineRuntime`
    pairs         layers wait for other ranks, so that a forward and a backward at the same time hide it; else pairs run one after the other
    same_batch    the check that all ranks of the replica are given the same batch; None: they are not compared
    split_heads   modules, by name, that return logits of which every rank of a tensor-parallel group holds some columns
    equal_numbers ranks of the loss group communicate in every microbatch, so all need equally many
    keeps_documents_apart  whether the model does, in a packed row; asked when there is one
    cast_inputs   gives what the model gets of a microbatch the dtype that it works in; a criterion sees the microbatch as it is
    numbers       context of every forward of a stage, with random numbers of its own
    """

    def __init__(
        self,
        cut: CutModel,
        settings: PipelineSettings,
        *,
        pipe_group: dist.ProcessGroup | None = None,
        message_groups: Mapping[tuple[int, int], dist.ProcessGroup] | None = None,
        loss_group: dist.ProcessGroup | None = None,
        tied_process_groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        reduction: Reduction | None = None,
        gathering: Gathering | None = None,
        gathered: int = 1,
        grad_factor: float = 1.0,
        device: torch.device | None = None,
        postpone_weights: bool = True,
        pairs: bool = False,
        split_heads: Mapping[str, VocabShard] | None = None,
        cast_inputs: Callable[[Any], Any] = _as_they_are,
        same_batch: SameBatch | None = None,
        equal_numbers: bool = False,
        keeps_documents_apart: Callable[[], bool] | None = None,
        numbers: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.cut = cut
        self.numbers = numbers
        self._equal_numbers = equal_numbers
        self._keeps_documents_apart = keeps_documents_apart
        self.settings = settings
        self.grad_factor = grad_factor
        self._loss_group = loss_group
        self._tied_process_groups = dict(tied_process_groups or {})
        self._device = device
        self._split_heads = dict(split_heads or {})
        self._loss_check = cut.loss_check
        if cut.loss_check is not None:
            cut.loss_check.split_heads = self._split_heads
        self._cast_inputs = cast_inputs
        self._pairs = pairs
        self._gathered = gathered if gathering is not None else None
        self._same_batch = same_batch
        self._schedule = lru_cache(maxsize=8)(self._lowered)  # a loader with ever new batch sizes must not fill the memory with schedules
        self._step: Step | None = None
        self._generation = job.generation()
        self.comm: PipeComm | None = None
        self.runtime: PipelineRuntime | None = None
        if cut.placement.num_ranks > 1:
            if pipe_group is None:
                raise ValueError(f"the model is cut for {cut.placement.num_ranks} pipeline ranks; pass their process group as pipe_group")
            self.comm = PipeComm(pipe_group, message_groups)
            self.comm.warm_up()
            self.comm.caches = settings.enable_metadata_cache
            if cut.loss_check is not None:
                self._message_shapes = MessageShapes(cut.loss_check, cut.staged)
                self.comm.learn = self._learn_shapes
            self.runtime = PipelineRuntime(
                self.comm,
                cut.placement,
                [_Program(self, stage) for stage in cut.placement.stages_of(cut.rank)],
                backward=self._backward,
                backward_by_grad=self._backward_by_grad,
                reduction=reduction,
                gathering=gathering,
                postpone_weights=postpone_weights,
                deferred_bytes=settings.deferred_bytes,
                parameters=cut.staged.model.parameters,
            )

    def execute(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch of `data_iter`: forward, and backward when an optimizer is given and gradients are enabled.

        Returns {"loss": loss of the global batch or None, "outputs": merged outputs or None}, both on the rank with the last stage only.
        """
        with job.step():
            return self._execute(data_iter, criterion, optimizer, return_loss, return_outputs)

    def layer_costs(self, measured: Costs) -> list[float]:
        """What the plugin's `layer_costs` takes, from the costs of the stages as a timeline has measured them."""
        if self.cut.costs is None:
            raise ValueError("layer_costs needs a pipeline: with one stage there is nothing to cut")
        return self.cut.costs.measured(self.cut.staged.stages, measured)

    def check_batch(self, batch: Any) -> None:
        """ValueError for a batch that has no microbatches."""
        self._split(batch, None)

    def _split(self, batch: Any, device: torch.device | None) -> tuple[Any, list[Any]]:
        settings = self.settings
        config = getattr(self.cut.staged.model, "config", None)
        numbers = settings.num_microbatches, settings.microbatch_size
        return as_microbatches(batch, *numbers, device, self._equal_numbers, config, self._keeps_documents_apart)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """For a model that is called itself: whether the ranks of the replica call it alike."""
        if self._same_batch is not None:
            self._same_batch.check(describe([*enumerate(args), *kwargs.items()]))

    def _execute(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: Any,
        want_loss: bool,
        want_outputs: bool,
    ) -> dict[str, Any]:
        if not hasattr(data_iter, "__next__"):
            raise ValueError(f"data_iter must be an iterator over batches, not a {type(data_iter).__name__}; pass iter(dataloader)")
        training = optimizer is not None and torch.is_grad_enabled()
        given = next(data_iter)
        batch, microbatches = self._split(given, self._batch_device())
        if self.runtime is not None:
            for microbatch in microbatches:
                check_images(microbatch, self.cut.staged.towers)
        router_loss = self._router_loss.of_step(microbatches, self.cut.staged.routers, is_cut=self.runtime is not None)
        if self._same_batch is not None:
            self._same_batch.check(tuple(describe(items_of(microbatch)) for microbatch in microbatches))
        split = bool(self._split_heads)
        loss = GlobalLoss(batch, microbatches, criterion, self._loss_group, self._batch_device(), self._buffers, split, router_loss)
        # On the host they are made only if masks must be compared and reading them on the device would wait for it.
        inputs = self._inputs(microbatches, lambda: self._split(given, None)[1])
        step = Step(microbatches, loss, optimizer, inputs)
        step.training, step.want_loss, step.want_outputs = training, want_loss, want_outputs
        self._check_loss(step)
        self._step = step
        try:
            if self.runtime is None:
                self._run_alone(step)
            else:
                self._run_pipeline(self.runtime, step)
        finally:
            self._step = None
        if not self.cut.holds_last_stage:
            return {"loss": None, "outputs": None}
        reported = step.loss.reported() if want_loss else None
        return {"loss": reported, "outputs": step.merged_outputs(reported) if want_outputs else None}

    def _inputs(self, microbatches: Sequence[Any], host: Callable[[], Sequence[Any]]) -> StepInputs:
        if self.cut.slices is None:
            return StepInputs(microbatches, self._cast_inputs, host)
        return SlicedInputs(microbatches, self.cut.slices, self._cast_inputs, host)

    @cached_property
    def _router_loss(self) -> RouterLoss:
        return RouterLoss(self.cut.staged.model)

    def _check_loss(self, step: Step) -> None:
        """Refuse, on every rank and before anything is sent, a loss that cannot be that of the whole batch."""
        if not (step.training or step.want_loss):
            return
        if step.loss.is_watched and step.loss.router_loss is not None:
            step.loss.router_loss.require_known()
        if self.runtime is None and not step.loss.is_watched and not self._split_heads:
            return
        check = self._loss_check
        if check is None and step.loss.is_ready and self.runtime is None and not self._split_heads:
            # One rank that was told of no microbatches, and the whole model is here. A model that cannot be copied is asked every time.
            check = self._loss_check = LossCheck.of(self.cut.staged.model, self.cut.staged.units)
        if check is None:
            step.loss.refuse_uncounted()
            return
        check.follow_mode(self.cut.staged.model.training)
        keys, loss = step.shape_keys(), step.loss
        loss.checked = check.check(loss.criterion, step.microbatches, keys, loss.is_watched, step.training, loss.is_ready)

    def sync_tied_gradients(self) -> None:
        """Sum the gradients of parameters that several ranks hold. Once per optimizer step, before reducing, clipping or stepping."""
        sync_tied_gradients(self.cut.staged.model, self.cut.tied_groups, self.cut.rank, self._tied_process_groups)

    def _run_alone(self, step: Step) -> None:
        with torch.set_grad_enabled(step.training):
            for index in range(len(step.microbatches)):
                loss = self.forward(0, None, index)
                if step.training:
                    with self._accumulating(step.optimizer, last=index == len(step.microbatches) - 1):
                        self._backward(loss)
                del loss

    @staticmethod
    def _accumulating(optimizer: Any, last: bool) -> AbstractContextManager[Any]:
        """Where an optimizer reduces gradients during backward, only the last microbatch's backward does."""
        no_sync = None if last else getattr(optimizer, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def _run_pipeline(self, runtime: PipelineRuntime, step: Step) -> None:
        assert self.comm is not None
        if self._generation != job.generation():
            self._generation = job.generation()  # after a recovery, what was agreed on in the failed step is uncertain,
            self.comm.forget_headers()
            self.comm.learn = None  # and a shape that did not follow may be why it failed
        inputs = step.inputs
        slices = inputs.num_slices if isinstance(inputs, SlicedInputs) else 1
        schedule = self._schedule(len(step.microbatches), step.training, slices)
        runtime.run(schedule, step.message_keys(), overlap=self.settings.overlap_p2p, slices=slices)

    def _learn_shapes(self, key: MessageKey, header: Header) -> ShapeRule | None:
        assert self._step is not None
        stage, look, _ = key.kind  # see `PipelineRuntime`
        index = next(i for i, other in enumerate(self._step.message_keys()) if split_sizes(other)[0] == look)
        inputs = self._step.inputs
        batch = inputs.by_length(index) if isinstance(inputs, SlicedInputs) else inputs.microbatches[index]
        return self._message_shapes.find_rule(stage, batch, key, header)

    def _lowered(self, num_microbatches: int, training: bool, num_slices: int = 1) -> Schedule:
        settings, ranks = self.settings, self.cut.placement.num_ranks
        chunks = self.cut.placement.num_chunks
        schedule = get_sliced(self.cut.pp_style, ranks, num_microbatches, num_slices, chunks, not training, self._pairs)
        costs = self.cut.costs.actions(self.cut.staged.stages) if self.cut.costs is not None else None
        return lower(
            schedule,
            overlap=settings.overlap_p2p,
            costs=costs,
            rank=self.cut.rank,
            gathered=self._gathered,
            offloaded=settings.offloaded(self.cut.placement.num_stages) if training else None,
        )

    def forward(self, stage: int, received: Payload | None, index: int) -> Any:
        """Forward of one stage for one microbatch: what travels on, or on the last stage the microbatch's part of the loss."""
        step = self._step
        assert step is not None
        staged = self.cut.staged
        if isinstance(step.inputs, SlicedInputs):
            with self.numbers():
                payload = staged.run_slice(stage, received, step.inputs, index)
            return payload if stage < staged.num_stages - 1 else self._behind_slice(step, step.inputs, payload, index)
        with self.numbers():
            passed_on, output = staged.run_microbatch(stage, received, step.inputs, index, partial(self._watched, step, index))
        return passed_on if passed_on is not None else self._part_of_loss(step, output, index)

    def _behind_slice(self, step: Step, inputs: SlicedInputs, payload: Payload, index: int) -> Any:
        """What comes behind the last layer runs with the last slice of a microbatch."""
        number = index // inputs.num_slices
        before = step.slices.setdefault(number, SliceOutputs())
        if not inputs.is_last(index):
            return Unfinished(payload, before.add(payload))
        batch, staged = inputs.whole.microbatches[number], self.cut.staged
        assert self.cut.slices is not None
        joined = step.slices.pop(number).all_of(payload, batch_size(batch), self.cut.slices.joined)
        with self.numbers():
            output = staged.run_tail(joined, inputs.whole, number, partial(self._watched, step, number))
        return self._part_of_loss(step, output, number)

    @staticmethod
    def _watched(step: Step, index: int, seen: Any) -> AbstractContextManager[Any]:
        unused = step.loss.is_ready and not (step.training or step.want_loss)  # and nobody has found out how to count
        return nullcontext() if unused else step.loss.watch(index, seen)

    def _part_of_loss(self, step: Step, output: Any, index: int) -> torch.Tensor | None:
        part = None
        if step.training or step.want_loss:
            part = step.loss.contribution(index, output)
            if step.training:
                check_grad(part)
            part = part if self.grad_factor == 1.0 else part * self.grad_factor
        if step.want_outputs:
            step.outputs[index] = map_tensors(detached, output)
        return part

    def _backward(self, loss: torch.Tensor) -> None:
        assert self._step is not None
        backward = getattr(self._step.optimizer, "backward", None)
        if backward is not None:
            backward(loss)
        else:
            loss.backward()

    def _backward_by_grad(self, tensors: Sequence[Any], grads: Sequence[torch.Tensor], /) -> None:
        assert self._step is not None
        backward = getattr(self._step.optimizer, "backward_by_grad", None)
        if backward is not None:
            backward(tensors, grads)
        else:
            torch.autograd.backward(tensors, grads)  # type: ignore[arg-type]

    def _buffers(self) -> frozenset[int]:
        return frozenset(id(buffer) for buffer in self.cut.staged.model.buffers())

    def _batch_device(self) -> torch.device:
        if self._device is None:
            self._device = next((parameter.device for parameter in self.cut.staged.model.parameters()), torch.device("cpu"))
        return self._device


class _Program:
    """One stage as the runtime sees it."""

    def __init__(self, executor: PipelineExecutor, stage: int) -> None:
        self._executor = executor
        self._stage = stage

    def forward(self, received: Any, microbatch: int) -> Any:
        return self._executor.forward(self._stage, received, microbatch)
