"""What a layout comes to for one model: plain data, made by `plugins.hybrid.preflight`, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...utils.errors import counted


@dataclass(frozen=True)
class StageShape:
    """One pipeline stage.

    rank        position in the pipeline; a rank with several chunks holds several stages
    layers      names of its layers, in order
    parameters  of the whole stage, before tensor parallelism divides them (tied copies count in every stage that holds
                one)
    recomputed  layers under activation checkpointing
    selective   layers that keep products and attention and recompute the rest
    alone       there is no other stage
    """

    stage: int
    rank: int
    layers: tuple[str, ...]
    parameters: int
    recomputed: int = 0
    selective: int = 0
    alone: bool = False

    @property
    def in_part(self) -> str:
        return f", {self.selective} in part" if self.selective else ""

    @property
    def span(self) -> str:
        if not self.layers:
            return "the whole model" if self.alone else f"what is {'behind' if self.stage else 'before'} the layers"
        return self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} to {self.layers[-1]}"


@dataclass(frozen=True)
class RankShape:
    """What the fullest rank at one pipeline position keeps between steps, in bytes.

    parameters      elements that it holds, after tensor parallelism, padding of the vocabulary included
    trained         elements among them that the optimizer steps, on this rank or on others of its sub-group
    shard           elements that this rank's optimizer steps
    weights, gradients, masters, states     bytes; masters are copies beside weights of half precision
    """

    rank: int
    parameters: int
    trained: int
    shard: int
    weights: int
    gradients: int
    masters: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.states


@dataclass(frozen=True)
class Traffic:
    """One kind of collective or message, for one rank and one step.

    axis    ranks that take part: "dp", "tp", "pp", "sp"
    what    what travels and how
    count   calls per step
    sent    bytes that a rank sends, by the ring formulas; None where it depends on a batch that is not known
    """

    axis: str
    what: str
    count: int | None
    sent: int | None


@dataclass(frozen=True)
class ResolvedLayout:
    """A layout applied to a model.

    sizes           ranks along dp, pp, tp, sp
    order           axes of the mesh, outermost first
    shared          ranks of a ZeRO sub-group (k); the optimizer is sharded over them from stage 1 on
    num_microbatches, num_slices, bubble, peak_live
                    of one step: how many there are, which part of the ranks' time is idle when all stages cost the same
                    (backward twice a forward), most microbatches whose activations a rank holds; None while the batch
                    is not known
    deferred        share of the weight-gradient work that a zero-bubble schedule postpones; the bubble is that with
                    this share. None for other schedules
    imbalance, rank_imbalance
                    cost of the dearest stage, and of the dearest rank with all its stages, over the mean
    kernels         which attention and which operators in one the model computes with; empty where it does not say
    activations     bytes of them at the peak of a step, by pipeline rank; empty where they are not known
    notes           what a user may want to know about this combination
    warnings        what a user will want to change; also logged when a model is boosted
    without_effect  options that this layout has no use for, as name=value (why)
    """

    model: str
    parameters: int
    trained: int
    world_size: int
    sizes: Mapping[str, int]
    order: tuple[str, ...]
    precision: str
    zero_stage: int
    shared: int
    pp_style: str
    num_microbatches: int | None
    num_slices: int
    bubble: float | None
    peak_live: int | None
    deferred: float | None
    imbalance: float | None
    rank_imbalance: float | None
    kernels: str
    stages: tuple[StageShape, ...]
    ranks: tuple[RankShape, ...]
    traffic: tuple[Traffic, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    activations: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        zero = f"ZeRO-{self.zero_stage}" + (
            f" over {self.shared} rank{'s' * (self.shared > 1)}" if self.zero_stage else ""
        )
        lines = [
            f"{self.model}: {human(self.parameters)} parameters, {human(self.trained)} of them trained",
            f"{counted(self.world_size, 'rank')} = {sizes} (outermost first: {', '.join(self.order)}), "
            f"{self.precision}, "
            f"{zero}",
            "",
            *self._stage_table(),
            "",
            *table(
                (
                    "pipeline rank",
                    "parameters",
                    "optimizer shard",
                    "weights",
                    "gradients",
                    "masters",
                    "states",
                    "together",
                ),
                [_rank_row(rank) for rank in self.ranks],
            ),
            "bytes kept between steps; without activations and what a step needs for a while",
            "",
            self._schedule(),
        ]
        if self.kernels:
            lines.append(self.kernels)
        if self.traffic:
            rows = [
                (t.axis, t.what, "?" if t.count is None else str(t.count), "?" if t.sent is None else size(t.sent))
                for t in self.traffic
            ]
            lines += ["", *table(("axis", "per step and rank", "calls", "sent"), rows)]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"without effect here: {option}" for option in self.without_effect]
        return "\n".join(lines)

    def _stage_table(self) -> list[str]:
        """Stages, with a column for recomputed layers where there are any."""
        head = ("stage", "rank", "layers", "parameters")
        rows = [(str(stage.stage), str(stage.rank), stage.span, human(stage.parameters)) for stage in self.stages]
        if not any(stage.recomputed + stage.selective for stage in self.stages):
            return table(head, rows)
        layers = [counted(len(stage.layers), "layer") for stage in self.stages]
        counts = [f"{one.recomputed} of {each}{one.in_part}" for one, each in zip(self.stages, layers, strict=True)]
        return table((*head, "recomputed"), [(*row, count) for row, count in zip(rows, counts, strict=True)])

    def _schedule(self) -> str:
        if self.sizes["pp"] == 1:
            return (
                f"no pipeline: {self.num_microbatches or 'every batch is cut into'} microbatch(es) one after the other"
            )
        if self.num_microbatches is None:
            return f"schedule {self.pp_style}: microbatches and bubble depend on the batch size"
        assert self.bubble is not None
        deferred = "" if self.deferred is None else f" with {self.deferred:.0%} of weight gradients postponed"
        several = len(self.stages) > len(self.ranks)
        sliced = self.num_slices > 1
        cut = f" of {self.num_slices} slices" if sliced else ""
        rank = f", dearest rank {self.rank_imbalance:.2f} x the mean" if several else ""
        return (
            f"schedule {self.pp_style}: {counted(self.num_microbatches, 'microbatch', 'microbatches')}{cut}, ideal "
            "bubble "
            f"{self.bubble:.1%}{deferred}, at most {self.peak_live} "
            f"{'chunks of ' * several}{'slices' if sliced else 'microbatches'} held, dearest stage "
            f"{self.imbalance:.2f} x the mean{rank}"
        )


def _rank_row(rank: RankShape) -> tuple[str, ...]:
    amounts = (rank.weights, rank.gradients, rank.masters, rank.states, rank.total)
    return (str(rank.rank), human(rank.parameters), human(rank.shard), *map(size, amounts))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the columns below one another."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def human(number: int) -> str:
    """12345678 as 12.35 M."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def size(amount: int) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.2f} {unit}"
    return f"{amount} B"
