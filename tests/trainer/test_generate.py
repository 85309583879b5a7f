"""`shardwright generate` against transformers' own generate, on one process and two ranks, and its refusals."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipe_files import LLAMA
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from shardwright.booster import Booster
from shardwright.cli.main import main
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.trainer.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves: a model whose words are far from equally likely, and its tokenizer, below `model`."""
    folder = tmp_path_factory.mktemp("run")
    set_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(**{**LLAMA, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": 257})
    )
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


def expected(folder: Path, text: str | list[dict[str, str]], **options: Any) -> tuple[str, int]:
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder / "model"), byte_tokenizer()
    if isinstance(text, str):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    set_seed(7)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), len(written)


def test_words_are_those_of_transformers(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(*options: str) -> str:
        assert main(["generate", str(directory), "--seed", "7", *options]) == 0
        return capsys.readouterr().out

    text, tokens = expected(directory, "the fox", max_new_tokens=9, do_sample=False)
    told = json.loads(written("--prompt", "the fox", "--max-new-tokens", "9", "--json"))
    assert told == {"prompt": "the fox", "text": text, "tokens": tokens}
    assert written("--prompt", "the fox", "--max-new-tokens", "9", "--greedy") == f"{text}\n", "as it is written"
    drawn = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    (tmp_path / "prompt.txt").write_text("a bird\nsees")
    text, _ = expected(directory, "a bird\nsees", **drawn)
    options = ("--max-new-tokens", "12", "--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--json")
    assert json.loads(written("--prompt-file", str(tmp_path / "prompt.txt"), *options))["text"] == text
    monkeypatch.setattr(sys, "stdin", io.StringIO("tree?"))
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "tree?"}]
    text, _ = expected(directory, messages, max_new_tokens=8, num_beams=3, repetition_penalty=1.3)
    options = (
        "--chat",
        "--system",
        "short",
        "--num-beams",
        "3",
        "--repetition-penalty",
        "1.3",
        "--max-new-tokens",
        "8",
    )
    assert written(*options) == f"{text}\n"


def test_adapters_are_put_on_their_model(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named from where they are; the prompt is read from a pipe whose last line has an end, as `echo` writes it."""
    shutil.copytree(directory / "model", tmp_path / "base")
    for tokenizer in (tmp_path / "base").glob("tokenizer*"):
        tokenizer.unlink()
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    set_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.peft_config["default"].base_model_name_or_path = "../base"
    adapted.save_pretrained(tmp_path / "adapters")
    byte_tokenizer().save_pretrained(tmp_path / "adapters")  # the model itself has none, as one that a recipe names
    ids = byte_tokenizer()("the fox", return_tensors="pt")["input_ids"]
    wanted = adapted.eval().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    text = byte_tokenizer().decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert text != expected(directory, "the fox", max_new_tokens=9, do_sample=False)[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the fox\n")))
    assert main(["generate", str(tmp_path / "adapters"), "--max-new-tokens", "9", "--greedy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prompt"], told["text"]) == ("the fox", text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"f\xffx"), errors="surrogateescape"))
    assert main(["generate", str(tmp_path / "adapters")]) == 2
    assert "what stands on standard input is no text in UTF-8" in capsys.readouterr().err


def test_an_encoder_decoder_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Bart there is a causal class, too, which is not what was saved."""
    set_seed(5)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 260, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "init_std": 0.5}
    tokens = {"pad_token_id": 258, "bos_token_id": 256, "eos_token_id": 257, "decoder_start_token_id": 256}
    config: Any = BartConfig(**layers, **sizes, **tokens, max_position_embeddings=32, forced_eos_token_id=None)
    model: Any = BartForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    prompt = "the fox sees a bird, quietly"  # with the text it would fill more than the positions of a causal model
    ids = byte_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    for options, named in (([], {"do_sample": False}), (["--num-beams", "3"], {"num_beams": 3})):
        written = model.eval().generate(ids, max_new_tokens=9, **named)[0, 1:]
        wanted = {"prompt": prompt, "text": byte_tokenizer().decode(written, skip_special_tokens=True)}
        capsys.readouterr()
        command = ["generate", str(tmp_path), "--prompt", prompt, "--max-new-tokens", "9", *options]
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {**wanted, "tokens": len(written)}
    assert main(["generate", str(tmp_path), "--prompt", prompt, "--max-new-tokens", "9", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith(byte_tokenizer().decode(model.generate(ids, max_new_tokens=9)[0, 1:3]))
    for prompt, tokens, said in (("a" * 40, "4", "a shorter prompt"), ("a", "40", "give --max-new-tokens 31")):
        assert main(["generate", str(tmp_path), "--prompt", prompt, "--max-new-tokens", tokens]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"return_dict_in_generate": True, "output_scores": True}, {}),
        ({"num_beams": 2, "return_dict_in_generate": True}, {"num_beams": 2}),
        ({"do_sample": True, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}),
        ({"stop_strings": ["\x19", "a", "e"]}, {"stop_strings": ["\x19", "a", "e"], "tokenizer": byte_tokenizer()}),
    ],
)
def test_what_the_files_of_a_model_ask_for(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Any, options: dict[str, Any]
) -> None:
    """In its generation_config.json: more than words, more than one text, stop strings, which need the tokenizer."""
    shutil.copytree(directory, tmp_path / "run")
    file = tmp_path / "run" / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    text, tokens = expected(directory, "the fox", max_new_tokens=9, **options)
    command = ["generate", str(tmp_path / "run"), "--seed", "7", "--prompt", "the fox", "--max-new-tokens", "9"]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "the fox", "text": text, "tokens": tokens}
    assert main(command) == 0
    assert capsys.readouterr().out == f"{text}\n"


DRAWN = {"do_sample": True, "top_k": 50, "temperature": 1.3}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2},
    "drawn": DRAWN,
    "drawn beams": {"do_sample": True, "num_beams": 2},
    "stops": {
        "do_sample": True,
        "top_k": 50,
        "temperature": 1.3,
        "stop_strings": [chr(code) for code in range(33, 80)],
    },
}


def _written(model: Any) -> dict[str, list[list[int]]]:
    """Of prompts of unequal lengths, by how words are chosen."""
    tokenizer: Any = byte_tokenizer()
    asked = tokenizer(["the fox sees a bird", "a", "quietly!"], return_tensors="pt", padding=True)
    found = {}
    for name, options in CHOICES.items():
        set_seed(11)
        ids, mask = asked["input_ids"], asked["attention_mask"]
        written = model.generate(ids, attention_mask=mask, max_new_tokens=8, tokenizer=tokenizer, **options)
        found[name] = written.tolist()
    return found


def _write_on_rank(rank: int, world_size: int, kind: Any, folder: str) -> dict[str, list[list[int]]]:
    model: Any = kind.from_pretrained(folder)
    model, *_ = Booster(plugin=HybridParallelPlugin(tp_size=world_size, precision="fp32")).boost(model)
    model.eval()
    return _written(model)


def _t5() -> Any:
    tokens = {"pad_token_id": 258, "eos_token_id": 257, "decoder_start_token_id": 258}
    config = T5Config(vocab_size=261, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=3, **tokens)
    return T5ForConditionalGeneration(config)


def _bart() -> Any:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 261, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    tokens = {"pad_token_id": 258, "bos_token_id": 256, "eos_token_id": 257, "decoder_start_token_id": 257}
    return BartForConditionalGeneration(BartConfig(**layers, **sizes, **tokens))


@pytest.mark.parametrize("make", [_t5, _bart])
def test_encoder_decoders_choose_the_same_words_on_ranks(make: Any, tmp_path: Path) -> None:
    """Beams, draws and stops, which every rank decides on by itself; T5's three heads are shared by two ranks."""
    set_seed(5)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():  # words that are far from equally likely
            parameter.normal_(0.0, 0.35)
    model.save_pretrained(tmp_path)
    expected = _written(type(model).from_pretrained(tmp_path).eval())
    assert expected["stops"] != expected["drawn"]
    for found in run_ranks(_write_on_rank, 2, type(model), str(tmp_path)):
        assert found == expected


def test_two_ranks_write_the_same(directory: Path) -> None:
    text, tokens = expected(directory, "over", max_new_tokens=10, do_sample=True, top_k=30)
    command = [sys.executable, "-m", "shardwright.cli", "generate", str(directory), "--prompt", "over", "--tp", "2"]
    options = ["--seed", "7", "--max-new-tokens", "10", "--top-k", "30", "--device", "cpu", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"prompt": "over", "text": text, "tokens": tokens}


def _without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def _bert(folder: Path) -> Path:
    shutil.rmtree(folder)
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=260, **tiny)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _adapters(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere/base"}')
    return folder


def _classifier(folder: Path) -> Path:
    told = {"base_model_name_or_path": str(folder), "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def _asking(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def _split(folder: Path) -> Path:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    return folder


def _no_template(folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda folder: folder / "nothing", [], "there is no such directory"),
        (lambda folder: folder / "config.json", [], "is a file; name the directory"),
        (lambda folder: _without(folder, "config.json"), [], "has no config.json"),
        (lambda folder: _without(folder, "model.safetensors"), [], "has no weights"),
        (_split, [], "lacks 1 of its 2 files of weights, model-1.safetensors first"),
        (lambda folder: _without(folder, "tokenizer.json", "tokenizer_config.json"), [], "has no tokenizer"),
        (_bert, [], "BertForMaskedLM, which is neither a causal language model nor"),
        (_adapters, [], "adapters of nowhere/base, which is no directory here"),
        (_classifier, [], "holds adapters of the task SEQ_CLS, which writes no text"),
        (lambda folder: _asking(folder, '{"penalty_alpha": 0.6, "top_k": 4}'), [], "take penalty_alpha out of it"),
        (lambda folder: _asking(folder, "{"), [], "generation_config.json cannot be read"),
        (_no_template, ["--chat"], "has no chat template; leave out --chat"),
        (lambda folder: folder, ["--system", "x"], "add --chat"),
        (lambda folder: folder, ["--temperature", "-1"], "--temperature -1.0 is too small"),
        (lambda folder: folder, ["--top-p", "1.5"], "a share of probability"),
        (
            lambda folder: folder,
            ["--greedy", "--top-k", "4"],
            "--greedy takes the likeliest word and --top-k draws one",
        ),
        (lambda folder: folder, ["--max-new-tokens", "255"], "the model's 256 positions; give --max-new-tokens 253"),
        (lambda folder: folder, ["--prompt", ""], "the prompt is empty"),
        (lambda folder: folder, ["--seed", "-1"], "--seed -1 is none; give a whole number from 0"),
        (lambda folder: folder, ["--stop", ""], "--stop is empty text"),
        (lambda folder: folder, ["--tp", "0"], "--tp 0 is too small"),
    ],
)
def test_refusals(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, options: list[str], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(directory / "model", folder)
    prompt = [] if "--prompt" in options else ["--prompt", "abc"]
    changed = change(folder)
    capsys.readouterr()  # bars of transformers
    assert main(["generate", str(changed), "--device", "cpu", *prompt, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardwright generate: ")
    assert said in line
