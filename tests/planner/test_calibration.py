"""`shardwright calibrate`, its file, and plans that follow from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.cli.main import main
from shardwright.cluster.launch import launch
from shardwright.planner import measure, measure_layouts, measure_steps
from shardwright.planner.answer import search_arguments
from shardwright.planner.calibration import FORMAT, Calibration, Point, Rates, calibrated, read, write
from shardwright.planner.candidate import Layout, Task
from shardwright.planner.devices import device_of
from shardwright.planner.estimate import Estimator
from shardwright.planner.machines import GIB
from shardwright.planner.measure_layouts import layouts
from shardwright.planner.measure_links import links
from shardwright.planner.operators import Operator
from shardwright.planner.profile import Part, Parts, Profile
from shardwright.planner.rates import rates
from shardwright.testing import run_ranks

TINY = measure.Size((8, 16), (4, 8), ((2, 8, 8),), (8, 10), (8, 10), 0.002)


def made(kind: str = "cpu", **changes: Any) -> Calibration:
    """Products at 10 GFLOP/s, attention at 5, 1 GB/s in memory, 1 ms for a collective and 0.5 GB/s."""
    cpu = {"type": "cpu", "name": "Some Processor, 2 cores", "memory": 16 * GIB, "cores": 2, "count": 4}
    cuda = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory": 79 * GIB, "cores": 0, "count": 1}
    sizes = [2**power for power in range(10, 31, 4)]
    dtypes = ("float32", "bfloat16")
    found = Calibration(
        device=cpu if kind == "cpu" else cuda,
        made="2026-01-02 03:04:05 UTC",
        versions={"torch": "2.13.0", "shardwright": "9.9"},
        clock="processor time of one thread",
        host={"call": 1e-6, "forward": 1e-5, "backward": 2e-5, "around": 2e-3, "step": 3e-3},
        products={dtype: [Point(1, size, size // 8, size / 10e9) for size in sizes] for dtype in dtypes},
        attention={dtype: [Point(1, size, size // 8, size / 5e9) for size in sizes] for dtype in dtypes},
        moving=[Point(1, 0, size, size / 1e9) for size in sizes],
        sums=(),
        optimizer=[Point(1, 0, size, size / 1e8) for size in sizes],
        collectives={"all_reduce": [Point(2, 0, size, 1e-3 + size / 5e8) for size in sizes]},
        messages=[Point(2, 0, size, 1e-4 + size / 1e9) for size in sizes],
    )
    return replace(found, **changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write(made(), path)
    assert asdict(read(path)) == json.loads(json.dumps(asdict(made())), object_hook=None) | {
        name: _tuples(asdict(made())[name]) for name in ("products", "attention", "collectives", *_ROWS)
    }


_ROWS = ("moving", "sums", "optimizer", "messages")


def _tuples(found: Any) -> Any:
    return {key: tuple(rows) for key, rows in found.items()} if isinstance(found, dict) else tuple(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "cannot be read (No such file or directory); make it again with `shardwright calibrate -o FILE`"),
        ("{", "is no JSON"),
        ("[]", "has no `format`"),
        ({"format": FORMAT + 1}, f"has format {FORMAT + 1}, this version reads {FORMAT}"),
        ({"moving": [[1, 0, 4, -1.0]]}, "is damaged ([1, 0, 4, -1.0, 0.0] is no measurement)"),
        ({"moving": [[1, 0, 4, math.nan]]}, "is no measurement"),
        ({"moving": [[1, 0, -4, 1e-3]]}, "is no measurement"),
        ({"moving": [[1, 0, 10**400, 1e-3]]}, "is no measurement"),
        ({"moving": [[1, 0, 4, True]]}, "is no measurement"),
        ({"whole": {"1": [1.0, True, 1.0]}}, "whole.1 is [1.0, True, 1.0]"),
        ({"moving": [[1, 0, 4, 1e300]]}, "is no measurement"),
        ({"messages": [[2, 0, 4, 1e-3, 1e300]]}, "is no measurement"),
        ({"moving": [[1, 0, 1e300, 1e-3]]}, "is no measurement"),
        ({"host": {**made().host, "call": 1e300}}, "host.call is 1e+300"),
        ({"whole": {"1": [1.0, 1e300, 1.0]}}, "whole.1 is [1.0, 1e+300, 1.0]"),
        ({"device": {**made().device, "cores": 1.5}}, "device.cores is 1.5"),
        ({"device": {**made().device, "count": 0}}, "device.count is 0"),
        (
            {"device": {name: value for name, value in made().device.items() if name != "count"}},
            "it lacks 'device.count'",
        ),
        ({"collectives": {"allreduce": [[2, 0, 8, 1e-3]]}}, "collectives.allreduce is none of all_reduce, all_gather"),
        ({"whole": {"1": [0.0, 1.0, 1.0]}}, "whole.1 is [0.0, 1.0, 1.0]"),
        ({"messages": [[0, 0, 8, 1e-3]]}, "is no measurement"),
        ({"collectives": {"all_reduce": [[2, 8, 0, 1e-3]]}}, "something that is moved or sent has no bytes"),
        ("[" * 100000, "is no JSON"),
        ({"messages": [[2, 0, 0, 1e-3]]}, "is no measurement"),
        ({"collectives": {"all_reduce": []}}, "a table is empty"),
        ({"products": {"float32": [[1, 0, 8, 1e-3]]}}, "a product has no operations"),
        ({"made": None}, "is damaged (made is no text"),
        ({"device": {"type": "cpu", "name": "Some", "memory": "16", "cores": 2, "count": 4}}, "device.memory is '16'"),
        ({"device": {"type": "cpu", "name": "Some", "memory": 16, "cores": 0, "count": 4}}, "device.cores is 0"),
        ({"moving": [[1, 0]]}, "is damaged ("),
        ({"products": []}, "is damaged ("),
        ({"host": {"call": 1e-6}}, "it lacks 'forward'"),
        ({"device": {"type": "tpu", "name": "?", "memory": 1, "cores": 0, "count": 1}}, "device.type is 'tpu'"),
        ({"device": {"type": "cpu"}}, "it lacks 'device.name'"),
        ({"optimizer": []}, "a table is empty"),
        ({"colour": "red"}, "is damaged ("),
    ],
)
def test_bad_files_are_told_in_a_sentence(
    change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    if isinstance(change, str):
        path.write_text(change)
    elif change is not None:
        path.write_text(json.dumps(asdict(made()) | change))
    with pytest.raises(ValueError, match="make it again with") as raised:
        read(path)
    assert said in str(raised.value)
    asked = ["plan", "--search", "--model", "llama-tiny", "--world-size", "4", "--calibration", str(path)]
    assert main(asked) == 1
    assert capsys.readouterr().out == f"No layout was found: {raised.value}\n"


def test_calls_take_what_those_like_them_took() -> None:
    found = Rates([Point(1, 2**10, 2**10, 1e-6), Point(1, 2**20, 2**16, 1e-4), Point(1, 2**30, 2**24, 0.05)])
    for flops, moved, seconds in ((2**10, 2**10, 1e-6), (2**20, 2**16, 1e-4), (2**30, 2**24, 0.05)):
        assert found.seconds(flops, moved) == pytest.approx(seconds, rel=0.02)
    assert 1e-4 < found.seconds(2**25, 2**20) < 0.05
    assert found.seconds(2**40, 2**34) == pytest.approx(2**10 * 0.05, rel=0.3)  # and far ones what the nearest
    assert found.seconds(0, 0) == 0.0


def test_a_machine_is_what_was_measured() -> None:
    found = calibrated(made(), "fp32", world_size=4)
    calls = {
        Operator("product", 2**20, 2**17): 2.0,
        Operator("other", 0, 2**20): 1.0,
        Operator("attention", 2**22, 9): 1,
    }
    wanted = 2 * 2**20 / 10e9 + 2**20 / 1e9 + 2**22 / 5e9
    assert found.computing(calls) == pytest.approx(wanted)
    assert found.starting(calls) == pytest.approx(4e-5)
    assert found.starting(calls, backward=True) == pytest.approx(8e-5)
    assert (found.cores, found.memory, found.per_node, found.device) == (2, 4 * GIB, 4, "cpu")
    assert found.sent(2**22, 2, 2) == pytest.approx(1e-3 + 2**22 / 5e8, rel=0.01)
    assert found.sent(2**22, 1, 1) == 0.0
    assert found.message(2**22, 4) == pytest.approx(1e-4 + 2**22 / 1e9, rel=0.01)
    assert "Some Processor, 2 cores, calibrated 2026-01-02 with torch 2.13.0" in found.source
    assert calibrated(made(), "fp32", 4, memory=1.5).memory == 1.5 * GIB


def test_what_was_not_measured_is_published_and_said() -> None:
    alone = made("cuda", collectives={}, messages=())
    found = calibrated(alone, "bf16", world_size=16)
    assert (found.cores, found.memory, found.inside, found.between) == (0, 79 * GIB, 450e9, 50e9)
    assert found.source.endswith("; links as published, collectives and messages by formulas: not measured")
    assert found.sent(1e9, 8, 8) == pytest.approx(1e9 / (450e9 * found.sending) + found.latency)
    calls = {Operator("product", 2**30, 2**20): 1.0}
    assert found.starting(calls) == 0.0, "a device that computes for longer than its host starts is not waited for"
    assert found.starting({Operator("product", 2**10, 2**10): 1.0}) == pytest.approx(1e-5, rel=0.1)
    given = calibrated(made(), "fp32", 4, inside=10.0)
    assert given.inside == 10e9
    assert given.message(1e9, 4) == pytest.approx(given.latency + 1e9 / (given.inside * given.sending))


def test_other_devices_and_precisions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write(made(), path)
    with pytest.raises(ValueError, match="gpu='h100' with a calibration of another device, Some Processor, 2 cores"):
        device_of(path, "h100", "fp32", 4)
    with pytest.raises(ValueError, match="precision='fp16' needs products and attention in float16, and those in fl"):
        device_of(path, None, "fp16", 4)
    with pytest.raises(ValueError, match="is of another device, Some Processor, 2 cores, and this process has NVIDIA"):
        device_of(path, None, "fp32", 4, own=("NVIDIA H100 80GB HBM3", 79.0))
    write(made("cuda"), path)
    assert device_of(path, None, "bf16", 8, own=("NVIDIA H100 80GB HBM3", 79.0)).name == "h100"
    with pytest.raises(ValueError, match="gpu='a100-80' with a calibration of another device, NVIDIA H100"):
        device_of(path, "a100-80", "bf16", 8)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


PART = Part(GIB / 64, GIB / 512, GIB / 256, 1e6, {Operator("product", 2**26, 2**20): 1.0}, {})
PROFILE = Profile({1: Parts((PART,), Part(0.0, 0.0, 0.0, 1e6, {}, {}))}, (0,) * 8, 1, False)


def test_ranks_share_the_cores() -> None:
    machine = calibrated(made(), "fp32", world_size=8)
    own = rates(PROFILE, None, machine, 1)
    task = Task(machine, 0.0, False, 2, 1e9, 8)
    layout = Layout(1, 1, 1, 8, 0, "1f1b", 1, 1, 4)
    parts = Estimator(task, own, layout).estimate(simulated=True).parts
    work = 8 * (parts["computing"] + parts["optimizer"])
    assert parts["host"] == 3e-3
    others = sum(parts.values()) - parts["sharing cores"]
    assert sum(parts.values()) == pytest.approx(max((work + 8 * 3e-3) / 2, others))
    added = 3 * 9 * 4e6 / 1e9  # sums of gradients, which are read, too
    assert parts["computing"] == pytest.approx(4 * 8 * (2**26 / 10e9 + 1e-5) + 4 * 2e-3 + added, rel=1e-3)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ((1.5 * 0.4 + 0.5 * 0.1 + 0.02, 1.5 * 0.1 + 0.5 * 0.2 + 0.02), [1.5, 0.5]),
        ((2 * 0.5 + 0.02, 2 * 0.3 + 0.02), [2.0, 2.0]),
        ((0.3, 0.9), [50.8 / 78] * 2),  # operators would take less than nothing; of each step its share counts
        ((0.01, 0.01), [0.25, 0.25]),
    ],
)
def test_whole_steps_tell_operators_and_host_apart(
    taken: tuple[float, float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models, one of which has 0.4 s of operators and 0.1 of the host, and the other 0.1 and 0.2; by the clock
    they take half as long again as is told.
    """
    monkeypatch.setattr(measure_steps, "REFERENCES", measure_steps.REFERENCES[:2])
    own = dict(zip(measure_steps.REFERENCES, ((0.4, 0.1), (0.1, 0.2)), strict=True))

    class Step:
        def __init__(self, model: Any, world: int, reference: Any) -> None:
            self.times = own[reference]

        def seconds(self, found: Calibration) -> tuple[float, float]:
            operators, host, _ = found.whole["2"]
            told = operators * self.times[0] + host * self.times[1] + 0.02
            return told, 2 * told

    monkeypatch.setattr(measure_steps, "_Step", Step)
    clock = [3 * (expected[0] * times[0] + expected[1] * times[1] + 0.02) for times in own.values()]
    measured = measure_steps.Steps(taken, clock)
    found = measure_steps.shares(lambda *_: None, made(), {2: measured})  # type: ignore[arg-type,return-value]
    assert found["2"] == pytest.approx([*expected, 1.5])


def test_times_of_whole_steps_count_for_operators_and_host() -> None:
    plain = made()
    known = replace(plain, whole={"1": (3.0, 5.0, 1.0), "8": (2.0, 0.5, 1.25)})
    call = {Operator("product", 2**26, 2**20): 1.0}
    one, other = (calibrated(each, "fp32", world_size=6) for each in (plain, known))
    assert other.computing(call) == pytest.approx(2 * one.computing(call))
    assert other.starting(call) == pytest.approx(one.starting(call) / 2)
    assert (other.step, other.around) == (one.step / 2, one.around / 2)
    task = Task(other, 0.0, False, 2, 1e9, 6)
    found = Estimator(task, rates(PROFILE, None, other, 1), Layout(1, 1, 1, 6, 1, "1f1b", 1, 1, 2)).estimate(True)
    assert found.seconds == pytest.approx(5 * found.parts["waiting for others"])


def test_gradients_are_added_where_they_are_kept() -> None:
    """At 0.1 GB/s of sums, which are in no cache: in place of what was counted for copying those of one microbatch."""
    plain = made()
    known = replace(plain, sums=[Point(1, 0, size, size / 1e8) for size in (2**10, 2**20)])
    part = replace(PART, parameters=1e6, tensors=4.0)
    profile = replace(PROFILE, parts={1: Parts((part,), PROFILE.parts[1].rest)})

    def seconds(calibration: Calibration, **changes: Any) -> float:
        machine = calibrated(calibration, "fp32", world_size=2)
        layout = replace(Layout(1, 1, 1, 1, 0, "1f1b", 1, 1, 2), **changes)
        found = Estimator(Task(machine, 0.0, False, 2, 1e9, 2), rates(profile, None, machine, 1), layout)
        return found.estimate(simulated=True).parts["computing"]

    copied = 8e6 / 1e9
    for changes in ({}, {"pp": 2}):
        read = 2e6 / 1e9 if not changes else 4e6 / 1e9  # what is counted without a table
        ranks = changes.get("pp", 1)
        more = seconds(known, **changes) - seconds(plain, **changes)
        assert more == pytest.approx(2 * 8 / ranks * (4e6 / 1e8 - copied - read), rel=1e-3), changes


def test_messages_keep_processors_busy() -> None:
    """Of four microbatches, two messages each: as many are sent as received."""
    plain = made()
    busy = [Point(2, 0, size, 1e-4 + size / 1e9, 1e-5 + size / 1e8) for size in (1, 2**20)]
    known = replace(plain, messages=busy)

    def processor(calibration: Calibration, **changes: Any) -> float:
        machine = calibrated(calibration, "fp32", world_size=2)
        layout = replace(Layout(1, 2, 1, 1, 0, "1f1b", 1, 1, 4), **changes)
        task = Task(machine, 2**20, False, 2, 1e9, 2)
        return Estimator(task, rates(PROFILE, None, machine, 1), layout).estimate(simulated=True).processor

    each = (2**20 - 1) / 1e8
    assert processor(known) - processor(plain) == pytest.approx(4 * 2 * each, rel=1e-3)
    more = processor(known, style="interleaved", chunks=2) - processor(plain, style="interleaved", chunks=2)
    assert more == pytest.approx(3 * 4 * 2 * each, rel=1e-3)  # three boundaries of stages in place of one
    more = processor(known, style="zbv", chunks=2) - processor(plain, style="zbv", chunks=2)
    assert more == pytest.approx(2 * 4 * 2 * each, rel=1e-3)  # one of which is within a rank


def test_ranks_cost_what_being_one_of_several_costs() -> None:
    """Hooks and replicas of ZeRO, actions of a pipeline, collectives: in the processor's time, and in that of steps."""
    costs = {"collective": 1e-3, "hooks": 2e-4, "replicas": 3e-3, "gathering hooks": 5e-4, "gathering replicas": 7e-3}
    again = {"again": 4e-3, "again in part": 5e-3}
    plain = made(collectives={"all_reduce": [Point(2, 0, size, 1e-3, 4e-4) for size in (2**10, 2**20)]})
    known = replace(plain, host={**plain.host, **costs, "action": 1e-2, "waiting": 3e-3, **again})
    part = replace(PART, tensors=9.0, forward={**PART.forward, Operator("allgather_base", 0, 2**12): 2.0})
    profile = replace(PROFILE, parts={1: Parts((part,), PROFILE.parts[1].rest)}, tensor_ranks=2)

    def of(calibration: Calibration, layout: Layout) -> Any:
        machine = calibrated(calibration, "fp32", world_size=2)
        task = Task(machine, 0.0, False, 2, 1e9, 2)
        return Estimator(task, rates(profile, None, machine, layout.tp), layout).estimate(simulated=True)

    def added(**changes: Any) -> tuple[float, float]:
        """Seconds of the host, and of the processor, that `known` has more."""
        layout = replace(Layout(1, 1, 1, 1, 0, "1f1b", 1, 1, 4), **changes)
        first, second = of(plain, layout), of(known, layout)
        return second.parts["host"] - first.parts["host"], second.processor - first.processor

    assert added() == (0.0, pytest.approx(0.0, abs=1e-12))
    for stage, times, hook, replicas in ((1, 1, 2e-4, 3e-3), (2, 4, 2e-4, 3e-3), (3, 4, 5e-4, 7e-3)):
        wanted = replicas + times * 8 * 9 * hook
        assert added(dp=2, zero=stage) == pytest.approx((wanted, wanted))
    assert added(pp=2)[1] == pytest.approx(4 * 2 * 1e-2)
    assert added(pp=2, style="zb")[1] - added(pp=2)[1] == pytest.approx(4 * 4 * 3e-3)  # four layers of a rank
    assert added(whole=1.0)[1] == pytest.approx(4 * 8 * 4e-3)
    assert added(selective=0.5)[1] == pytest.approx(4 * 4 * 5e-3)
    # two collectives of each layer and microbatch, which the processor was busy with for 0.4 ms before
    assert added(tp=2)[1] == pytest.approx(4 * 8 * 2 * (1e-3 - 4e-4))


def test_searches_go_by_the_file_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    write(made(), path)
    monkeypatch.setattr("shardwright.planner.search.profile", lambda source, ranks: PROFILE)
    asked = ["plan", "--search", "--model", "llama-tiny", "--world-size", "4", "--seq-len", "32"]
    asked += ["--global-batch-size", "16", "--precision", "fp32", "--calibration", str(path)]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "4 x Some Processor, 2 cores (4 GiB" in text
    assert "times follow from Some Processor, 2 cores, calibrated 2026-01-02 with torch 2.13.0" in text
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["calibration"]["name"] == "Some Processor, 2 cores"
    here: dict[str, Any] = {"world_size": 4, "global_batch_size": 16, "sequence_length": 32, "precision": "fp32"}
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2
    )
    arguments = search_arguments(
        lambda: LlamaForCausalLM(config),
        _adamw,
        calibration=path,
        **here,
    )
    assert arguments["microbatch_size"] == found["layouts"][0]["layout"]["samples"]


def test_operators_and_the_host_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = measure.operators(torch.device("cpu"), TINY, said.append)
    assert said == [
        *(f"{what} in {dtype}" for what in ("products", "attention") for dtype in ("float32", "bfloat16")),
        "elementwise operators, norms, copies",
        "optimizer step",
    ]
    assert len(found["products"]["float32"]) == 2 * 2 * 2 * 3
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2
    )

    def model(layers: int) -> LlamaForCausalLM:
        config.num_hidden_layers = layers
        return LlamaForCausalLM(config)

    ids = torch.arange(8)[None]

    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {name: ids.repeat(samples, 1) for name in ("input_ids", "labels")}

    monkeypatch.setenv("LOCAL_RANK", "0")
    launch(0, 1, None, None, backend="fake")
    try:
        host = measure.host(model, batch, torch.device("cpu"), TINY)
    finally:
        dist.destroy_process_group()
    assert set(host) == {"forward", "backward", "layer", "around", "step", "again", "again in part"}
    assert 1e-7 < host["forward"] < 1e-3
    assert 1e-7 < host["backward"] < 1e-3
    assert 1e-5 < host["around"] < 1


def _layouts(rank: int, world_size: int) -> dict[str, float]:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2
    )

    def model(layers: int) -> LlamaForCausalLM:
        config.num_hidden_layers = layers
        return LlamaForCausalLM(config)

    def batch(samples: int, begin: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(begin, begin + 8).repeat(samples, 1)
        return {"input_ids": ids, "labels": ids}

    return layouts(model, batch, TINY, {"layer": 0.0, "around": 0.0, "step": 0.0})


def test_layouts_of_two_ranks_are_measured() -> None:
    one, other = run_ranks(_layouts, 2, debug="OFF")
    assert one == other
    kinds = {f"{place}{kind}" for place in ("", "gathering ") for kind in ("hooks", "replicas")}
    assert set(one) == {"collective", "answered", "action", "waiting"} | kinds
    assert all(0 <= seconds < 1 for seconds in one.values()), one  # small differences, of which a busy machine leaves 0
    assert one["replicas"] > 1e-7  # the whole step: nothing was said of one alone


def test_what_ranks_cost_is_what_steps_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes 1 ms, twice as long as alone, and so does what is around layers, for a microbatch 2 ms, and for a
    step, 1 ms. What the machine does beside it is in all steps of a round.
    """
    added = {"tensor": 4e-3, "replicas": 2 * 1e-4, "gathering": 2 * 5e-4}  # for a layer, of two tensors
    busy = np.array([0.0, 0.2, 0.0, 0.5, 0.0])

    class Rounds:
        def __init__(self, steps: Any, rounds: int) -> None:
            self.processor = {name: self._of(name) + busy for name in steps}
            self.clock = {name: times + 3e-3 * int(name[-1]) for name, times in self.processor.items()}

        def _of(self, name: str) -> float:
            layout, layers = name.split()[0][:-1], int(name.split()[0][-1])
            if " " not in name:
                return layers * (1e-3 + added[layout]) + 3e-3 + {"replicas": 7e-3, "gathering": 9e-3}.get(layout, 0.0)
            waiting = 6e-4 if layout == "zb" else 0.0
            return 5e-2 + int(name.split()[1]) * (layers / 2 * (1e-3 + waiting) + 2e-3 / 2 + 2 * 8e-4)

    monkeypatch.setattr(measure_layouts, "Turns", Rounds)
    monkeypatch.setattr(measure_layouts, "step_of", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    alone = {"layer": 5e-4, "around": 1e-3, "step": 5e-4}
    found = layouts(lambda n: torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(n))), _nothing, TINY, alone)
    assert found == {
        "collective": pytest.approx(1e-3),
        "answered": pytest.approx((4e-3 + 3e-3) / 4),
        "hooks": pytest.approx(1e-4),
        "replicas": pytest.approx(7e-3),
        "gathering hooks": pytest.approx(5e-4),
        "gathering replicas": pytest.approx(9e-3),
        "action": pytest.approx(8e-4),
        "waiting": pytest.approx(6e-4),
    }


def _nothing(samples: int, begin: int) -> dict[str, Any]:
    return {}


def _links(rank: int, world_size: int) -> Any:
    return links(torch.device("cpu"), (10, 12), lambda what: None)


def test_links_are_measured() -> None:
    collectives, messages = run_ranks(_links, 2, timeout=60)[0]
    assert set(collectives) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert [point.moved for point in collectives["all_reduce"]] == [2**10, 2**12]  # twice the half of it
    assert [point.moved for point in collectives["all_gather"]] == [2**9, 2**11]
    assert all(point.seconds > 0 and point.busy > 0 for point in (*messages, *collectives["all_to_all"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "/nowhere/a.json"], "--output /nowhere/a.json cannot be written (No such file or directory)"),
        (["--world-size", "0"], "--world-size 0 must be at least 1\n"),
        (["--device", "cuda"], "torch sees no CUDA device here"),
    ],
)
def test_nonsense_is_told(
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["calibrate", *options]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep
def test_a_machine_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torchrun, as a user does."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "calibration.json"
    assert main(["calibrate", "--quick", "--device", "cpu", "--world-size", "2", "-o", str(path)]) == 0
    found = read(path)
    assert {point.ranks for point in found.collectives["all_reduce"]} == {2}
    assert calibrated(found, "bf16", 2).computing({Operator("product", 2**24, 2**16): 1.0}) > 0
