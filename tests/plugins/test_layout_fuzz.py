"""Random layouts against one process: 3 steps, loss, every gradient, every updated weight.

pytest tests/plugins/test_layout_fuzz.py                                  22 layouts
pytest tests/plugins/test_layout_fuzz.py -m sweep -k drawn                22 others
SHARDWRIGHT_FUZZ=500 pytest tests/plugins/test_layout_fuzz.py -m sweep    500 more, with other seeds
SHARDWRIGHT_FUZZ_SEED=1234 pytest tests/plugins/test_layout_fuzz.py -m sweep    one of them again
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from hybrid_ranks import Layout, run_layout
from layout_draws import draw

from shardwright.testing import RankError, run_ranks

# Of the first 44 seeds those that together have every model, size, stage, schedule, mode and habit of all of them, and
# four of five pairs of these; most of the others are of six and eight ranks.
DEFAULT = (1, 2, 5, 12, 14, 15, 16, 20, 23, 24, 26, 28, 31, 32, 33, 34, 35, 36, 38, 41, 42, 43)
OTHERS = tuple(seed for seed in range(44) if seed not in DEFAULT)
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


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", sorted(OTHER_DRAWN))
def test_other_drawn_layouts(world: int) -> None:
    run_ranks(run_many, world, OTHER_DRAWN[world], timeout=SECONDS * len(OTHER_DRAWN[world]))


@pytest.mark.sweep
@pytest.mark.timeout(36000)
def test_many_more_layouts() -> None:
    """Every failing layout is reported, not only the first."""
    one = os.environ.get("SHARDWRIGHT_FUZZ_SEED")
    seeds = [int(one)] if one else range(1000, 1000 + int(os.environ.get("SHARDWRIGHT_FUZZ", "500")))
    failures = []
    for world, layouts in sorted(by_world(seeds).items()):
        waiting = list(layouts)
        while waiting:
            some, waiting = waiting[:10], waiting[10:]
            try:
                run_ranks(run_many, world, some, timeout=SECONDS * len(some))
            except RankError:
                for layout in some:  # one by one, to name them all
                    try:
                        run_ranks(run_many, world, [layout], timeout=SECONDS_ALONE)
                    except RankError as error:
                        failures.append(f"{error}")
                        print(f"FAILED seed {layout.seed}: {layout}\n{error}", flush=True)
    assert not failures, f"{len(failures)} of {len(seeds)} layouts failed"
