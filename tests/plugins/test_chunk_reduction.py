"""When the gradients of which chunk of a pipeline rank leave: each bucket as soon as it is complete, in the last
backward of its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import hybrid_ranks
import pytest
import torch
from hybrid_ranks import Layout, Run
from torch import nn

from shardwright.kernels.lazy_logits import LazyLogits
from shardwright.pipeline.planning.actions import Kind
from shardwright.pipeline.runtime import Part, PipelineRuntime
from shardwright.plugins.hybrid.chunks import chunk_of, part_of
from shardwright.shardformer import PipelineGradientCheckpointConfig, fused_head
from shardwright.testing import keep_float64, run_ranks
from shardwright.zero.layout import SHARED
from shardwright.zero.param_guard import own_gradient
from shardwright.zero.reducer import GradReducer
from shardwright.zero.sharded_bucket import ShardedBucket

MICROBATCHES = 4
STYLES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_style": "1f1b"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "zb": {"pp_style": "zb"},
    "zbv": {"pp_style": "zbv", "num_model_chunks": 2},
    "dualpipev": {"pp_style": "dualpipev", "num_model_chunks": 2},
}
UNTIED = {"tie_word_embeddings": False, "num_hidden_layers": 8}


class Event(NamedTuple):
    """kind: "begins" or "ends", a backward or the weight gradients of a microbatch; "inputs begin" or "inputs end",
    its input gradients; or "leaves", a bucket.

    chunk  or `SHARED`
    held   how many parameters have a gradient of their own when it begins
    """

    kind: str
    chunk: int
    bucket: int = -1
    held: int = 0
    part: Part = Part.OTHERS


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """What happens on this rank, in order."""
    events: list[Event] = []
    launch, making = GradReducer._launch_piece, PipelineRuntime._making_gradients

    def note_launch(self: GradReducer, bucket: Any, piece: int) -> None:
        if piece == 0:
            section = bucket.plan.family.section
            chunk, part = (SHARED, Part.OTHERS) if section == SHARED else (chunk_of(section), part_of(section))
            events.append(Event("leaves", chunk, bucket.index, part=part))
        launch(self, bucket, piece)

    @contextmanager
    def note_making(self: PipelineRuntime, stage: int, microbatch: int, kind: Kind, of: Any = None) -> Iterator[None]:
        chunk, begins, ends = self.placement.chunk_of(stage), "begins", "ends"
        if kind is Kind.I:
            begins, ends = "inputs begin", "inputs end"
        held = sum(own_gradient(param) is not None for param in self._parameters())
        events.append(Event(begins, chunk, held=held))
        with making(self, stage, microbatch, kind, of):
            yield
            events.append(Event(ends, chunk))

    GradReducer._launch_piece, PipelineRuntime._making_gradients = note_launch, note_making  # type: ignore[method-assign]
    try:
        yield events
    finally:
        GradReducer._launch_piece, PipelineRuntime._making_gradients = launch, making  # type: ignore[method-assign]


def _train(rank: int, world: int, layouts: list[Layout]) -> list[list[Event]]:
    found = []
    for layout in layouts:
        with keep_float64(), recorded() as events:
            Run(rank, world, layout).run()
        found.append(list(events))
    return found


def _layout(style: dict[str, Any], stage: int, **overrides: Any) -> Layout:
    buckets: dict[str, Any] = {"zero_bucket_size_in_m": 0.004} if stage else {"ddp_bucket_cap_mb": 0.03}
    plugin = {"pp_size": 2, "num_microbatches": MICROBATCHES, "zero_stage": stage, **buckets, **style}
    return Layout("llama-causal-lm", 4, plugin, overrides={**UNTIED, **overrides}, steps=1, batch=12)


def _check_once(events: list[Event], chunks: int) -> None:
    """Gradients accumulate, and every chunk's buckets leave once, while its last gradients are made."""
    ends = {
        chunk: max(place for place, event in enumerate(events) if event == Event("ends", chunk))
        for chunk in range(chunks)
    }
    begins = {
        chunk: max(place for place, event in enumerate(events) if event[:2] == ("begins", chunk))
        for chunk in range(chunks)
    }
    leaving = [(place, event) for place, event in enumerate(events) if event.kind == "leaves"]
    assert len({event.bucket for _, event in leaving}) == len(leaving) > 2 * chunks
    for chunk in range(chunks):
        mine = [place for place, event in leaving if event.chunk == chunk]
        assert begins[chunk] < mine[0]
        assert all(place < ends[chunk] for place in mine[:-1]), (
            "only what the last gradient completes is left for the end"
        )
    # So before the last backward of the rank ends, everything but at most its last bucket is under way.
    assert sum(place > max(ends.values()) for place, _ in leaving) <= 1


@pytest.mark.parametrize("style", STYLES)
def test_a_chunk_is_reduced_while_its_last_gradients_are_made(style: str) -> None:
    layouts = [_layout(STYLES[style], stage) for stage in (0, 1)]
    for layout_of_rank in run_ranks(_train, 4, layouts, timeout=120):
        for events in layout_of_rank:
            _check_once(events, STYLES[style].get("num_model_chunks", 1))


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_stage_2_keeps_shards_between_microbatches(style: str) -> None:
    for (events,) in run_ranks(_train, 4, [_layout(STYLES[style], 2)], timeout=120):
        buckets = {event.bucket for event in events if event.kind == "leaves"}
        for bucket in buckets:
            assert sum(event.bucket == bucket for event in events) == MICROBATCHES
        waiting = set()
        for event in events:
            if event.kind == "begins":
                assert not waiting, "the microbatch before has left"
                assert style != "1f1b" or not event.held, "and nothing of it is kept beside the shards"
                waiting = {other.bucket for other in events if other.kind == "leaves" and other.chunk == event.chunk}
            waiting.discard(event.bucket)


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("style", ["zb", "zbv", "dualpipev"])
def test_gradients_of_recomputed_layers_are_not_kept_until_weights_are_due(style: str, zero_stage: int) -> None:
    again = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)}
    layouts = [
        _layout({**STYLES[style], **again}, zero_stage),
        _layout({**STYLES[style], "deferred_bytes": 0}, zero_stage),
    ]
    for results in run_ranks(_train, 4, layouts, timeout=120):
        for outside_of_layers, events in zip((2, 0), results, strict=True):
            prompt = {event.bucket for event in events if event.part is Part.PROMPT}
            assert len(prompt) >= 4
            for bucket in prompt:
                assert sum(event.bucket == bucket for event in events) == MICROBATCHES
            begun = [event.held for event in events if event.kind in ("begins", "inputs begin")]
            assert max(begun) <= outside_of_layers, "of the embedding, or of the last norm and the head"


class _ForSome(nn.Module):
    """`inner`, and for samples whose numbers have a positive sum another linear: a microbatch may have none."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Linear(width, width, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, output = (x.detach().sum((1, 2)) > 0).nonzero().view(-1), self.inner(x)
        return output.index_add(0, chosen, self.extra(x[chosen])) if len(chosen) else output


def _train_unevenly(rank: int, world: int, layouts: list[Layout]) -> list[list[Event]]:
    build = hybrid_ranks.build

    def build_uneven(layout: Layout, seed: int | None = None) -> nn.Module:
        model = build(layout, seed)
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.mlp = _ForSome(layer.mlp, model.config.hidden_size)
        return model

    hybrid_ranks.build = build_uneven
    return _train(rank, world, layouts)


@pytest.mark.parametrize("style", ["zb", "zbv", "dualpipev"])
def test_buckets_leave_in_one_order_where_peers_lack_gradients(style: str) -> None:
    layouts = [
        _layout({**STYLES[style], "gradient_checkpoint_config": PipelineGradientCheckpointConfig(share)}, stage)
        for share, stage in ((1.0, 2), (0.5, 2), (0.5, 3))
    ]
    found = run_ranks(_train_unevenly, 4, layouts, timeout=120)
    left = [[[event.bucket for event in events if event.kind == "leaves"] for events in results] for results in found]
    assert left[:2] == left[2:], "ranks of one stage and of the two halves of a batch"


def _read_in_a_pipeline(rank: int, world: int, styles: list[str]) -> list[tuple[int, list[str]]]:
    """For each style: how often the loss was computed without logits, and parameters whose values were gathered while
    the pipeline ran because something had read them.
    """
    lazy, show, run = LazyLogits.of, ShardedBucket.show, PipelineRuntime.run
    runs, losses, shown = False, 0, list[str]()

    def note_loss(*args: Any) -> Any:
        nonlocal losses
        losses += runs
        return lazy(*args)

    def note_show(self: ShardedBucket, group: Any) -> None:
        shown.extend(slot.entry.name for slot in self.plan.slots if runs)
        show(self, group)

    def note_run(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs = True
        try:
            return run(*args, **kwargs)
        finally:
            runs = False

    LazyLogits.of, ShardedBucket.show, PipelineRuntime.run = note_loss, note_show, note_run  # type: ignore[method-assign,assignment]
    fused_head.tokens_at_a_time = lambda *_: 1  # type: ignore[assignment]
    found = []
    for style in styles:
        losses = 0
        shown.clear()
        with keep_float64():
            Run(rank, world, _layout(STYLES[style], 3)).run()
        found.append((losses, list(shown)))
    return found


def test_weights_of_a_head_are_not_gathered_again_for_its_gradients() -> None:
    styles = ["zb", "zbv", "dualpipev"]
    for results in zip(*run_ranks(_read_in_a_pipeline, 4, styles, timeout=120), strict=True):
        assert max(losses for losses, _ in results) == MICROBATCHES
        assert not any(shown for _, shown in results)


def test_what_chunks_share_leaves_when_all_are_through() -> None:
    layouts = [
        _layout(STYLES[style], stage, tie_word_embeddings=True) for style, stage in product(("1f1b", "zbv"), (1, 2))
    ]
    for rank, results in enumerate(run_ranks(_train, 4, layouts, timeout=120)):
        for layout, events in zip(layouts, results, strict=True):
            shared = [place for place, event in enumerate(events) if event.chunk == SHARED]
            last = max(place for place, event in enumerate(events) if event.kind == "ends")
            if layout.plugin["pp_style"] == "zbv" and rank not in (0, 2):
                assert not shared, "both ends of a V are on the first rank"
            else:
                assert shared[-1] > last
                assert len(shared) == (1 if layout.plugin["zero_stage"] == 1 else MICROBATCHES + 1)


def _most_under_way(rank: int, world: int, layouts: list[Layout]) -> list[tuple[int, int, int]]:
    """For each layout: buckets, the most messages under way at a time, and the scratch buffers that there are at the
    end.
    """
    launch = GradReducer._launch_next
    under_way: list[tuple[int, int, int]] = []

    def note(self: GradReducer, window: Any) -> None:
        launch(self, window)
        under_way.append(
            (len(self.buckets), len({flight.bucket.index for flight in self._flying}), self.pool.allocated)
        )

    GradReducer._launch_next = note  # type: ignore[method-assign]
    found = []
    for layout in layouts:
        under_way.clear()
        with keep_float64():
            Run(rank, world, layout).run()
        found.append((under_way[0][0], max(flying for _, flying, _ in under_way), max(lent for *_, lent in under_way)))
    return found


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_what_is_under_way_does_not_grow_with_microbatches(style: str) -> None:
    layouts = [
        Layout(
            "llama-causal-lm",
            4,
            {**_layout(STYLES[style], 2).plugin, "num_microbatches": count},
            overrides=UNTIED,
            steps=1,
            batch=24,
        )
        for count in (4, 24)
    ]
    for few, many in run_ranks(_most_under_way, 4, layouts, timeout=120):
        assert few == many
        buckets, flying, _ = few
        assert flying <= buckets
