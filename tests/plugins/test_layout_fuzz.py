"""Random layouts against one process: 3 steps, loss, every gradient, every updated weight.

pytest tests/plugins/test_layout_fuzz.py                                  22 layouts
pytest tests/plugins/test_layout_fuzz.py -m sweep -k drawn                22 others, and the calls of all on a GPU
SHARDWRIGHT_FUZZ=500 pytest tests/plugins/test_layout_fuzz.py -m sweep -k many_more    500 more, seeds 1000 to 1499
SHARDWRIGHT_FUZZ_FROM=2000 SHARDWRIGHT_FUZZ_MINUTES=15 pytest tests/plugins/test_layout_fuzz.py -m sweep -k many_more
                                                                          others, as many as begin in 15 minutes
SHARDWRIGHT_FUZZ=100 pytest tests/plugins/test_layout_fuzz.py -m sweep -k calls_of_many    the calls of others
SHARDWRIGHT_FUZZ_SEED=1234 pytest tests/plugins/test_layout_fuzz.py -m sweep    one of them again
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist
from hybrid_ranks import Layout, run_layout
from layout_draws import draw

from shardwright.testing import RankError, run_ranks
from shardwright.testing.call_order import CallRecorder, Launch, check_order
from shardwright.testing.stream_model import StreamModel
from shardwright.utils.streams import modelled

# Of the first 44 seeds those that together have nearly all models, sizes, stages, schedules, modes and habits of all of
# them; most of the others are of six and eight ranks.
DEFAULT = (1, 2, 5, 12, 15, 16, 20, 23, 28, 31, 32, 41, 42)
OTHERS = tuple(seed for seed in range(44) if seed not in DEFAULT)
# On the way of a GPU, their calls recorded: pipelines beside tensor and data parallelism, sequences split along both
# axes, and what no drawn one of four ranks has.
RECORDED = (
    *(replace(draw(seed), steps=2) for seed in (16, 24, 41)),
    Layout("llama-causal-lm", 4, {"tp_size": 2, "zero_stage": 3}, {"num_hidden_layers": 3}, checkpointing=True),
)
AT_ONCE = 20
SECONDS = 20.0  # of a layout among others
SECONDS_ALONE = 240.0  # eight ranks with FSDP2 under tensor parallelism may need more than SECONDS on two cores


def run_many(rank: int, world: int, layouts: Sequence[Layout]) -> list[str]:
    """Run layouts one after the other in the same processes; the first that fails on any rank ends the list."""
    for layout in layouts:
        failure = ""
        started = time.perf_counter()
        try:
            run_layout(rank, world, layout)
        except Exception:
            failure = traceback.format_exc()
        everywhere: list[str | None] = [None] * world
        if failure:
            raise RuntimeError(f"seed {layout.seed}: {layout}\n{failure}")
        dist.all_gather_object(everywhere, failure)
        if rank == 0 and os.environ.get("SHARDWRIGHT_FUZZ_VERBOSE"):
            print(f"seed {layout.seed} {time.perf_counter() - started:.1f} s {layout}", flush=True)
    return [str(layout) for layout in layouts]


def run_recorded(rank: int, world: int, layouts: Sequence[Layout]) -> list[list[Launch]]:
    """The calls of every layout, made as on a GPU: with collectives in place of the messages that a CPU sends."""
    recordings = []
    for layout in layouts:
        with modelled(StreamModel()), CallRecorder() as recorder:
            run_layout(rank, world, layout)
        recordings.append(recorder.launches)
    return recordings


def check_recorded(world: int, layouts: Sequence[Layout], seconds: float = SECONDS) -> None:
    results = run_ranks(run_recorded, world, layouts, timeout=seconds * len(layouts), debug="OFF")
    for layout, *recordings in zip(layouts, *results, strict=True):
        try:
            check_order(recordings)
        except AssertionError as error:
            raise AssertionError(f"{layout}\n{error}") from error


def by_world(seeds: Sequence[int]) -> dict[int, list[Layout]]:
    layouts: dict[int, list[Layout]] = {}
    for layout in map(draw, seeds):
        layouts.setdefault(layout.world, []).append(layout)
    return layouts


DRAWN, OTHER_DRAWN = by_world(DEFAULT), by_world(OTHERS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", sorted(DRAWN))
def test_drawn_layouts(world: int) -> None:
    run_ranks(run_many, world, DRAWN[world], timeout=SECONDS * len(DRAWN[world]))


def test_calls_of_all_ranks_fit_together() -> None:
    check_recorded(4, RECORDED)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", sorted(set(DRAWN) - {1}))
def test_calls_of_drawn_layouts_fit_together(world: int) -> None:
    check_recorded(world, [*DRAWN[world], *OTHER_DRAWN.get(world, [])])


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", sorted(OTHER_DRAWN))
def test_other_drawn_layouts(world: int) -> None:
    run_ranks(run_many, world, OTHER_DRAWN[world], timeout=SECONDS * len(OTHER_DRAWN[world]))


@pytest.mark.sweep
@pytest.mark.timeout(36000)
def test_many_more_layouts() -> None:
    """Every failing layout is reported, not only the first."""
    run_seeds(failures_of)


@pytest.mark.sweep
@pytest.mark.timeout(36000)
def test_calls_of_many_layouts_fit_together() -> None:
    run_seeds(misfits_of)


def run_seeds(failures_of: Callable[[int, Sequence[Layout]], list[str]]) -> None:
    """The layouts of the seeds that the environment names."""
    one, minutes = os.environ.get("SHARDWRIGHT_FUZZ_SEED"), os.environ.get("SHARDWRIGHT_FUZZ_MINUTES")
    first = int(os.environ.get("SHARDWRIGHT_FUZZ_FROM", "1000"))
    seeds = [int(one)] if one else list(range(first, first + int(os.environ.get("SHARDWRIGHT_FUZZ", "500"))))
    end = time.monotonic() + 60 * float(minutes) if minutes else None
    failures: list[str] = []
    done = 0
    for some in (seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)):
        if end is not None and time.monotonic() > end:
            break
        for world, layouts in sorted(by_world(some).items()):
            failures += failures_of(world, layouts)
        done += len(some)
        print(f"seeds {some[0]} to {some[-1]}: {done} done, {len(failures)} failed", flush=True)
    assert not failures, f"{len(failures)} of {done} layouts failed"


def misfits_of(world: int, layouts: Sequence[Layout]) -> list[str]:
    """Layouts whose calls, as on a GPU, do not fit together, or do not run."""
    failures = []
    for layout in layouts if world > 1 else ():
        try:
            check_recorded(world, [layout], SECONDS_ALONE)
        except (AssertionError, RankError) as error:
            failures.append(str(error))
            print(f"FAILED seed {layout.seed}: {error}", flush=True)
    return failures


def failures_of(world: int, layouts: Sequence[Layout]) -> list[str]:
    try:
        run_ranks(run_many, world, layouts, timeout=SECONDS * len(layouts))
        return []
    except RankError:
        failures = []
        for layout in layouts:  # one by one, to name them all
            try:
                run_ranks(run_many, world, [layout], timeout=SECONDS_ALONE)
            except RankError as error:
                failures.append(f"{error}")
                print(f"FAILED seed {layout.seed}: {layout}\n{error}", flush=True)
        return failures
