"""Traces of a run: every stage, microbatch, bucket, gather, message and part of the optimizer's step has a name in
them, and those of all ranks are one.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.booster import traces
from shardwright.booster.traces import MERGED, merge
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.utils.labels import label, labelled

NAME = "llama-causal-lm"
OPTIMIZER = {"optimizer: gradients", "optimizer: clip", "optimizer: update", "optimizer: weights to their readers"}
LAYOUTS: dict[str, tuple[dict[str, Any], list[set[str]]]] = {
    "pipeline": (
        {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1},
        [
            {
                *(f"stage 0, microbatch {number}: {what}" for number in (0, 1) for what in ("forward", "backward")),
                "stage 0, microbatch 1: send activations",
                "stage 0, microbatch 1: post receive of gradients",
                *("stage 0: reduce gradients", "reduce bucket 0"),
                *("send to pipeline rank 1", "receive from pipeline rank 1"),
            },
            {
                *(f"stage 1, microbatch {number}: {what}" for number in (0, 1) for what in ("forward", "backward")),
                "stage 1, microbatch 0: post receive of activations",
                "stage 1, microbatch 0: send gradients",
            },
        ],
    ),
    "whole": (
        {"zero_stage": 1, "num_microbatches": 2, "overlap_allgather": True},
        [{"microbatch 1: forward", "microbatch 0: backward", "reduce bucket 0", "gather bucket 0"}] * 2,
    ),
    "units": ({"zero_stage": 3}, [{"forward", "backward", "reduce bucket 0", "gather bucket 1, from "}] * 2),
}


def _train(rank: int, world: int, directory: str) -> None:
    for name, (options, _) in LAYOUTS.items():
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", max_norm=0.5, **options))
        bare = zoo.build(NAME, dtype=torch.float32)
        model: Any
        optimizer: Any
        model, optimizer, *_ = booster.boost(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
        batch = zoo.inputs(NAME, batch_size=4, seq_len=6, seed=rank if "pp_size" not in options else 0)
        with booster.profile(Path(directory, name), steps=1, wait=0, warmup=1) as profile:
            for _ in range(3):
                if "num_microbatches" in options:
                    booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
                else:
                    booster.backward(model(**batch).loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                profile.step()
    gc.collect()  # what is still under way ends here at the latest, and must not write into a trace that is over


def _names(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_everything_has_a_name_in_the_traces(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), timeout=100)
    for layout, (_, expected) in LAYOUTS.items():
        whole = json.loads((tmp_path / layout / MERGED).read_text())["traceEvents"]
        processes = {event["pid"]: event["args"]["name"] for event in whole if event["name"] == "process_name"}
        assert all(re.match(r"rank [01]", name) for name in processes.values())
        for rank, wanted in enumerate(expected):
            own = json.loads((tmp_path / layout / f"rank{rank}.json").read_text())["traceEvents"]
            names = _names(own)
            for name in wanted | OPTIMIZER:
                assert any(each.startswith(name) for each in names), f"{layout}, rank {rank}: {name}"
            merged = [event for event in whole if processes[event["pid"]].startswith(f"rank {rank}")]
            assert _names(merged) == names
            assert sum("dur" in event for event in merged) == sum("dur" in event for event in own)
            steps = [name for name in names if name.startswith("ProfilerStep")]
            assert len(steps) == 1, "warm-up is thrown away, and nothing comes behind the last step"


def test_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """What a rank whose clock is ahead did at the same time stands at the same time, whatever its trace counts from."""
    paths = []
    for rank, (base, ahead) in enumerate(((5_000_000, 0.0), (9_000_000, 0.25))):
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": 1e6 - base / 1e3 + 1e6 * ahead, "dur": 10.0},
            {"ph": "s", "name": "flow", "pid": 0, "tid": 1, "ts": 1e6 - base / 1e3 + 1e6 * ahead, "id": 3},
        ]
        own = {"rank": rank, "name": f"rank {rank} (pp={rank})", "ahead": ahead}
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base, "shardwright": own}))
    merge(paths, tmp_path / MERGED)
    found = json.loads((tmp_path / MERGED).read_text())["traceEvents"]
    assert [event["ts"] for event in found if event["name"] == "step"] == pytest.approx([0.0, 0.0])
    assert len({event["pid"] for event in found}) == 4, "processes of two ranks with equal numbers are not one"
    assert len({event["id"] for event in found if event["ph"] == "s"}) == 2, "nor are their arrows"
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {"rank 0 (pp=0): python", "rank 1 (pp=1): python"} <= names


def test_traces_are_merged_event_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size, and with far less memory than the traces have."""
    events = [
        {"ph": "X", "name": f'a "b" \u00fc {at}', "pid": at % 3, "ts": 1.5 * at + 3, "dur": at} for at in range(60)
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events}) + "\n \n")
    traces.note_rank(path, 0, "rank 0", 0.0)
    assert json.loads(path.read_text())["shardwright"] == {"rank": 0, "name": "rank 0", "ahead": 0.0}
    for piece in (1, 2, 7, 1000, 1 << 20):
        monkeypatch.setattr(traces, "_PIECE", piece)
        assert [value for key, value in traces.entries(path) if key is None] == events
        assert {key for key, _ in traces.entries(path)} == {None, "schemaVersion", "deviceProperties", "shardwright"}
        merge([path], tmp_path / MERGED)
        found = json.loads((tmp_path / MERGED).read_text())["traceEvents"]
        assert [event["name"] for event in found if event["ph"] == "X"] == [event["name"] for event in events]
        assert [event["ts"] for event in found if event["ph"] == "X"] == [1.5 * at for at in range(60)]
    with path.open("w") as long:
        long.write('{"traceEvents": [')
        long.write(",".join(json.dumps({"ph": "X", "name": "n" * 400, "pid": 1, "ts": at}) for at in range(40_000)))
        long.write("]}")
    traces.note_rank(path, 0, "rank 0", 0.0)
    tracemalloc.start()
    merge([path, path], tmp_path / MERGED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6 < path.stat().st_size
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="no whole trace"):
        traces.note_rank(path, 0, "rank 0", 0.0)


def test_traces_are_merged_beside_the_training(tmp_path: Path) -> None:
    booster = Booster(plugin=None)
    weight = torch.ones(3, requires_grad=True)
    with booster.profile(tmp_path, steps=1, wait=0, warmup=1) as profile:
        for _ in range(2):
            weight.sum().backward()
            profile.step()
        merging: Any = profile._merging
        assert merging.pid != os.getpid()
        weight.sum().backward()
        profile.step()
    assert merging.returncode == 0
    assert len(json.loads((tmp_path / MERGED).read_text())["traceEvents"]) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [MERGED, "rank0.json"]


def test_a_profile_that_records_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    booster, said = Booster(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    with booster.profile(tmp_path, steps=2) as profile:
        profile.step()
    logging.getLogger("shardwright").removeHandler(handler)
    assert "take at least 3 steps" in " ".join(said)
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(ValueError, match="outside of"):
        profile.step()
    with pytest.raises(ValueError, match="steps=0"):
        booster.profile(tmp_path, steps=0)
    with pytest.raises(ValueError, match="wait=-1"):
        booster.profile(tmp_path, wait=-1)


def test_labels_cost_nothing_and_show_nothing_where_nobody_looks() -> None:
    asked: list[Any] = []

    @labelled(lambda number: asked.append(number) or f"number {number}")
    def twice(number: int) -> int:
        return 2 * number

    assert label("a") is label("b")
    assert twice(2) == 4
    assert not asked
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, label("all"):
        assert twice(3) == 6
    assert {event.name for event in profiler.events()} >= {"all", "number 3"}


def test_a_profile_is_entered_again(tmp_path: Path) -> None:
    """It had deleted its traces then, and recorded none."""
    profile = Booster(plugin=None).profile(tmp_path, steps=1, wait=0, warmup=0)
    for number in (3, 5):
        with profile:
            for _ in range(2):
                with label(f"turn {number}"):
                    torch.ones(number)
                profile.step()
        names = _names(json.loads((tmp_path / MERGED).read_text())["traceEvents"])
        assert {name for name in names if name.startswith("turn")} == {f"turn {number}"}


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    """torch crashes where the outer one is written."""
    booster = Booster(plugin=None)
    inner = booster.profile(tmp_path / "inner")
    with booster.profile(tmp_path / "outer", steps=1, wait=0, warmup=0) as outer:
        for profile in (inner, outer):
            with pytest.raises(ValueError, match=r"booster\.profile inside of another: .* leave that"), profile:
                pass
        torch.ones(2)
        outer.step()
    assert (tmp_path / "outer" / MERGED).is_file()
    assert not (tmp_path / "inner").exists()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(ValueError, match="inside of a profiler of torch"),
        inner,
    ):
        pass
    with inner:
        inner.step()
