"""A number for a text, or for a pair of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .errors import RecipeError
from .heads import ClassifiedText, HeadTrainer
from .trainer import Batch

NOTHING = math.nan  # the label of samples that do not count


class ScoredText(ClassifiedText):
    """A text, or a pair of texts, and the number that it has."""

    def __init__(self, tokenizer: Any, max_length: int, types: bool) -> None:
        super().__init__(tokenizer, max_length, types, self)

    def number(self, label: Any) -> float:
        try:
            number = math.nan if isinstance(label, bool) else float(label)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RecipeError(f"the label {label!r:.60} is no number, which a sequence-regression learns")
        return number

    def no_labels(self) -> Any:
        return NOTHING


class Regression(HeadTrainer):
    """The mean squared error over samples that have a number; an evaluation tells Pearson's correlation, too."""

    columns = 2

    def criterion(self, outputs: Any, inputs: Batch) -> torch.Tensor:
        labels = inputs["labels"]
        counted = ~labels.isnan()
        errors = (outputs.logits[:, 0].float() - labels.nan_to_num(0.0).float()).square() * counted
        return errors.sum() / counted.sum().clamp(min=1)

    def count_labels(self, batch: Batch) -> int:
        return int((~batch["labels"].isnan()).sum())

    def count_tokens(self, batch: Batch) -> int:
        return int((batch["attention_mask"].bool() & ~batch["labels"].isnan()[:, None]).sum())

    def measure(self, outputs: Any, batch: Batch, samples: range) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
        return torch.stack([logits[:, 0].double(), batch["labels"].to(logits.device).double()], dim=1)

    def figures(self, rows: torch.Tensor) -> dict[str, float]:
        return {"pearson": pearson(rows[~rows[:, 1].isnan()])}


def pearson(pairs: torch.Tensor) -> float:
    """Correlation of two columns; 0 where one of them is constant."""
    if len(pairs) < 2:
        return 0.0
    away = pairs - pairs.mean(0)
    spread = away.square().sum(0).sqrt().prod()
    return float((away[:, 0] * away[:, 1]).sum() / spread) if spread > 0 else 0.0
