"""What a demo run leaves to tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from ...pipeline.timeline import Timeline
from ...trainer.progress import Clock
from .layout import Layout
from .settings import DemoSettings


class Score(NamedTuple):
    right: int
    asked: int

    def __str__(self) -> str:
        return f"{self.right} of {self.asked}"


@dataclass
class History:
    """A listener of the Trainer that keeps everything.

    lowest_loss  entropy of the held-out text: no model can do better on average
    parameters   of the whole model
    steps, evaluations  what the Trainer told
    scores       per kind of question, how many the trained model answers right
    sample       text that the trained model wrote
    timelines    by schedule, what the ranks of the pipeline did in a typical step
    apart        by schedule, how far its losses are from those of the first at most
    """

    settings: DemoSettings
    layout: Layout
    lowest_loss: float
    parameters: int = 0
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    seconds: float = 0.0
    timelines: dict[str, Timeline] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    _clock: Clock = field(default_factory=Clock)

    @property
    def tokens_per_second(self) -> float:
        """Median over steps, which the first slow ones do not spoil."""
        return median(step["tokens_per_second"] for step in self.steps)

    def started(self, facts: Mapping[str, Any]) -> None:
        self.parameters = facts["parameters"]
        self._clock.restart()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.steps.append(metrics)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self.evaluations.append(metrics)

    def finished(self, facts: Mapping[str, Any]) -> None:
        self.seconds = self._clock.lap()


def told_apart(difference: float) -> str:
    """How far losses are from others, in words."""
    return f"at most {difference:.1g} from" if difference else "bit by bit"
