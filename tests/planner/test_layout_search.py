"""The search for layouts: of costs that are given here, and from the command line."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.cli.main import main
from shardwright.cluster.launch import launch
from shardwright.planner.answer import config_of, plugin_arguments
from shardwright.planner.candidate import Layout, Task
from shardwright.planner.estimate import Estimate, Estimator
from shardwright.planner.machines import machine
from shardwright.planner.operators import Operator
from shardwright.planner.profile import Part, Parts, Profile
from shardwright.planner.rates import rates
from shardwright.planner.shorter import NotShorterError
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.config_form import read_config

GIB = 2**30
PRODUCT = {Operator("product", 10**12, 10**6): 1.0}
LAYER = Part(GIB, GIB / 8, GIB / 4, 1e8, PRODUCT, {Operator("product", 2 * 10**12, 10**6): 1.0})
REST = Part(0.0, 0.0, GIB, 2e8, {}, {})
PROFILE = Profile({1: Parts((LAYER,), REST)}, (0,) * 16, 1, False)
DEVICE = machine("a100-80")


def estimated(hidden: float = GIB / 32, **changes: Any) -> Estimate:
    layout = Layout(**{"tp": 1, "pp": 1, "sp": 1, "dp": 4, "zero": 1, "style": "1f1b", "chunks": 1, **changes})
    task = Task(DEVICE, hidden, True, 2, 48e12, layout.pp * layout.dp)
    return Estimator(task, rates(PROFILE, None, DEVICE, 1, layout.samples / layout.sp), layout).estimate(simulated=True)


def test_estimates_are_what_arithmetic_says() -> None:
    parameters, kept = 16 * 1e8 + 2e8, 16 * GIB
    alone = estimated(samples=1, count=8)
    static = (2 + 4) * parameters + (4 + 8) * parameters / 4
    assert alone.memory == pytest.approx(static + kept + GIB)
    computed = 8 * 16 * 3e12 / (312e12 * DEVICE.product)
    added = 7 * 4 * parameters / (DEVICE.bandwidth * DEVICE.moving)  # sums of gradients, which are read
    assert alone.parts["computing"] == pytest.approx(computed + added, rel=1e-3)
    for count in (8, 80):
        piped = estimated(0.0, pp=4, dp=1, zero=0, samples=1, count=count)
        each = (4 / count + 4 + 8) / (DEVICE.bandwidth * DEVICE.moving)  # zeros, sums, conversions to fp32
        stage = 4 * (3e12 / (312e12 * DEVICE.product) + each * 1e8)
        last = stage + each * 2e8  # the head's
        whole = 3 * stage + count * last  # (p - 1) of p - 1 + m wait, and the others for the last one
        waited = piped.parts["pipeline"] / (piped.seconds - piped.parts["optimizer"])
        assert waited == pytest.approx(1 - count * (3 * stage + last) / 4 / whole, rel=0.01)
    again = estimated(samples=1, count=8, whole=1.0)
    assert again.parts["computing"] == pytest.approx(4 / 3 * computed + added, rel=1e-3)
    assert again.memory < alone.memory - 14 * GIB


def test_shares_of_layers_are_rounded_down_as_the_plugin_does() -> None:
    def piped(pp: int, whole: float, selective: float = 0.0) -> Estimate:
        sizes = {"pp": pp, "dp": 1, "zero": 0, "samples": 1, "count": 32}
        return estimated(0.0, **sizes, whole=whole, selective=selective)

    for shares in ((0.5, 0.0), (0.0, 0.9)):
        alone, same = piped(16, 0.0), piped(16, *shares)
        assert (same.seconds, same.memory) == (alone.seconds, alone.memory), "of one layer none is recomputed"
    alone, one = piped(4, 0.0), piped(4, 0.45)
    added = one.parts["computing"] - alone.parts["computing"]
    assert added == pytest.approx(32 * 1e12 / (312e12 * DEVICE.product), rel=0.01), "one of four layers, not 1.8"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--gpu h300", "gpu='h300'"),
        ("--gpu-memory -3", "gpu_memory=-3.0 must be a finite number above 0"),
        ("--gpu-memory inf", "gpu_memory=inf must be a finite number above 0"),
        ("--gpu-memory 0.001", "nothing fits on 8 devices"),
        ("--gpu-memory 1e-9", " of the 1 B that it may take"),
        ("--precision int4", "precision='int4': the search knows bf16, fp16 and fp32"),
        ("--optimizer none", "give adamw, sgd or muon"),
        ("--global-batch-size 0", "global_batch_size=0 must be at least 1"),
        ("--world-size 17 --global-batch-size 12", "a global batch that is a multiple of 17 would"),
        ("--seq-len -4", "--seq-len -4 must be at least 1"),
        ("--gpus-per-node 0", "gpus_per_node=0 must be a finite number above 0"),
        ("--inside-bandwidth nan", "inside_bandwidth=nan must be a finite number above 0"),
        ("--gpu-memory 1e300", "gpu_memory=1e+300 must be a finite number above 0, from 1e-09 to 1e+09"),
        ("--inside-bandwidth 1e-300", "inside_bandwidth=1e-300 must be"),
        ("--gpu=", "gpu='' is not one of"),
        ("--seq-len 100000000000", "a replayed batch may take 4 GiB: fewer samples or fewer tokens would work"),
        ("--gpu v100", "a v100 has no units for it; it computes fp32, fp16"),
    ],
)
def test_nonsense_is_told(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.planner.search.profile", lambda source, ranks: PROFILE)
    assert main(["plan", "--search", "--model", "llama-tiny", "--world-size", "8", *arguments.split()]) == 1
    assert said in capsys.readouterr().out


def test_texts_are_as_long_as_the_model_has_positions_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.planner.search.profile", lambda source, ranks: PROFILE)
    command = ["plan", "--search", "--model", "gpt2", "--world-size", "8"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 1024
    assert main([*command, "--seq-len", "2048"]) == 1
    assert "sequence_length=2048, and GPT2LMHeadModel has learned positions for 1024" in capsys.readouterr().out


def test_models_that_the_search_cannot_tell_of_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(model: str) -> str:
        assert main(["plan", "--search", "--model", model, "--world-size", "8", "--seq-len", "64"]) == 1
        return capsys.readouterr().out

    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(vit))
    assert "no texts: the search counts tokens" in refused(str(tmp_path))

    def alone(source: Any, ranks: int) -> Profile:
        if ranks > 1:
            raise ValueError("nobody has said how to shard it")
        return PROFILE

    monkeypatch.setattr("shardwright.planner.search.profile", alone)
    command = "plan --search --model llama-tiny --world-size 8 --seq-len 64 --json"
    assert main(command.split()) == 0
    assert {one["layout"]["tp"] for one in json.loads(capsys.readouterr().out)["layouts"]} == {1}

    def of_two_layers(source: Any, ranks: int) -> Profile:
        raise NotShorterError("the model has no equal layers to tell what one takes")

    monkeypatch.setattr("shardwright.planner.search.profile", of_two_layers)
    assert "it needs three that do the same" in refused("llama-tiny")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--search --tp-size 2 --check", "--check, --tp-size with --search: the search decides"),
        ("--search --batch-size 8 --recompute 0.5", "--batch-size, --recompute with --search"),
        ("--gpu h200 --global-batch-size 8", "--global-batch-size, --gpu without --search"),
    ],
)
def test_options_that_nothing_would_look_at_are_refused(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "llama-tiny", "--world-size", "8", *arguments.split()])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_does_not_fit_when_simulated_gives_way_to_its_like(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*options: str) -> Any:
        command = ["plan", "--search", "--model", "llama-tiny", "--world-size", "8", "--gpu-memory", "40", *options]
        status = main([*command, "--seq-len", "64", "--global-batch-size", "64"])
        said = capsys.readouterr().out
        return json.loads(said) if status == 0 else said

    monkeypatch.setattr("shardwright.planner.search.profile", lambda source, ranks: PROFILE)
    layouts = found("--json")["layouts"]
    simulated = Estimator.estimate

    def estimate(self: Estimator, is_simulated: bool) -> Estimate:
        one = simulated(self, is_simulated)
        return one._replace(memory=one.memory * factor) if is_simulated else one

    monkeypatch.setattr(Estimator, "estimate", estimate)
    factor = 1.8
    again = found("--json")
    assert all(one["memory"] <= again["limit"] for one in again["layouts"])
    assert len(again["layouts"]) > len(layouts) / 2, "those that recompute more stand for their kind"
    factor = 100.0
    assert "nothing fits on 8 devices of 40 GiB" in found()


def test_what_is_printed_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --search --model llama-tiny --world-size 8 --seq-len 64 --global-batch-size 32 --json"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["layout"]["tp"] for one in found["layouts"]} == {1, 2}  # two heads of keys
    assert found["layouts"][0]["seconds"] == min(one["seconds"] for one in found["layouts"])
    piped = next(one for one in found["layouts"] if one["layout"]["pp"] > 1)
    again = {(one["layout"]["pp"], one["layout"]["whole"]) for one in (*found["layouts"], *found["neighbours"])}
    assert not again & {(4, 0.25), (4, 0.5)}, "shares of one layer that round to none"
    for one in (found["layouts"][0], piped):
        assert main(["plan", "--check", "--model", "llama-tiny", *one["flags"].split()]) == 0


def test_flags_check_what_was_searched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.planner.search.profile", lambda source, ranks: PROFILE)
    monkeypatch.setattr("shardwright.cli.plan_search.device", lambda args: replace(DEVICE, device="cpu"))
    command = "plan --search --model llama-tiny --world-size 8 --seq-len 64 --global-batch-size 32 --optimizer sgd"
    assert main(command.split()) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("shardwright plan"))
    assert line.startswith("shardwright plan --model llama-tiny --world-size 8 ")
    assert " --optimizer sgd --device cpu " in line
    assert main([*line.split()[1:], "--check"]) == 0


def test_the_dict_form_says_the_same_as_arguments() -> None:
    for layout in (
        Layout(2, 4, 1, 2, 1, "zb", 1, 2, 8, 0.5),
        Layout(2, 2, 1, 4, 3, "interleaved", 2, 1, 8),
        Layout(1, 1, 4, 4, 2, "1f1b", 1, 1, 8),
    ):
        one = Estimate(layout, 0.0, 1.0, {}, 0.0)
        form, besides = config_of(one, "bf16", along=True)
        wanted = plugin_arguments(one, "bf16", along=True)
        launch(0, 16, None, None, backend="fake")
        try:
            read = vars(Namespace(**read_config(form).arguments)) | besides
            assert {name: read.get(name) for name in wanted} | {"num_model_chunks": 0} == wanted | {
                "num_model_chunks": 0
            }
            HybridParallelPlugin.from_config(form, **besides)
        finally:
            dist.destroy_process_group()
