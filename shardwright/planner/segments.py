"""What a rank holds along a step, cut into the parts that come again: its actions, and what lies before and behind.

with segments.step():         the second step of a replay, under `LiveBytes`
    ...
segments.done                 one `Segment` after the other
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..pipeline.planning.actions import Action, Kind
from .live_bytes import LiveBytes, Point

Amounts = NDArray[np.int64]  # [..., labels]

BEFORE: Final = "before the first action"
OPTIMIZER: Final = "optimizer step"


@dataclass
class Segment:
    """Of a step.

    name    an action, or a part of the step
    start   bytes by label at its start, [labels]
    grown   bytes that were new at each of its points, and
    filled  those by which memory that had been emptied was filled again before it: of layers that are gathered one by
            one, none where a pipeline gathers all of a chunk at once
    points  bytes by label there, [points, labels], and
    end     at its end
    """

    name: Action | str
    start: Amounts
    grown: list[int] = field(default_factory=list)
    points: Amounts = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    end: Amounts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    filled: list[int] = field(default_factory=list)


class Segments:
    """Of one step; it also is what a runtime tells its actions to, in place of its `Recorder`."""

    def __init__(self, live: LiveBytes | None = None) -> None:
        self.live = live
        self.action: Action | None = None
        self.done: list[Segment] = []
        self.labels: list[Hashable] = []
        self._raw: list[tuple[Action | str, Counter[Hashable], list[Point]]] = []
        self._listens = False
        self._is_cut = True

    # As the runtime calls a `Recorder`.

    def start_step(self) -> None:
        self.action = None

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        self.action = action
        self.begin(action)
        yield
        self.action = None

    def inputs_arrived(self) -> None:
        pass

    # A step.

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside is the step that counts."""
        assert self.live is not None
        self._listens = True
        self.begin(BEFORE)
        yield
        self._listens = False
        last = self.live.holdings()
        self.live.points = None
        self._settle(last)

    def begin(self, name: Action | str) -> None:
        """From here on it is this."""
        if self._listens:
            assert self.live is not None
            points: list[Point] = []
            self._raw.append((name, self.live.holdings(), points))
            self.live.points = points

    def follow(self, executor: Any) -> None:
        """Of a model that is not cut: forwards and backwards of microbatches, as if a schedule had them."""
        self._is_cut = False
        forward, backward = executor.forward, executor._backward
        number = 0

        def run_forward(stage: int, received: Any, index: int) -> Any:
            nonlocal number
            number = index
            self.begin(Action(Kind.F, 0, index))
            return forward(stage, received, index)

        def run_backward(loss: Any) -> None:
            self.begin(Action(Kind.B, 0, number))
            backward(loss)

        executor.forward, executor._backward = run_forward, run_backward

    def _settle(self, last: Counter[Hashable]) -> None:
        """Everything as arrays, when it is known which labels there are."""
        labels: dict[Hashable, int] = {}
        for _, start, points in self._raw:
            for held in (start, *(point.held for point in points)):
                for label in held:
                    labels.setdefault(label, len(labels))
        for label in last:
            labels.setdefault(label, len(labels))
        self.labels = list(labels)

        def array(held: Counter[Hashable]) -> Amounts:
            found = np.zeros(len(labels), dtype=np.int64)
            for label, size in held.items():
                found[labels[label]] += size
            return found

        ends = [array(start) for _, start, _ in self._raw[1:]] + [array(last)]
        for (name, start, points), end in zip(self._raw, ends, strict=True):
            stacked = np.stack([array(point.held) for point in points]) if points else np.zeros((0, len(labels)), int)
            grown, filled = [point.grown for point in points], [0 if self._is_cut else point.filled for point in points]
            self.done.append(Segment(name, array(start), grown, stacked, end, filled))
        self._raw.clear()
