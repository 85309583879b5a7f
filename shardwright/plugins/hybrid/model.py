"""The model that `HybridParallelPlugin` boosts, and the stage manager that scripts ask where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...cluster import job
from ...interface import ModelWrapper, OptimizerWrapper
from ...kernels.lazy_logits import loss_wanted
from ...ops.vocab_mode import as_scripts_see
from ...pipeline.cut.plan import CutModel
from ...pipeline.executor import PipelineExecutor
from ...pipeline.planning.placement import Placement
from ...pipeline.stage import PLAIN_CALL
from ...precision.policy import PrecisionPolicy
from ...shardformer.model import ShardedModel
from ...utils.labels import labelled
from ...utils.tensors import map_tensors
from .adapters import Home
from .sequence_loss import SequenceLoss


class HybridModel(ModelWrapper):
    """This rank's part of the model.

    Without a pipeline it is called like the model itself; with one, `booster.execute_pipeline` runs it.

    optimizer trains it
    adapters  where the LoRA parameters of the whole model are to be found
    share_buffers  gives all data-parallel ranks rank 0's running statistics; called before a forward that trains
    waits     ranks wait for each other in a forward
    sequence  cuts batches along their sequences and adds up the loss, where the plugin does
    """

    def __init__(
        self,
        module: nn.Module,
        executor: PipelineExecutor,
        policy: PrecisionPolicy,
        optimizer: OptimizerWrapper | None = None,
        adapters: Mapping[str, Home] | None = None,
        share_buffers: Callable[[], None] | None = None,
        waits: bool = False,
        sequence: SequenceLoss | None = None,
    ) -> None:
        super().__init__(module)
        self._waits = waits
        self.executor = executor
        self._policy = policy
        self._trained_by(optimizer)
        self.adapters = dict(adapters or {})
        self.share_buffers = share_buffers
        self._shards_logits = isinstance(module, ShardedModel)
        self.sequence = sequence
        if sequence is not None and optimizer is not None:
            optimizer.check_loss = sequence.require_equal

    @job.heeds_failures
    @labelled("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.executor.cut.placement.num_ranks > 1:
            raise RuntimeError(PLAIN_CALL)
        self.executor.check_call(args, kwargs)
        if self.share_buffers is not None and self.training and torch.is_grad_enabled():
            self.share_buffers()
        whole: dict[str, Any] = {}
        entered: AbstractContextManager[None] = nullcontext()
        if self.sequence is not None:
            entered = self.sequence.axis.entered()
            whole = self.sequence.axis.named(args, kwargs)
            args, kwargs = (), self.sequence.divide(whole)
        wanted = loss_wanted(kwargs.get("labels") is not None)
        with self._running(), self.executor.numbers(), job.forward(self._waits), wanted, entered:
            outputs = self.executor.call(self.module, args, kwargs)
            if self.sequence is not None:
                outputs = self.sequence.of_whole(outputs, *map(self.executor.on_device, (whole, kwargs)))
        return map_tensors(as_scripts_see, outputs) if self._shards_logits else outputs

    def check_batch(self, batch: Any) -> None:
        self.executor.check_batch(batch)

    @property
    def cut(self) -> CutModel:
        return self.executor.cut


class StageManager:
    """Where this rank sits in the pipeline.

    A rank with several chunks holds several stages; `ignore_chunk=True` asks about the rank's position among the ranks,
    otherwise the question is about its stages.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement = placement
        self.stage = rank

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._placement.num_ranks

    @property
    def num_model_chunks(self) -> int:
        return self._placement.num_chunks

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank takes the model's inputs."""
        return self.stage == 0 if ignore_chunk else 0 in self._placement.stages_of(self.stage)

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank computes the loss: also with `ignore_chunk`, because under `zbv` the last stage sits on
        rank 0.
        """
        return self._placement.num_stages - 1 in self._placement.stages_of(self.stage)


class OptimizerGroups:
    """Which parameters, by name, an optimizer's groups hold, so that they can be found again when tensors have been
    replaced.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        self._optimizer = optimizer
        self._names = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]

    def rebind(self, model: nn.Module) -> None:
        """Let the groups hold what `model` still has of their parameters."""
        held: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            found = (next((held[name] for name in aliases if name in held), None) for aliases in names)
            group["params"] = [param for param in found if param is not None]
