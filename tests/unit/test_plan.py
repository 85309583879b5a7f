"""`shardwright plan`: layouts of models of any size, on one CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake job leaves LOCAL_RANK behind, as any launch does."""
    monkeypatch.setenv("LOCAL_RANK", "0")


def plan(capsys: pytest.CaptureFixture[str], arguments: str) -> tuple[int, str]:
    status = main(["plan", *arguments.split()])
    return status, capsys.readouterr().out


def test_a_70b_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = plan(
        capsys,
        "--model llama-70b --world-size 64 --tp-size 8 --pp-size 4 --zero-stage 1 --num-microbatches 16 --batch-size "
        "16 --seq-len 8192",
    )
    assert status == 0
    for line in (
        "LlamaForCausalLM: 70.55 B parameters, 70.55 B of them trained",
        "64 ranks = dp 2 x pp 4 x tp 8 x sp 1 (outermost first: shard, pp, tp), bf16, ZeRO-1 over 2 ranks",
        "model.layers.0 to model.layers.",
        "16 microbatches, ideal bubble 15.8%",  # 3 / (16 + 3)
        "gradients, reduce-scatter",
        "updated weights, all-gather",
        "activations and their gradients, all-reduce",
        "activations forward, gradients backward",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--model llama-tiny --world-size 6 --tp-size 4", "world_size=6 is not divisible by tp_size=4"),
        ("--model llama-tiny --world-size 8 --pp-size 8", "at most 4 stages work"),
        ("--model llama-tiny --world-size 4 --pp-size 2 --num-layers-per-stage 1,2", "[2, 2] would work"),
        ("--model llama-tiny --world-size 2 --tp-size 2 --optimizer muon", "Muon works on whole matrices"),
        ("--model llama-tiny --world-size 2 --precision fp17", "did you mean 'fp16'"),
        ("--model llama-tiny --world-size 4 --pp-size 2 --pp-style zbv --num-model-chunks 3", "exactly 2"),
        ("--model llama-tiny --world-size 2 --recompute -1", "--recompute -1 must be a share of layers, from 0 to 1"),
        ("--model llama-tiny --world-size 2 --recompute 0.75 --selective 0.5", "--selective 0.25 would work"),
        ("--model llama-tiny --world-size 2 --zero-bucket-size-in-m 1e-9", "at least 1e-06, which is one element"),
        ("--model bert-base --world-size 1 --batch-size 1 --seq-len 513", "learned positions for 512"),
        ("--model llama-tiny --world-size 1 --batch-size 2 --peak", "needs --seq-len, tokens of a sample"),
        (
            "--model llama-tiny --world-size 1 --batch-size 2 --seq-len 8 --target-len 4 --peak",
            "--target-len 4: LlamaForCausalLM is no encoder-decoder",
        ),
        (
            "--model llama-tiny --world-size 2 --pp-size 2 --batch-size 2 --seq-len 16 --num-sequence-slices 17 --peak",
            "num_sequence_slices=17 with sequence_length=16: a slice has one token at least",
        ),
    ],
)
def test_layouts_that_do_not_work_say_so_and_fail(
    capsys: pytest.CaptureFixture[str], arguments: str, word: str
) -> None:
    status, text = plan(capsys, arguments)
    assert status == 1
    assert text.startswith("This layout does not work: ")
    assert word in text


def test_check_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = plan(
        capsys, "--check --model gpt2 --world-size 8 --tp-size 2 --pp-size 2 --pp-style zbv --num-model-chunks 2"
    )
    assert status == 0
    assert text.count("\n") == 1
    assert "8 ranks = dp 2 x pp 2 x tp 2" in text


def test_long_replays_say_on_stderr_what_they_are_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.cli.plan._SILENT", -1.0)
    given = (
        "--model llama-tiny --world-size 2 --pp-size 2 --batch-size 2 --num-microbatches 2 --seq-len 8 --peak --json"
    )
    assert main(["plan", *given.split()]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)["peaks"]) == 2
    for rank in range(2):
        assert f"s  replaying pipeline rank {rank} of 2" in told.err


def test_check_tells_the_peak_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--check --model llama-tiny --world-size 2 --pp-size 2 --batch-size 2 --seq-len 8"
    status, text = plan(capsys, f"{asked} --peak")
    assert status == 0
    assert text.count("\n") == 1
    assert re.search(r"; peak \d+\.\d\d MiB on pipeline rank [01]$", text)
    with pytest.raises(SystemExit) as end:
        plan(capsys, f"{asked} --json")
    assert end.value.code == 2
    assert "--check with --json" in capsys.readouterr().err


def test_models_come_from_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        status, text = plan(
            capsys, f"--model {name} --world-size 2 --pp-size 2 --selective 1.0 --batch-size 2 --seq-len 8"
        )
        assert status == 0
        assert "0 of 1 layer, 1 in part" in text
        assert "activations at the peak of a step" in text
        status, text = plan(capsys, f"--model {name} --world-size 2 --pp-size 2 --recompute 0.5")
        assert status == 0
        assert text.startswith("BertForMaskedLM:")
    with pytest.raises(SystemExit) as end:
        plan(capsys, f"--model {tmp_path.parent} --world-size 1")
    assert end.value.code == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_encoder_decoders_write_as_much_as_they_read_or_as_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    starts = {"architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}
    file.write_text(json.dumps({"model_type": "t5", **sizes, **starts}))
    given = f"--model {file} --world-size 1 --batch-size 2 --seq-len 64 --peak --json"
    peaks = []
    for more in ("", " --target-len 64", " --target-len 8"):
        status, text = plan(capsys, given + more)
        assert status == 0
        peaks.append(json.loads(text)["peaks"][0]["peak"])
    assert peaks[0] == peaks[1] > 1.2 * peaks[2]


def test_messages_of_gpus_do_not_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """What is sent is let go of when the next message is sent or expected: there is more of ids and losses alone."""
    peaks = []
    for count in (8, 40):
        job = f"--world-size 2 --pp-size 2 --num-microbatches {count} --batch-size {count} --seq-len 64 --device cuda"
        status, text = plan(capsys, f"--model llama-tiny {job} --peak --json")
        assert status == 0
        assert "leave something behind" not in text
        peaks.append([rank["peak"] for rank in json.loads(text)["peaks"]])
    message, ids, loss = 64 * 64 * 2, 64 * 8, 4
    for few, many in zip(*peaks, strict=True):
        assert many - few <= 32 * (4 * ids + loss) < 32 * message


def test_the_preset_of_an_encoder_decoder_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its config says which token stands in front of labels."""
    status, text = plan(capsys, "--model t5-base --world-size 1 --batch-size 2 --seq-len 16 --peak")
    assert status == 0
    assert "its batch: input_ids [2, 16], labels [2, 16]" in text


def test_what_an_encoder_decoder_starts_with_must_be_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    file.write_text(json.dumps({"model_type": "t5", **sizes, "architectures": ["T5ForConditionalGeneration"]}))
    status, text = plan(capsys, f"--model {file} --world-size 1 --batch-size 2 --seq-len 8 --peak")
    assert status == 1
    assert "decoder_start_token_id of T5Config is not set" in text


def test_what_is_written_for_sounds_must_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    kind = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 100, "num_mel_bins": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"max_source_positions": 16, "max_target_positions": 16}
    file.write_text(json.dumps({**kind, **layers, **heads, **sizes, **ids, **places}))
    given = f"--model {file} --world-size 1 --batch-size 3 --peak"
    status, text = plan(capsys, given)
    assert status == 1
    assert "needs --target-len, tokens that it writes" in text
    status, text = plan(capsys, f"{given} --target-len 5")
    assert status == 0
    assert "its batch: input_features [3, 8, 32], labels [3, 5]" in text


def test_peaks_of_experts_say_what_they_take_for_granted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    file.write_text(json.dumps({**kind, **sizes, "vocab_size": 64, "num_local_experts": 4}))
    for how in ("", " --json"):
        status, text = plan(capsys, f"--model {file} --world-size 1 --batch-size 2 --seq-len 8 --peak{how}")
        assert status == 0
        assert "tokens are taken to choose all experts alike" in text


def test_lengths_are_refused_where_there_are_no_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"image_size": 8, "patch_size": 4, "architectures": ["ViTForImageClassification"]}
    file.write_text(json.dumps({"model_type": "vit", **sizes, **images}))
    status, text = plan(capsys, f"--model {file} --world-size 1 --batch-size 2 --seq-len 8 --peak")
    assert status == 1
    assert text.startswith("This layout does not work: --seq-len 8: ViTForImageClassification is trained on batches w")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "llama", "num_hidden_layers": "two"}, "expected int, got str (value: 'two')"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "(65) is not a multiple of"),
        ({"model_type": "nope"}, "`nope` but Transformers does not recognize"),
        ({}, "Should have a `model_type` key"),
    ],
)
def test_config_files_that_say_nonsense_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        plan(capsys, f"--model {file} --world-size 1")
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert f"{file} is no config that this transformers knows: " in said[-1]
    assert word in said[-1]


@pytest.mark.parametrize("code", ["parallel = dict(", "parallel = dict(tensor=1 / 0)"])
def test_files_of_a_layout_that_do_not_run_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str
) -> None:
    file = tmp_path / "layout.py"
    file.write_text(code)
    with pytest.raises(SystemExit):
        plan(capsys, f"--model llama-tiny --world-size 1 --config {file}")
    assert f"--config {file} is no Python that runs (" in capsys.readouterr().err.splitlines()[-1]


def test_jobs_of_more_ranks_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(capsys, "--model llama-tiny --world-size 1000000000")
    assert "--world-size 1000000000 must be at most 1048576" in capsys.readouterr().err


def test_models_without_a_policy_are_planned_untried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On real ranks their plan is tried on a small copy; one process that plays a rank has nobody to try it with."""
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    status, text = plan(capsys, f"--model {tmp_path} --world-size 2 --tp-size 2")
    assert status == 0
    assert "not tried on a small copy" in text


def test_layouts_come_from_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layout.py"
    file.write_text("parallel = dict(zero1=2, tensor=2, pipeline=dict(size=2))\ndata = dict(micro_num=4)\n")
    status, text = plan(capsys, f"--model llama-tiny --world-size 8 --config {file}")
    assert status == 0
    assert "dp 2 x pp 2 x tp 2" in text
    assert "ZeRO-1 over 2 ranks" in text


def test_a_report_as_json_needs_no_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-tiny", "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peaks"] == []
