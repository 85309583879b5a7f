"""Memory that a search estimates for layouts, beside the peak of a replay of each (`planner.peaks`), which is that of
real ranks to the byte.

for one in compare(question, layouts): one.layout, one.replayed, one.estimated, one.off
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..planner.answer import plugin_arguments, recompute_of
from ..planner.batches import batch_of
from ..planner.candidate import Layout
from ..planner.estimate import Estimate
from ..planner.peaks import peaks
from ..planner.replay import Job
from ..planner.search import Question, Search
from ..plugins import HybridParallelPlugin
from ..utils.device import planning_for


class Estimated(NamedTuple):
    """Bytes of the fullest rank."""

    layout: Layout
    replayed: int
    estimated: float

    @property
    def off(self) -> float:
        return self.estimated / self.replayed - 1


def compare(question: Question, layouts: Sequence[Layout]) -> Iterator[Estimated]:
    """`question` has the devices' number of every layout in turn: that of its own is not looked at."""
    search = Search(question)
    for layout in layouts:
        estimate = search.estimate(layout, simulated=True)
        found = peaks_of(question, estimate, search.along)
        yield Estimated(layout, max(peak.most for peak in found), estimate.memory)


def peaks_of(question: Question, estimate: Estimate, along: bool) -> list[Any]:
    layout = estimate.layout
    given: dict[str, Any] = plugin_arguments(estimate, question.precision, along)
    again = recompute_of(estimate)
    if again:
        given["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(**again)
    batch = batch_of(question.model(), layout.samples * layout.count, question.length)
    job = Job(lambda **changes: HybridParallelPlugin(**{**given, **changes}), question.model, question.optimizer, batch)
    world_size = layout.tp * layout.pp * layout.sp * layout.dp
    with planning_for(question.machine.device):
        return list(peaks(job, world_size).peaks)
