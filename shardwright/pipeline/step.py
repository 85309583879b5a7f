"""One batch on its way through the pipeline: its microbatches, their loss, and what became of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ..cluster.same_batch import describe
from ..interface import OptimizerWrapper
from ..ops.vocab_mode import as_scripts_see
from ..utils.objects import map_within, parts_of, with_parts
from .batch.microbatch import batch_size, items_of, merge_outputs
from .batch.step_inputs import StepInputs
from .loss.weight import GlobalLoss
from .slices.sequence_slices import SlicedInputs, SliceOutputs


class Step:
    """`training`: gradients are wanted; `want_loss`, `want_outputs`: the caller is given them."""

    training = False
    want_loss = True
    want_outputs = False

    def __init__(
        self, microbatches: list[Any], loss: GlobalLoss, optimizer: OptimizerWrapper | None, inputs: StepInputs
    ) -> None:
        self.microbatches = microbatches
        self.inputs = inputs
        self.loss = loss
        self.optimizer = optimizer
        self.outputs: dict[int, Any] = {}
        self.slices: dict[int, SliceOutputs] = {}  # on the last stage, by microbatch

    @property
    def reads_loss_alone(self) -> bool:
        """Nobody is given the outputs, so heads need not compute logits that the loss can do without."""
        return (self.training or self.want_loss) and not self.want_outputs

    @cached_property
    def shape_keys(self) -> list[tuple[Any, ...]]:
        """Equal for microbatches whose tensors have equal shapes; the same on every rank of the pipeline."""
        return [
            (*describe(items_of(microbatch)), self.loss.router_loss is not None) for microbatch in self.microbatches
        ]

    @cached_property
    def message_keys(self) -> list[tuple[Any, ...]]:
        """The same for what travels and is kept of a microbatch, or of its slices."""
        inputs = self.inputs
        if not isinstance(inputs, SlicedInputs):
            return self.shape_keys
        # numbers in keys are sizes, so places are words
        routers, count = self.loss.router_loss is not None, inputs.num_slices
        return [
            (*describe(items_of(inputs.by_length(index))), routers, f"slice {index % count} of {count}")
            for index in range(len(inputs.microbatches))
        ]

    def merged_outputs(self, loss: torch.Tensor | None) -> Any:
        sizes = [batch_size(microbatch) for microbatch in self.microbatches]
        summed = self.loss.summed_entries if len(sizes) > 1 or self.loss.group is not None else {}
        merged = merge_outputs([self.outputs[index] for index in range(len(sizes))], sizes, summed)
        if not self.loss.is_outputs_own:
            loss = None
        if loss is not None and isinstance(merged, dict) and isinstance(merged.get("loss"), torch.Tensor):
            merged["loss"] = loss
        elif loss is not None and isinstance((parts_of(merged) or {}).get("loss"), torch.Tensor):
            merged = with_parts(merged, {"loss": loss})
        return map_within(as_scripts_see, merged)
