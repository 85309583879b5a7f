"""Random sequences of calls that a training script may make, against one process doing the same with plain torch.

pytest tests/plugins/test_call_sequences.py                                    a few dozen per number of ranks
SHARDWRIGHT_SEQUENCES=2000 pytest tests/plugins/test_call_sequences.py -m sweep    that many per number of ranks

Sequences are drawn here and run many at a time, since rank processes take long to start. A failing one is made shorter
by leaving calls out before it is reported.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from call_sequences import OPTIMIZERS, Sequence, without
from call_sequences_layouts import run_sequences
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwright.testing import RankError, run_ranks

CALLS = {
    "backward": 5,
    "backward_no_sync": 3,
    "pipeline": 3,
    "zero_grad": 4,
    "step": 5,
    "norm": 1,
    "clip_norm": 1,
    "clip_value": 1,
    "torch_clip": 1,
    "read": 1,
    "inspect": 1,
    "load": 1,
    "edit": 1,
    "assign": 1,
    "clamp": 1,
    "zero_in_place": 1,
    "average": 1,
    "save": 1,
    "restore": 1,
    "lr": 1,
    "evaluate": 1,
    "states": 1,
}
OF_ADAM = {"betas": 2, "decay": 2, "maximize": 1, "tensor_rate": 2, "hook": 2, "states": 2}
NAMES = st.sampled_from([name for name, weight in CALLS.items() for _ in range(weight)])


@st.composite
def sequences(draw: st.DrawFn, world: int) -> Sequence:
    stage = draw(st.integers(0, 3))
    plugin = "hybrid" if stage == 0 else draw(st.sampled_from(["hybrid", "zero"]))
    options = {}
    if stage in (1, 2):
        options["overlap_allgather"] = draw(st.booleans())
    if stage < 3:
        options["overlap_communication"] = draw(st.booleans())
    if stage > 0 and world == 4:
        options["zero_group_size"] = draw(st.sampled_from([None, 1, 2]))
    calls = draw(st.lists(st.tuples(NAMES, st.integers(0, 99)), min_size=4, max_size=16))
    optimizer, max_norm = draw(st.sampled_from(sorted(OPTIMIZERS))), draw(st.sampled_from([0.0, 0.0, 0.2]))
    return Sequence(stage, tuple(calls), plugin, optimizer, max_norm, options)


@st.composite
def sequences_in_one_pass(draw: st.DrawFn, world: int) -> Sequence:
    """In fp32, with Adam; rules change on the way, and torch takes a step now and then."""
    stage = draw(st.integers(0, 3))
    plugin = "hybrid" if stage == 0 else draw(st.sampled_from(["hybrid", "zero"]))
    options = {}
    if stage:
        options["cpu_offload"] = draw(st.booleans())
    if stage in (1, 2):
        options["overlap_allgather"] = draw(st.booleans())
    if stage > 0 and world == 4:
        options["zero_group_size"] = draw(st.sampled_from([None, 1, 2]))
    names = [name for name, weight in {**CALLS, **OF_ADAM}.items() for _ in range(weight)]
    calls = draw(st.lists(st.tuples(st.sampled_from(names), st.integers(0, 99)), min_size=6, max_size=20))
    optimizer, max_norm = draw(st.sampled_from(["adamw, single", "adam, single"])), draw(st.sampled_from([0.0, 0.2]))
    return Sequence(stage, tuple(calls), plugin, optimizer, max_norm, options, single=True)


@st.composite
def sequences_of_layouts(draw: st.DrawFn, world: int) -> Sequence:
    """Over tensor and pipeline parallelism, and in half precision."""
    stage = draw(st.integers(0, 3))
    half = draw(st.sampled_from(["", "", "bf16", "fp16"]))
    choices = [{}] if half and world < 4 else []
    if world > 1:
        choices += [{"tp_size": 2}, {"pp_size": 2}]
    if world == 4:
        choices += [{"tp_size": 2, "pp_size": 2}]
    sizes = dict(draw(st.sampled_from(choices or [{"tp_size": 1}])))
    if "pp_size" in sizes:
        sizes["pp_style"] = draw(st.sampled_from(["1f1b", "zb"])) if stage < 3 else "1f1b"
    plugin = "zero" if not sizes and stage and draw(st.booleans()) else "hybrid"
    names = st.sampled_from(
        [name for name, weight in {**CALLS, "save": 0, "restore": 0}.items() for _ in range(weight)]
    )
    calls = draw(st.lists(st.tuples(names, st.integers(0, 99)), min_size=4, max_size=12))
    optimizer, max_norm = (
        draw(st.sampled_from(["sgd"] if half else ["adamw", "sgd"])),
        draw(st.sampled_from([0.0, 0.0, 0.2])),
    )
    return Sequence(stage, tuple(calls), plugin, optimizer, max_norm, {}, sizes, half)


def check(world: int, drawn: list[Sequence]) -> None:
    try:
        run_ranks(run_sequences, world, drawn, timeout=30 + 3 * len(drawn))
    except RankError:
        raise AssertionError(report(world, drawn)) from None


def report(world: int, drawn: list[Sequence]) -> str:
    """The first sequence that fails by itself, with as few calls as can be found by leaving out one at a time."""
    for sequence in drawn:
        error = failure(world, sequence)
        if error is None:
            continue
        position = len(sequence.calls)
        while position:
            position -= 1
            shorter = without(sequence, position)
            still = failure(world, shorter)
            if still is not None:
                sequence, error = shorter, still
        return error
    return f"sequences that fail only one after another: {drawn}"


def failure(world: int, sequence: Sequence) -> str | None:
    try:
        run_ranks(run_sequences, world, [sequence], timeout=30)
    except RankError as error:
        return str(error)
    return None


def drawn(world: int, number: int, *, again: bool = True, of: Any = sequences) -> list[Sequence]:
    """`number` sequences from hypothesis, the same each time unless `again` is False."""
    found: list[Sequence] = []

    @settings(
        max_examples=number,
        derandomize=again,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(of(world))
    def draw(sequence: Sequence) -> None:
        found.append(sequence)

    draw()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "number"), [(1, 40), (2, 60), (4, 20)])
def test_calls_in_any_order_are_right_or_refused(world: int, number: int) -> None:
    check(world, drawn(world, number))


@pytest.mark.timeout(300)
def test_calls_under_model_axes_and_in_half_precision() -> None:
    check(2, drawn(2, 16, of=sequences_of_layouts))


@pytest.mark.timeout(300)
def test_calls_around_steps_in_one_pass() -> None:
    check(2, drawn(2, 40, of=sequences_in_one_pass))


@pytest.mark.sweep
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("of", [sequences, sequences_of_layouts, sequences_in_one_pass])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_many_more_sequences(world: int, of: Any) -> None:
    left = int(os.environ.get("SHARDWRIGHT_SEQUENCES", "500"))
    while left > 0:
        check(world, drawn(world, min(left, 50), again=False, of=of))
        left -= 50


HABITS = (
    *(
        ("backward", 3),
        ("step", 1),
        ("zero_in_place", 0),
        ("backward", 4),
        ("step", 1),
        ("zero_in_place", 0),
        ("backward", 8),
        ("step", 1),
    ),
    *(
        ("zero_grad", 0),
        ("backward", 8),
        ("groups_clip", 1),
        ("step", 1),
        ("zero_grad", 0),
        ("assign", 2),
        ("backward", 6),
        ("assign", 3),
    ),
    *(
        ("step", 1),
        ("assign", 4),
        ("save", 0),
        ("zero_grad", 0),
        ("backward", 7),
        ("step", 1),
        ("restore", 0),
        ("zero_grad", 0),
    ),
    *(("backward", 7), ("groups_clip", 2), ("count_steps", 0)),
)


@pytest.mark.parametrize("world", [1, 2])
def test_other_ways_to_clip_assign_and_clear(world: int) -> None:
    plans = [(0, "hybrid", "adamw"), (1, "zero", "sgd"), (2, "zero", "own step"), (1, "hybrid", "adamw")]
    run_ranks(
        run_sequences,
        world,
        [Sequence(stage, HABITS, plugin, optimizer) for stage, plugin, optimizer in plans],
        timeout=60,
    )
