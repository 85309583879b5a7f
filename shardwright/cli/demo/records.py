"""What a demo run leaves to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ...pipeline.timeline import Timeline
from .layout import Layout
from .settings import DemoSettings


class StepRecord(NamedTuple):
    """One line of metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    step_time: float
    tokens_seen: int
    memory_gib: float


class Evaluation(NamedTuple):
    step: int
    eval_loss: float


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
    timelines    by schedule, what the ranks of the pipeline did in a typical step
    apart        by schedule, how far its losses are from those of the first at most
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
    timelines: dict[str, Timeline] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Median over steps, which the first slow ones do not spoil."""
        return median(record.tokens_per_second for record in self.steps)


def told_apart(difference: float) -> str:
    """How far losses are from others, in words."""
    return f"at most {difference:.1g} from" if difference else "bit by bit"
