"""What a pipeline rank shares with its data-parallel peers, chunk by chunk: gradients are reduced, weights are
gathered.

Gradients of a chunk are reduced as soon as its own are complete.

At stages 0 and 1 gradients accumulate over the microbatches of a step, and the buckets of a chunk leave in its last
backward (or last weight gradients), as each is complete. At stage 2 every microbatch's gradients leave like that, into
the shards.

Parameters that several chunks of the rank use, and those with copies on other ranks, are a section of their own: the
first are complete when all chunks are, and the second are summed with ranks that are at other points of the schedule,
for whom nobody must wait in the middle of it.

[Note: gradients that are not to wait]
From stage 2 on no buffer has room for whole gradients, so that they lie in `.grad` from when they are made to when
they are reduced. Where weight gradients wait, that is from I, in which those are made that cannot wait or have no room
to, until W. A layer that is recomputed leaves so little behind that there is hardly ever room for its gradients to
wait, which then would be whole for as long. So they do not wait: a section of their own leaves in I, as every gradient
does in B. Nor does any where the user lets none wait.

Data-parallel peers need not get the same gradients in a microbatch, so that what a section still has when its action
ends leaves there and then: behind the next action it would meet others at the peers. The two sections of a chunk are
reduced as one in B.

At stage 3 nor do those of a head whose losses do without logits: they are computed from its weights, which by then
have been freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from ...pipeline.cut.plan import CutPlan
from ...pipeline.runtime import Part
from ...pipeline.schedules import splits_backward
from ...pipeline.stage import StagedModel
from ...spec import get_spec
from ...zero.layout import SHARED
from ...zero.optimizer import ZeroOptimizer
from ...zero.unit_gatherer import UnitGatherer
from ..settings import HybridSettings


class ChunkReduction:
    """Tells `optimizer` when gradients of which chunk are made (`pipeline.runtime.Reduction`).

    prompt  whose gradients do not wait, as `sections_of` was told
    """

    def __init__(self, optimizer: ZeroOptimizer, prompt: Collection[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self.prompt = prompt

    def begin(self, chunk: int, parts: Sequence[Part], last: bool, of: Collection[nn.Parameter] | None) -> None:
        self._optimizer.expect_gradients([section_of(chunk, part) for part in parts], last, of)

    def end(self, chunk: int, parts: Sequence[Part], last: bool) -> None:
        self._optimizer.reduce_grad([section_of(chunk, part) for part in parts], last)
        if chunk == 0 and Part.OTHERS in parts:  # where a microbatch's backward on this rank ends
            self._optimizer.reduce_grad(SHARED, last=False)

    def finish(self) -> None:
        self._optimizer.reduce_grad(SHARED)


class ChunkGathering:
    """Gathers the weights of chunks for the pipeline (`pipeline.runtime.Gathering`). Those that several chunks use
    stay for the step.
    """

    def __init__(self, units: UnitGatherer) -> None:
        self._units = units

    def begin(self) -> None:
        self._units.open_section(SHARED)

    def gather(self, chunk: int) -> None:
        for part in Part:
            self._units.open_section(section_of(chunk, part))

    def wait(self, chunk: int) -> None:
        self._units.wait_section(SHARED)
        for part in Part:
            self._units.wait_section(section_of(chunk, part))

    def free(self, chunk: int) -> None:
        for part in Part:
            self._units.close_section(section_of(chunk, part))

    def end(self) -> None:
        self._units.end_backward()


def chunks_gathered(ahead: int | None) -> int:
    """Of how many chunks a rank has the weights at once at stage 3. By default those of an F and a B that take
    turns, and the next one.
    """
    return 3 if ahead is None else 1 + ahead


def prompt_parameters(
    plan: CutPlan, model: nn.Module, rank: int, settings: HybridSettings, heads: Iterable[nn.Module]
) -> set[nn.Parameter]:
    """Of pipeline rank `rank`: whose gradients are not to wait (see [Note: gradients that are not to wait]).

    heads  whose losses do without logits
    """
    stage, deferred_bytes = settings.zero.stage, settings.pipeline.deferred_bytes
    if stage < 2 or not splits_backward(plan.pp_style):
        return set()
    if deferred_bytes == 0:
        return set(model.parameters())
    prompt = plan.recomputed_parameters(model, rank) if deferred_bytes is None else set[nn.Parameter]()
    return prompt.union(*(head.parameters() for head in heads)) if stage == 3 else prompt


def section_of(chunk: int, part: Part) -> int:
    """The number of a part of a chunk among the sections of a model (`zero.layout.Family`)."""
    return len(Part) * chunk + part.value


def chunk_of(section: int) -> int:
    """The chunk that a section is a part of."""
    return section // len(Part)


def part_of(section: int) -> Part:
    """Which part of its chunk a section is."""
    return Part(section % len(Part))


def sections_of(staged: StagedModel, prompt: Collection[nn.Parameter]) -> dict[nn.Parameter, int]:
    """For every parameter that this rank holds its section, or `SHARED`."""
    users: dict[nn.Parameter, set[int]] = {}
    for chunk, stage in enumerate(staged.held):
        for param in staged.parameters_of(stage):
            users.setdefault(param, set()).add(chunk)
    sections = {}
    for param in staged.model.parameters():
        chunks, spec = users.get(param, set()), get_spec(param)
        alone = len(chunks) == 1 and (spec is None or spec.tied is None)
        sections[param] = section_of(min(chunks), Part.PROMPT if param in prompt else Part.OTHERS) if alone else SHARED
    return sections


def prompt_of(sections: Mapping[nn.Parameter, int]) -> list[nn.Parameter]:
    """Those that are `Part.PROMPT` of their chunk."""
    return [param for param, section in sections.items() if section != SHARED and part_of(section) is Part.PROMPT]
