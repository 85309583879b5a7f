"""Recipes as they are written, and every kind of mistake in one: one sentence that says what would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_files import LLAMA, recipe, write_chat, write_text

from shardwright.trainer import RecipeError, build_recipe, read_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.errors import RowError
from shardwright.trainer.reading import schema, to_plain, to_yaml
from shardwright.trainer.run import check


def test_a_file_with_keys_on_top(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path)).replace("0.001", "1e-4") + "warmup_ratio: 0.1\n")
    read = read_recipe(file, ["max_steps=7", "data.packing=true", "layout.tp_size=2", "bf16=true"])
    found = read.recipe
    assert (found.max_steps, found.learning_rate, found.warmup_steps) == (7, 1e-4, 0.1)
    assert found.data is not None
    assert found.data.packing
    assert found.layout == {"tp_size": 2}
    assert found.bf16
    shown = to_yaml(read)
    assert "max_steps: 7  # command line" in shown
    assert f"# {file}; data.packing: command line" in shown
    assert f"seed: 1  # {file}" in shown
    assert "(as warmup_ratio)" in shown
    assert "weight_decay: 0.0  # default" in shown
    assert build_recipe(yaml.safe_load(shown)) == found == build_recipe(json.loads(json.dumps(to_plain(found))))


def test_the_schema_knows_every_key() -> None:
    found = schema()
    assert found["properties"]["learning_rate"]["type"] == "number"
    assert found["properties"]["lr_scheduler_type"]["enum"][0] == "linear"
    inner = next(one for one in found["properties"]["lora"]["anyOf"] if one["type"] == "object")
    assert inner["properties"]["r"]["minimum"] == 1
    assert inner["additionalProperties"] is False


# What is changed in a recipe that works, and what its error says.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"lerning_rate": 1.0}, "did you mean 'learning_rate'"),
    ({"data": {"pth": "x"}}, "data.pth is no key of a recipe - did you mean 'path'"),
    ({"max_steps": "many"}, "max_steps='many': a whole number is needed"),
    ({"max_steps": 2.5}, "max_steps=2.5: a whole number"),
    ({"max_steps": 0}, "nothing would be trained"),
    ({"seed": -1}, "seed=-1 is too small"),
    ({"seed": True}, "seed=True: a whole number"),
    ({"learning_rate": "fast"}, "learning_rate='fast': a number is needed"),
    ({"learning_rate": float("nan")}, "learning_rate=nan: a number"),
    ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
    ({"optim": "adam"}, "optim='adam' is not one of"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is too small: at least 1"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
    ({"bf16": 1}, "bf16=1: true or false"),
    ({"bf16": True, "layout": {"precision": "fp32"}}, "differ"),
    ({"layout": "best"}, "layout='best'"),
    ({"layout": {"max_norm": 1.0}}, "max_grad_norm"),
    ({"deepspeed": "ds.json"}, "layout: {zero_stage"),
    ({"max_seq_length": 64}, "data: {max_length: N}"),
    ({"resume": True, "resume_from_checkpoint": True}, "two names of one key"),
    ({"model": None}, "model=None"),
    ({"model": ""}, "model is missing"),
    ({"model": {"name": "x"}}, "a mapping has one, config"),
    ({"model": {"config": {"hidden_size": 32}}}, "no model_type"),
    ({"model": {"config": {**LLAMA, "model_type": "lama"}}}, "is none of transformers"),
    ({"model": {"config": {**LLAMA, "vocab_size": 100}}}, "vocab_size of at least 260"),
    ({"model": "no/such/directory"}, "there is no such directory, and names on the hub are OWNER/NAME"),
    ({"tokenizer": None}, "tokenizer is missing"),
    ({"tokenizer": "no/such/directory"}, "there is no such directory"),
    ({"tokenizer": "byte"}, "did you mean 'bytes'"),
    ({"data": None}, "data is missing"),
    ({"data": "train.jsonl"}, "a mapping of keys is needed"),
    ({"data": {"text": "text"}}, "neither of path and dataset"),
    ({"data": {"path": "trian.jsonl"}}, "no such file"),
    ({"data": {"path": "a.exe"}}, "no such file"),
    ({"data": {"mix": []}}, "data.mix is empty"),
    ({"data": {"mix": [{"path": "a.jsonl"}], "path": "b.jsonl"}}, "put that source into mix"),
    ({"data": {"path": "a.jsonl", "text": "a", "messages": "b"}}, "text and messages"),
    ({"data": {"path": "a.jsonl", "prompt": "a"}}, "give both"),
    ({"seed": 2**64}, "seed=18446744073709551616 is too large: at most 4294967295"),
    ({"data": {"path": "a.jsonl", "question": "a"}}, "say task: question-answering"),
    ({"task": "question-answering", "data": {"path": "a.jsonl", "stride": -1}}, "stride=-1 is too small"),
    ({"data": {"path": "a.jsonl", "streaming": True}, "max_steps": -1}, "give max_steps"),
    ({"eval_strategy": "steps"}, "needs eval_data"),
    ({"early_stopping_patience": 2}, "needs eval_strategy"),
    ({"rollbacks": 1}, "say on_nan: stop, or spike_factor: 3"),
    ({"rollbacks": 1, "on_nan": "stop", "save_strategy": "no"}, "rollbacks=1 needs checkpoints"),
    ({"spike_factor": 1.0}, "give more than 1"),
    ({"report_to": "tensorbord"}, "did you mean 'tensorboard'"),
    ({"lora": {"rank": 8}}, "lora.rank is no key"),
    ({"warmup_ratio": 1.0}, "warmup_ratio=1.0 is the share"),
    ({"output_dir": 2024}, "in quotes it is text"),
    ({"model": {"config": "llama"}}, "model.config='llama': a mapping"),
    ({"model": {"config": None}}, "model.config=None: a mapping"),
    ({"model": {"config": {**LLAMA, "num_layer": 7}}}, "did you mean 'num_hidden_layers'"),
    ({"data": {"path": []}}, "an empty list"),
    ({"data": {"path": ""}}, "empty text"),
    ({"data": {"mix": [{"path": "a.jsonl"}], "text": "words"}}, "data.text beside mix would have no effect"),
    ({"data": {"mix": [{"path": "a.jsonl"}], "streaming": True}}, "data.streaming beside mix"),
    ({"data": {"path": "a.jsonl", "weight": 3}}, "data.weight=3 is a share"),
    ({"data": {"mix": [{"path": "a.jsonl", "weight": 0}]}}, "data.mix[0].weight=0: nothing would be drawn of it"),
    ({"data": {"mix": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 0}]}}, "data.mix[1].weight=0"),
    ({"data": {"mix": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}]}}, "give all or none"),
    ({"data": {"mix": 2 * [{"path": "a.jsonl", "streaming": True}]}}, "give each a weight"),
    ({"data": {"path": "a.jsonl", "streaming": True}, "save_strategy": "epoch"}, "say save_strategy: steps"),
    ({"data": {"dataset": "a", "streaming": True}, "dataloader_num_workers": 2}, "a stream of `datasets`"),
    ({"eval_data": {"path": "a.jsonl", "streaming": True}}, "eval_data.streaming"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end needs eval_strategy"),
    ({"greater_is_better": True}, "the lowest of which is best"),
    ({"metric_for_best_model": "accuracy"}, "is not one of loss, eval_loss"),
    ({"save_strategy": "sometimes"}, "save_strategy='sometimes' is not one of no, steps, epoch"),
    ({"tp_size": 2}, "say layout: {tp_size: ...}"),
    ({"zero_stage": 1}, "say layout: {zero_stage: ...}"),
    ({"tensor_parallel": 2}, "say layout: {tp_size: N}"),
    ({"precision": "bf16"}, "say bf16: true"),
    ({"packing": True}, "say data: {packing: ...}"),
    ({"target_modules": ["q_proj"]}, "say lora: {target_modules: ...}"),
    ({"lr": 1e-3}, "say learning_rate"),
    ({"batch_size": 8}, "say per_device_train_batch_size"),
    ({"do_train": True}, "leave it out"),
    ({"neftune_noise_alpha": 5}, "embeddings get no noise"),
    ({"data": "words.jsonl"}, "such as {path: FILE}"),
    ({"data": {"path": "a.jsonl", "split": "test"}}, "data.split='test' is of a dataset, and data.path names files"),
    ({"data": {"path": "a.jsonl", "name": "en"}}, "or leave name out"),
    ({"data": {"mix": ["a.jsonl"]}}, "a list, of which each is a mapping of keys"),
    ({"data": {"path": ["train.jsonl", ""]}}, "data.path has an empty text"),
    ({"tokenizer": ""}, "tokenizer is empty text"),
    ({"output_dir": ""}, "output_dir is empty text"),
    ({"eval_steps": 5}, "say eval_strategy: steps, or leave eval_steps out"),
    ({"model": {"config": {**LLAMA, "num_hidden_layers": 0}}}, "model.config.num_hidden_layers=0 is too small"),
    ({"model": {"config": {**LLAMA, "num_attention_heads": 0}}}, "model.config.num_attention_heads=0 is too small"),
    ({"model": {"config": {**LLAMA, "num_key_value_heads": 3}}}, "num_attention_heads=4; give one of 1, 2, 4"),
    ({"model": {"config": {**LLAMA, "hidden_size": 33}}}, "hidden size (33) is not a multiple"),
    ({"model": {"config": {**LLAMA, "vocab_size": "big"}}}, "vocab_size"),
    ({"tokenizer": "."}, "the directory has no tokenizer.json"),
    ({"tokenizer": "./"}, "the directory has no tokenizer.json"),
]


@pytest.mark.parametrize(("changes", "said"), MISTAKES, ids=lambda one: str(one)[:50])
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        prepare(build_recipe(recipe(tmp_path, **changes)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def with_file(folder: Path, name: str, content: str | bytes, **data: Any) -> dict[str, Any]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return recipe(folder, data={"path": str(path), **data})


FILES: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("empty.jsonl", "", {}, "has no rows"),
    ("lines.txt", "\n\n", {}, "has no rows"),
    ("a.jsonl", '{"text": "a b"}\n{"text": \n', {}, "a.jsonl:2: this is not JSON"),
    ("a.jsonl", '["a"]\n', {}, "a row is a JSON object"),
    ("a.jsonl", b'\xff\xfe{"text"}\n', {}, "not UTF-8"),
    ("a.jsonl", '{"txt": "a b"}\n', {"text": "text"}, "did you mean 'txt'"),
    ("a.jsonl", '{"body": "a b"}\n', {}, "say which one holds the sample"),
    ("a.jsonl", '{"text": 3}\n', {}, "text is needed"),
    ("a.jsonl", '{"text": null}\n', {}, "text is needed"),
    ("a.json", '{"text": "a"}', {}, "a list of objects"),
    ("a.jsonl", '{"messages": []}\n', {}, "a list of {role: user"),
    ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', {}, "no answer of the assistant"),
    ("a.jsonl", '{"text": "a b"}\n', {"max_length": 1000}, "longer than the 256 positions"),
    ("a.jsonl", '{"text": "a b"}\n', {"split": 3}, "data.split=3: text is needed"),
    ("a.md", "words", {}, "files that can be read end in"),
    ("a.jsonl.gz", b"", {}, "has no rows"),
    ("a.jsonl.gz", b"words", {}, "cannot be unpacked by gzip"),
    ("a.jsonl.zst", b"", {}, "unpack it first"),
    ("a.jsonl", '{"text": "a", "messages": []}\n', {}, "say which one holds the sample"),
    ("a.jsonl", '{"text": "a \\ud800"}\n', {}, "the tokenizer cannot read"),
    ("a.csv", "", {}, "cannot be read as csv"),
    ("a.parquet", "words", {}, "cannot be read as parquet"),
]


@pytest.mark.parametrize(("name", "text", "data", "said"), FILES, ids=lambda one: str(one)[:40])
def test_a_file_that_cannot_be_learned(
    tmp_path: Path, name: str, text: str | bytes, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        prepare(build_recipe(with_file(tmp_path, name, text, **data)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# What is found out with a model, on the ranks that would be started.
WHOLE: list[tuple[dict[str, Any], str]] = [
    ({"model": {"config": {**LLAMA, "hidden_act": "gelux"}}}, "model.config.hidden_act='gelux' is nothing that"),
    ({"lora": {"target_modules": ["q_proj", "v_prj"]}}, "lora.target_modules: 'v_prj' is no module of the model - did"),
    ({"lora": {"target_modules": "nope"}}, "lora: Target modules"),
    ({"lora": {"target_modules": ["q_proj"], "modules_to_save": ["lm_hed"]}}, "did you mean 'lm_head'"),
    ({"lora": {"target_modules": ["q_proj"], "lora_dropout": 1.5}}, "lora: dropout"),
    ({"adam_beta1": 1.5}, "optim=adamw_torch: Invalid beta"),
    ({"layout": {"tp_size": 3}}, "layout: "),
    ({"resume": "."}, "no whole checkpoint"),
    ({"layout": {"gradient_checkpoint_config": {"ratio": 7}}}, "layout.gradient_checkpoint_config: "),
    ({"data": {"path": "train.jsonl", "streaming": True}, "per_device_train_batch_size": 64}, "a stream of 60"),
    ({"lora": {"lora_alpha": 0}}, "lora.lora_alpha=0: adapters are scaled by it"),
    (
        {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
        "lr_scheduler_type=polynomial and learning_rate=1e-08: ",
    ),
    (
        {"data": {"mix": [{"path": "train.jsonl", "weight": weight} for weight in (1, 1e-3)]}},
        "data.mix[1].weight=0.001 comes to no sample of the 120 of a pass",
    ),
]


def test_mistakes_that_need_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(build_recipe(recipe(tmp_path)), 1)
    for changes, said in WHOLE:
        with pytest.raises(RecipeError) as caught:
            check(build_recipe(recipe(tmp_path, **changes)), 1)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_models_that_cannot_be_made_piece_by_piece(tmp_path: Path) -> None:
    """Mamba computes some of its new weights from others."""
    given = {"model_type": "mamba", "vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    check(build_recipe(recipe(tmp_path, model={"config": given})), 1)


def test_a_file_of_windows_and_a_row_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a b c"}\n' * 70 + b'\n{"text": null}\n')
    parts = prepare(build_recipe(recipe(tmp_path, data={"path": str(path)})))
    dataset = parts.dataset("data")
    assert len(dataset[0]["input_ids"]) == 6
    with pytest.raises(RowError, match=r"a\.jsonl:72: a row's text is None"):
        dataset[70]


def test_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path)) + "layout: {initial_scale: 1e4, pp_style: 1f1b}\n")
    assert read_recipe(file).recipe.layout == {"initial_scale": 1e4, "pp_style": "1f1b"}


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells do not see what stands in a file or behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    read = build_recipe(recipe(tmp_path, output_dir="~/runs", data={"path": ["~/a.jsonl", "b.jsonl"]}))
    assert read.output_dir == f"{tmp_path}/runs"
    assert read.data is not None
    assert read.data.path == [f"{tmp_path}/a.jsonl", "b.jsonl"]


def test_what_is_no_recipe(tmp_path: Path) -> None:
    for text, said in (("- a\n", "a recipe is a mapping"), ("", "is empty"), ("a: [\n", "this is not YAML")):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(RecipeError, match=said):
            read_recipe(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match=r"no such file - did you mean 'r.yaml'"):
        read_recipe(tmp_path / "rr.yaml")
    for text, said in (
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "line 3: .*the key seed is given twice"),
        ("layout: &a {b: *a}\n", "holds itself"),
    ):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(RecipeError, match=said):
            read_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("seed: 1\n")
    with pytest.raises(RecipeError, match="key=value"):
        read_recipe(tmp_path / "r.yaml", ["max_steps"])
    with pytest.raises(RecipeError, match="there is no such option - did you mean '--check'"):
        read_recipe(tmp_path / "r.yaml", ["--chek"])


def test_sources_in_every_form(tmp_path: Path) -> None:
    write_text(tmp_path / "b.jsonl", 7)
    write_chat(tmp_path / "c.jsonl", 5)
    (tmp_path / "lines.txt").write_text("one line\n\nanother line\n")
    (tmp_path / "list.json").write_text(json.dumps([{"body": "a b c"}, {"body": "d"}]))
    sources = [
        {"path": str(tmp_path / "b.jsonl"), "weight": 1},
        {"path": str(tmp_path / "c.jsonl"), "weight": 2},
        {"path": str(tmp_path / "lines.txt"), "weight": 1},
        {"path": str(tmp_path / "list.json"), "text": "body", "weight": 0.5},
    ]
    rows = prepare(build_recipe(recipe(tmp_path, data={"mix": sources}))).rows["data"]
    kinds = [next(iter(row)) for row in rows]
    assert len(rows) == 7 + 5 + 2 + 2
    assert kinds.count("messages") == 7
    assert {row["text"] for row in rows if "text" in row} >= {"one line", "another line", "a b c"}
