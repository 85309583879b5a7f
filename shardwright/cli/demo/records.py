"""What a demo run leaves to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ...pipeline.timeline import Timeline
from .layout import Layout
from .settings import DemoSettings


class StepRecord(NamedTuple):
    """One line of metrics.jsonl; `seconds` counts from the first step on."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    seconds: float


class Evaluation(NamedTuple):
    step: int
    held_out_loss: float


class Score(NamedTuple):
    right: int
    asked: int

    def __str__(self) -> str:
        return f"{self.right} of {self.asked}"


@dataclass
class History:
    """
    parameters   of the whole model
    lowest_loss  entropy of the held-out text: no model can do better on average
    scores       per kind of question, how many the trained model answers right
    sample       text that the trained model wrote
    timeline     what the ranks of the pipeline did in a typical step; None without a pipeline
    """

    settings: DemoSettings
    layout: Layout
    parameters: int
    lowest_loss: float
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    seconds: float = 0.0
    timeline: Timeline | None = None

    @property
    def tokens_per_second(self) -> float:
        """Median over steps, which the first slow ones do not spoil."""
        return median(record.tokens_per_second for record in self.steps)
