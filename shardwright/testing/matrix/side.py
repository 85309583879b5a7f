"""The model on its layout, in one rank of a world."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...booster import Booster
from ...models.dry_run import call_model
from ...plugins import HybridParallelPlugin
from ...shardformer.policies.auto import has_policy
from ..train import adamw
from .axes import Axis
from .subject import Batch, Built

_VOCABULARY_MULTIPLE = 8
_COUNTS = "counts positions by the mask"


class Side:
    """The boosted model and its plugin.

    positions   whether batches are told the positions that the model would count by itself
    note        what a user has to say beside the axis
    """

    def __init__(self, axis: Axis, model: nn.Module, built: Built) -> None:
        settings: dict[str, Any] = {
            "precision": "fp32",
            "make_vocab_size_divisible_by": _VOCABULARY_MULTIPLE,
            **axis.plugin,
        }
        said = []
        if settings.get("pp_size", 1) > 1:
            if not built.separable:
                settings["num_microbatches"] = 1
                said.append("one microbatch")
            if _has_several_inputs(built.batch):  # of which stages have to know who reads them
                settings["example_inputs"] = built.batch
                said.append("a batch as example_inputs")
        if built.given:
            settings["example_inputs"] = built.batch
            if not has_policy(model):
                settings["custom_policy"] = "auto"
                said.append("an inferred policy")
        self.note = "with " + " and ".join(said) if said else ""
        self.built = built
        self.plugin = HybridParallelPlugin(**settings)
        self.booster = Booster(plugin=self.plugin)
        self.model: Any = model
        self.optimizer: Any = None
        self.positions = False

    def boost(self) -> None:
        self.model, self.optimizer, *_ = self.booster.boost(self.model, adamw(trained(self.model)))

    def backward(self, batch: Batch) -> torch.Tensor | None:
        """The loss, None on stages that do not have it."""
        try:
            return self._backward(self.told(batch))
        except ValueError as error:
            if self.positions or _COUNTS not in str(error):
                raise
            self.positions = True
            return self._backward(self.told(batch))

    def told(self, batch: Batch) -> Batch:
        """The batch as both sides of a comparison get it."""
        if not self.positions:
            return batch
        return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}

    def _backward(self, batch: Batch) -> torch.Tensor | None:
        torch.manual_seed(7)
        if self.plugin.mesh.size("pp") > 1:
            is_whole = self.built.own_loss and "mc_labels" not in batch  # the model's second loss is in no `loss`
            criterion: Any = None if is_whole else self.built.criterion
            found = self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer)
            loss: torch.Tensor | None = found["loss"]
            return loss
        loss = self.built.criterion(call_model(self.model, batch))
        self.booster.backward(loss, self.optimizer)
        return loss.detach()


def _has_several_inputs(batch: Batch) -> bool:
    """Images or sounds, and something beside them; or texts of two kinds."""
    inputs = [value for key, value in batch.items() if isinstance(value, torch.Tensor) and "labels" not in key]
    texts = [key for key in batch if key.endswith("input_ids") and key != "decoder_input_ids"]
    return len(texts) > 1 or (len(inputs) > 1 and any(value.is_floating_point() for value in inputs))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Its floating point tensors in `dtype`."""

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {key: one(value) for key, value in batch.items()}
