"""`execute_pipeline`: one batch in, the loss of the global batch out, through whatever stages this rank holds.

pipeline = cut_model(model, settings, rank, num_ranks)       every rank, no communication: stages, tied groups
executor = PipelineExecutor(pipeline, settings, ...groups)   messages and runtime
result = executor.execute(data_iter, criterion, optimizer, return_loss=True, return_outputs=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..cluster import job
from ..cluster.heart import heart
from ..cluster.same_batch import SameBatch, describe
from ..comm.p2p import PipeComm
from ..comm.payload import Header
from ..comm.shape_rules import MessageKey, ShapeRule, split_sizes
from ..interface import OptimizerWrapper
from ..kernels.lazy_logits import loss_wanted
from ..models.caches import refuse_caches
from ..ops.vocab_mode import detached
from ..ops.vocab_shard import VocabShard
from ..utils.labels import label
from ..utils.objects import map_within, without_caches
from ..utils.tensors import map_tensors
from ..utils.transfer import is_on_host, needs_transfer, to_device
from .batch.images import check_images
from .batch.microbatch import batch_size, items_of
from .batch.ready import Microbatches, as_microbatches
from .batch.step_inputs import StepInputs
from .cut.plan import CutModel
from .hoisting.message_shapes import MessageShapes
from .loss.check import LossCheck
from .loss.router_loss import RouterLoss
from .loss.weight import GlobalLoss, check_grad
from .planning.actions import Action, Kind
from .planning.lowering import lower
from .planning.simulate import Costs
from .planning.sliced_schedule import get_sliced
from .runtime import Gathering, PipelineRuntime, Reduction, Unfinished
from .schedules import Schedule
from .settings import PipelineSettings
from .slices.sequence_slices import SlicedInputs, SliceOutputs
from .stage import Payload
from .step import Step


def _entries_of(given: Any) -> list[tuple[Any, Any]]:
    """Of all batches that an iterator gave, by name."""
    batches = given if isinstance(given, Microbatches) else [given]
    return [item for batch in batches for item in items_of(batch)]


def _as_they_are(inputs: Any) -> Any:
    return inputs


class PipelineExecutor:
    """Runs batches through the stages of this rank and of the others.

    cut           this rank's stages
    pipe_group    the pipeline's ranks, in stage order; None with one rank
    message_groups  see `PipeComm`; with them building an executor is collective over the pipeline
    loss_group    ranks that hold other samples of the same global batch (data parallel); None: no others
    reduction     of the gradients of this rank's chunks; see `PipelineRuntime`
    gathering     of their weights
    gathered      of how many chunks weights are there at once, with `gathering`
    grad_factor   what the loss is multiplied by for the backward pass only. Gradients are those of the global batch
                  when they are *summed* over data-parallel ranks; a plugin that averages them passes the number of
                  these ranks
    device        where batches are moved; None: where the model's parameters are
    postpone_weights  see `PipelineRuntime`
    pairs         layers wait for other ranks, so that a forward and a backward at the same time hide it; else pairs run
                  one after the other
    same_batch    the check that all ranks of the replica are given the same batch; None: they are not compared
    split_heads   modules, by name, that return logits of which every rank of a tensor-parallel group holds some columns
    equal_numbers ranks of the loss group communicate in every microbatch, so all need equally many
    keeps_documents_apart  whether the model does, in a packed row; asked when there is one
    cast_inputs   gives what the model gets of a microbatch the dtype that it works in; a criterion sees the microbatch
                  as it is
    numbers       context of every forward of a stage, with random numbers of its own; it is given the microbatch
    divide        makes this rank's part of a batch that several ranks share along its sequences; None: it has all
    """

    def __init__(
        self,
        cut: CutModel,
        settings: PipelineSettings,
        *,
        pipe_group: dist.ProcessGroup | None = None,
        message_groups: Mapping[tuple[int, int], dist.ProcessGroup] | None = None,
        loss_group: dist.ProcessGroup | None = None,
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
        numbers: Callable[..., AbstractContextManager[None]] = nullcontext,
        divide: Callable[[Any], Any] | None = None,
    ) -> None:
        self.cut = cut
        self.numbers = numbers
        self._equal_numbers = equal_numbers
        self._keeps_documents_apart = keeps_documents_apart
        self.settings = settings
        self.grad_factor = grad_factor
        self._loss_group = loss_group
        self._device = device
        self._split_heads = dict(split_heads or {})
        self._loss_check = cut.loss_check
        if cut.loss_check is not None:
            cut.loss_check.split_heads = self._split_heads
        self._cast_inputs = cast_inputs
        self._divide = divide
        self._pairs = pairs
        self._gathered = gathered if gathering is not None else None
        self._same_batch = same_batch
        # a loader with ever new batch sizes must not fill the memory with schedules
        self._schedule = lru_cache(maxsize=8)(self._lowered)
        self._step: Step | None = None
        self._generation = job.generation()
        self.comm: PipeComm | None = None
        self.runtime: PipelineRuntime | None = None
        if cut.placement.num_ranks > 1:
            if pipe_group is None:
                raise ValueError(
                    f"the model is cut for {cut.placement.num_ranks} pipeline ranks; pass their process "
                    "group as pipe_group"
                )
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
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch of `data_iter`: forward, and backward when an optimizer is given and gradients are
        enabled.

        Returns {"loss": loss of the global batch or None, "outputs": merged outputs or None}, both on the rank with the
        last stage only.
        """
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
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
        return as_microbatches(
            batch,
            self.settings.num_microbatches,
            self.settings.microbatch_size,
            device,
            self._equal_numbers,
            getattr(self.cut.staged.model, "config", None),
            self._keeps_documents_apart,
            self._divide,
        )

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """For a model that is called itself: whether the ranks of the replica call it alike."""
        if self._same_batch is not None:
            entries = [*enumerate(args), *kwargs.items()]
            self._same_batch.check(describe(entries), entries)

    def on_device(self, given: Any) -> Any:
        """`given`, with what is in host memory moved to where the model is."""
        device = self._batch_device()
        return map_tensors(partial(to_device, device=device), given) if needs_transfer(device) else given

    def call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Of a `model` that is not cut, by itself. What is in host memory is moved to the device, and the model's
        questions about it are answered there.
        """
        given = args, kwargs
        args, kwargs = self._cast_inputs(self.on_device(given))
        if not needs_transfer(self._batch_device()) or not is_on_host(given):
            return model(*args, **kwargs)

        def whole() -> Any:
            return model(*args, **kwargs)

        moved, known = ({**dict(enumerate(each[0])), **each[1]} for each in ((args, kwargs), given))
        return self.cut.staged.call_whole(whole, moved, lambda: self._cast_inputs(known))

    def _execute(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: OptimizerWrapper | None,
        want_loss: bool,
        want_outputs: bool,
    ) -> dict[str, Any]:
        if not hasattr(data_iter, "__next__"):
            raise ValueError(
                f"data_iter must be an iterator over batches, not a {type(data_iter).__name__}; pass iter(dataloader)"
            )
        training = optimizer is not None and torch.is_grad_enabled()
        given = next(data_iter)
        batch, microbatches = self._split(given, self._batch_device())
        if self.runtime is not None:
            for microbatch in microbatches:
                check_images(microbatch, self.cut.staged.towers)
                refuse_caches(microbatch)
            if self.cut.stage_check is not None:
                self.cut.stage_check.check(microbatches, self.cut.staged.model.training)
        router_loss = self._router_loss.of_step(microbatches, self.cut.staged.routers, is_cut=self.runtime is not None)
        if self._same_batch is not None:
            description = tuple(describe(items_of(microbatch)) for microbatch in microbatches)
            self._same_batch.check(description, _entries_of(given))
        split = bool(self._split_heads)
        loss = GlobalLoss(
            batch, microbatches, criterion, self._loss_group, self._batch_device(), self._buffers, split, router_loss
        )
        # On the host they are made only if masks must be compared and reading them on the device would wait for it.
        host = (lambda: self._split(given, None)[1]) if is_on_host(given) else None
        inputs = self._inputs(microbatches, host)
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
        reported = step.loss.reported() if want_loss or (want_outputs and training) else None
        outputs = step.merged_outputs(reported) if want_outputs else None
        return {"loss": reported if want_loss else None, "outputs": outputs}

    def _inputs(self, microbatches: Sequence[Any], host: Callable[[], Sequence[Any]] | None) -> StepInputs:
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
            # One rank that was told of no microbatches, and the whole model is here. A model that cannot be copied is
            # asked every time.
            check = self._loss_check = LossCheck.of(self.cut.staged.model, self.cut.staged.units)
        if check is None:
            step.loss.refuse_uncounted()
            return
        check.follow_mode(self.cut.staged.model.training)
        keys, loss = step.shape_keys, step.loss
        loss.checked = check.check(
            loss.criterion, step.microbatches, keys, loss.is_watched, step.training, loss.is_ready
        )

    def _run_alone(self, step: Step) -> None:
        with torch.set_grad_enabled(step.training):
            for index in range(len(step.microbatches)):
                heart.action = Action(Kind.F, 0, index)
                with label(f"microbatch {index}: forward"):
                    loss = self.forward(0, None, index)
                if step.training:
                    assert step.optimizer is not None
                    heart.action = Action(Kind.B, 0, index)
                    last = index == len(step.microbatches) - 1
                    with self._accumulating(step.optimizer, last), label(f"microbatch {index}: backward"):
                        self._backward(loss)
                del loss

    @staticmethod
    def _accumulating(optimizer: OptimizerWrapper, last: bool) -> AbstractContextManager[Any]:
        """Where an optimizer reduces gradients during backward, only the last microbatch's backward does."""
        return nullcontext() if last else optimizer.no_sync()

    def _run_pipeline(self, runtime: PipelineRuntime, step: Step) -> None:
        assert self.comm is not None
        if self._generation != job.generation():
            self._generation = job.generation()  # after a recovery, what was agreed on in the failed step is uncertain,
            self.comm.forget_headers()
            runtime.silent.forget()
            self.comm.learn = None  # and a shape that did not follow may be why it failed
        inputs = step.inputs
        slices = inputs.num_slices if isinstance(inputs, SlicedInputs) else 1
        schedule = self._schedule(len(step.microbatches), step.training, slices)
        runtime.run(schedule, step.message_keys, overlap=self.settings.overlap_p2p, slices=slices)

    def _learn_shapes(self, key: MessageKey, header: Header) -> ShapeRule | None:
        assert self._step is not None
        stage, look, _ = key.kind  # see `PipelineRuntime`
        index = next(i for i, other in enumerate(self._step.message_keys) if split_sizes(other)[0] == look)
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
        """Forward of one stage for one microbatch: what travels on, or on the last stage the microbatch's part of
        the loss.
        """
        step = self._step
        assert step is not None
        staged = self.cut.staged
        if isinstance(step.inputs, SlicedInputs):
            with self.numbers(step.inputs.microbatches[index]):
                payload = staged.run_slice(stage, received, step.inputs, index)
            return payload if stage < staged.num_stages - 1 else self._behind_slice(step, step.inputs, payload, index)
        with self.numbers(step.inputs.microbatches[index]), loss_wanted(step.reads_loss_alone):
            passed_on, output = staged.run_microbatch(
                stage, received, step.inputs, index, partial(self._watched, step, index)
            )
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
        with self.numbers(batch), loss_wanted(step.reads_loss_alone):
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
            # A rank has the keys and values of its own layers alone.
            shown = output if self.runtime is None else without_caches(output)
            step.outputs[index] = map_within(detached, shown)
        return part

    def _backward(self, loss: torch.Tensor) -> None:
        assert self._step is not None
        assert self._step.optimizer is not None
        self._step.optimizer.backward(loss)

    def _backward_by_grad(self, tensors: Sequence[Any], grads: Sequence[torch.Tensor], /) -> None:
        assert self._step is not None
        assert self._step.optimizer is not None
        self._step.optimizer.backward_by_grad(tensors, grads)

    def _buffers(self) -> frozenset[int]:
        return frozenset(id(buffer) for buffer in self.cut.staged.model.buffers())

    def _batch_device(self) -> torch.device:
        if self._device is None:
            self._device = next(
                (parameter.device for parameter in self.cut.staged.model.parameters()), torch.device("cpu")
            )
        return self._device


class _Program:
    """One stage as the runtime sees it."""

    def __init__(self, executor: PipelineExecutor, stage: int) -> None:
        self._executor = executor
        self._stage = stage

    def forward(self, received: Any, microbatch: int) -> Any:
        return self._executor.forward(self._stage, received, microbatch)
