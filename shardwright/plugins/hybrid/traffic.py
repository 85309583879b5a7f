"""Collectives of tensor parallelism and messages of pipelines in one step, counted from the plans.

    column linears of one input     one all-reduce of its gradient       [T, in], backward
    row linear                      one all-reduce of its output         [T, out], forward, again where recomputed
    vocabulary's table              one all-reduce of its output         [T, hidden], forward
    vocabulary's head               one all-reduce of its input's gradient
    channels dealt         one all-reduce of the gradient of a convolution's input, backward; of channels summed one of
                           the output, forward; where whole channels come in or go out, an all-gather of them
    cut behind a stage              every tensor that crosses it, forward, and its gradient, backward

Left out is what carries a few numbers per token or less: the vocabulary-parallel loss, norms, flags, loss scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ...comm.quantised import BYTES_PER_ELEMENT
from ...models.config import first_int, hidden_size
from ...pipeline.cut.plan import CutPlan
from ...shardformer.convolution import ConvColumn, ConvGroups, ConvRow
from ...shardformer.layer.linear import input_size, is_linear, output_size
from ...shardformer.plan import Decision
from ...shardformer.sequence import AlongTensor
from ...shardformer.side_by_side import SideBySide
from ...shardformer.styles import Column, PartialSum, Row, VocabEmbedding, VocabHead
from ...shardformer.sum_at_exit import SumAtExit
from ...zero.bucket import master_dtype
from ...zero.layout import BucketPlan
from ...zero.settings import ZeroSettings
from .resolved import Traffic


@dataclass(frozen=True)
class Tokens:
    """How much one step handles.

    tokens          of all microbatches of one rank, None while the batch is not known
    microbatches    None while the batch is not known
    slices          of a microbatch, of which layers run one after the other
    hidden          features of a token between layers, None where the config does not say
    itemsize        bytes of an activation
    quantises       whether activations travel in 8 bits
    """

    tokens: int | None
    microbatches: int | None
    hidden: int | None
    itemsize: int
    slices: int = 1
    quantises: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: int | None,
        length: int | None,
        microbatches: int | None,
        itemsize: int,
        slices: int = 1,
        quantises: bool = False,
    ) -> Tokens:
        tokens = samples * length if samples and length else None
        return cls(tokens, microbatches, hidden_size(model), itemsize, slices, quantises)

    def bytes(self, features: int | None, exact: int = 0) -> int | None:
        """Of one activation of so many features, over the whole step; `exact` of them are never rounded."""
        if self.tokens is None or features is None:
            return None
        size = BYTES_PER_ELEMENT if self.quantises else self.itemsize
        return int(self.tokens * ((features - exact) * size + exact * self.itemsize))


def tensor_traffic(
    positions: Sequence[Sequence[Decision]], tokens: Tokens, recomputes: bool, split: AlongTensor | None = None
) -> list[Traffic]:
    """Collectives over tp, at the pipeline position that has most of them.

    split   how sequences are split over these ranks: then an all-gather and a reduce-scatter, which together send as
            much, stand for each all-reduce but those of the vocabulary
    """
    of_position = [(_reduced_features(decisions), decisions) for decisions in positions]
    found, busiest = max(of_position, key=lambda position: sum(position[0]), default=([], ()))
    if not found:
        return []
    ranks = next(decision.site.parallel.size for decisions in positions for decision in decisions)
    tables = sum(_rows_of(decision) for decision in busiest if isinstance(decision.style, VocabEmbedding))
    size = tokens.bytes(sum(found), exact=tables)
    heads = sum(isinstance(decision.style, VocabHead) for decision in busiest)  # which run on the whole of a microbatch
    rounds = (len(found) - heads) * tokens.slices + heads
    calls = None if tokens.microbatches is None else rounds * tokens.microbatches
    what = ("activations and their gradients, all-reduce") + (
        " (without those that are recomputed)" if recomputes else ""
    )
    reduced = Traffic("tp", what, calls, None if size is None else 2 * (ranks - 1) * size // ranks)
    return [reduced] if split is None else _split_traffic(reduced, busiest, tokens, split, ranks)


def channel_traffic(positions: Sequence[Sequence[Decision]], microbatches: int | None) -> list[Traffic]:
    """Collectives of convolutions over tp, at the pipeline position that has most of them. How much they send depends
    on the size of pictures, which no layout knows.
    """
    counts = [(sum(map(_sums, decisions)), sum(map(_gathers, decisions))) for decisions in positions]
    sums, gathers = max(counts, key=sum, default=(0, 0))
    named = (("sums of channels and their gradients, all-reduce", sums), ("channels, all-gather", gathers))
    return [
        Traffic("tp", what, None if microbatches is None else count * microbatches, None)
        for what, count in named
        if count
    ]


def _sums(decision: Decision) -> int:
    return isinstance(decision.style, ConvColumn | ConvRow)


def _gathers(decision: Decision) -> int:
    style = decision.style
    if isinstance(style, ConvGroups):
        return 2 * style.gather_output  # of outputs forward, of the inputs' gradients backward
    return (isinstance(style, ConvColumn) and style.gather_output) or (isinstance(style, ConvRow) and style.split_input)


def _split_traffic(
    reduced: Traffic, decisions: Sequence[Decision], tokens: Tokens, split: AlongTensor, ranks: int
) -> list[Traffic]:
    """What `reduced` is where sequences are split, without the gather behind the last layer and that of its gradient
    before the first.
    """
    vocabulary = [each for each in decisions if isinstance(each.style, VocabEmbedding | VocabHead)]
    of_vocabulary = _reduced_features(vocabulary)
    again = _reduced_features([each for each in decisions if isinstance(each.style, Column)]) if split.again else []

    def sent(features: Sequence[int]) -> int:
        return (ranks - 1) * (tokens.bytes(sum(features)) or 0) // ranks

    def times(number: int) -> int:
        return number * (tokens.microbatches or 0)

    count, size = reduced.count, reduced.sent
    if count is not None:
        count = 2 * (count - times(len(of_vocabulary))) + times(len(again))
    if size is not None:
        size += sent(again) - 2 * sent(of_vocabulary)
    parts = Traffic("tp", "parts of sequences and their gradients, all-gather and reduce-scatter", count, size)
    known = None if size is None else 2 * sent(of_vocabulary)
    called = None if count is None else times(len(of_vocabulary))
    return [parts, Traffic("tp", "vocabulary, all-reduce", called, known)] if of_vocabulary else [parts]


def _reduced_features(decisions: Sequence[Decision]) -> list[int]:
    """Features of every activation that is all-reduced in one forward and backward."""
    found: list[int] = []
    inputs: set[tuple[int, int]] = set()
    sums = tuple(f"{decision.site.name}." for decision in decisions if isinstance(decision.style, SumAtExit))
    with_another = {
        f"{decision.site.name}.{decision.style.first}"
        for decision in decisions
        if isinstance(decision.style, SideBySide)
    }
    for decision in decisions:
        style, module = decision.style, decision.site.module
        if decision.site.name in with_another:
            continue
        if decision.site.name.startswith(sums):
            if isinstance(style, PartialSum):  # once for the block, forward and backward
                found += [features_of(module)] * 2
            continue
        if isinstance(style, VocabEmbedding):
            found.append(_rows_of(decision))
        elif isinstance(style, VocabHead | Column) and is_linear(module):
            key = (id(decision.site.parent), input_size(module))
            if isinstance(style, VocabHead) or key not in inputs:
                found.append(input_size(module))
            inputs.add(key)
        elif isinstance(style, Row) and is_linear(module):
            found.append(output_size(module))
        elif isinstance(style, PartialSum):
            features = features_of(module)
            found += [features, features]
    return found


def _rows_of(decision: Decision) -> int:
    """Features of a row of the vocabulary's table."""
    return decision.site.module.get_parameter("weight").shape[1]


def sizes_on_wire(plan: BucketPlan, options: ZeroSettings) -> tuple[float, float | None]:
    """Bytes of a gradient and of a weight of a bucket; None: those of the weight's dtype.

    Below stage 3, weights that are their own masters are never rounded (see `zero.quantised`).
    """
    if not options.quantises:
        return (options.communication_dtype or master_dtype(plan.family.dtype, True)).itemsize, None
    own = master_dtype(plan.family.dtype, options.master_weights) == plan.family.dtype and not options.cpu_offload
    return BYTES_PER_ELEMENT, None if own and options.stage < 3 else BYTES_PER_ELEMENT


def features_of(module: nn.Module) -> int:
    return first_int(module, ("hidden_dim", "hidden_size")) or 0


def pipeline_traffic(plan: CutPlan, tokens: Tokens, parts: int = 1) -> list[Traffic]:
    """Messages that the busiest pipeline rank sends: outputs forward, gradients backward.

    parts   into which sequences are split between layers
    """
    if plan.survey is None:
        return []
    sends = [0] * plan.placement.num_ranks
    calls = [0] * plan.placement.num_ranks
    for stage, units in enumerate(plan.stages[:-1]):
        here, there = plan.placement.rank_of(stage), plan.placement.rank_of(stage + 1)
        if here == there:
            continue
        crossing = sum(plan.survey.template(unit).num_tensors for unit in plan.survey.boundary(units.stop))
        for rank in (here, there):
            sends[rank] += crossing
            calls[rank] += 1
    busiest = sends.index(max(sends))
    size = tokens.bytes(tokens.hidden)
    count = None if tokens.microbatches is None else calls[busiest] * tokens.microbatches * tokens.slices
    return [
        Traffic(
            "pp",
            "activations forward, gradients backward, sent to neighbours",
            count,
            None if size is None else sends[busiest] * size // parts,
        )
    ]
