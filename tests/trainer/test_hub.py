"""Models, tokenizers and datasets by their names on a hub of our own: there, wrong, and out of reach."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_files import LLAMA, recipe, sentences
from tiny_hub import COMMIT, Hub, running_hub
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.trainer import build_recipe
from shardwright.trainer.hub import names_on_hub
from shardwright.trainer.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]

# Every line of the input is a list of arguments for the command; every line of the output is its status and what it
# said. One process for all of them, since what they import takes most of the time.
SEVERAL = """
import contextlib, io, json, sys
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        from shardwright.cli.main import main
        status = main(json.loads(line))
    print(json.dumps([status, said.getvalue()]), flush=True)
"""


def fill(folder: Path) -> None:
    """models/shop/tiny in several files, its tokenizer alone as shop/words, weights of another kind, and two splits."""
    config = AutoConfig.for_model(**LLAMA)
    model, tokenizer = AutoModelForCausalLM.from_config(config), byte_tokenizer()
    models = folder / "models" / "shop"
    for name in ("tiny", "gated"):
        model.save_pretrained(models / name, max_shard_size="30KB")
        tokenizer.save_pretrained(models / name)
    tokenizer.save_pretrained(models / "words")
    config.save_pretrained(models / "old")
    tokenizer.save_pretrained(models / "old")
    (models / "old" / "pytorch_model.bin").write_bytes(b"pickled")
    data = folder / "datasets" / "shop" / "talk" / "data"
    data.mkdir(parents=True)
    for split, seed in (("train", 0), ("test", 1)):
        lines = (json.dumps({"text": sentence}) + "\n" for sentence in sentences(40, seed))
        (data / f"{split}.jsonl").write_text("".join(lines))


def environment(folder: Path, url: str, **more: str) -> dict[str, str]:
    names = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, **names, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}


def run_all(commands: list[list[str]], environ: dict[str, str], cwd: Path) -> list[tuple[int, str]]:
    given = "".join(json.dumps(command) + "\n" for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], input=given, env=environ, cwd=cwd, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def by_name(folder: Path, **changes: Any) -> Path:
    file = folder / "by_name.yaml"
    given = recipe(folder, model="shop/tiny", data={"dataset": "shop/talk", "max_length": 64}, **changes)
    file.write_text(yaml.safe_dump({key: value for key, value in given.items() if key != "tokenizer"}))
    return file


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hub")
    fill(folder)
    with running_hub(folder) as found:
        found.gated.add("shop/gated")
        yield found


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


WRONG = [
    (
        ["model=shop/tinny", "tokenizer=bytes"],
        ("model='shop/tinny': there is no such directory, and {url} has no", "'shop/tiny'?; a private"),
    ),
    (["model=shoop/tiny", "tokenizer=bytes"], ("model='shoop/tiny': there is no", "did you mean 'shop/tiny'?")),
    (["model=other/thing", "tokenizer=bytes"], ("{url} has no other/thing for you; a private",)),
    (
        ["tokenizer=shop/wrds"],
        ("tokenizer='shop/wrds': there is no such directory", "mean 'shop/words'?", "hf auth login"),
    ),
    (["model=shop/gated"], ("model='shop/gated': it is gated: ask for access at {url}/shop/gated",)),
    (["model=shop/old"], ("model='shop/old' has no safetensors on the hub", "save_pretrained(DIRECTORY)")),
    (["model=./saved/tiny"], ("model='./saved/tiny': there is no such directory", "OWNER/NAME")),
    (
        ["data.dataset=shop/tlk"],
        ("data.dataset='shop/tlk': there is no such directory", "no datasets/shop/tlk", "did you mean 'shop/talk'?"),
    ),
    (["data.split=trian"], ("data.dataset='shop/talk': it cannot be loaded", "trian", "train")),
    (["data.name=big"], ("data.dataset='shop/talk': it cannot be loaded", "big")),
]


@pytest.mark.timeout(300)
def test_names_are_found_and_wrong_ones_are_told(hub: Hub, tmp_path: Path) -> None:
    """A run on names learns what one on directories learns; then all of it again without a hub, from the cache."""
    file = str(by_name(tmp_path, eval_data={"dataset": "shop/talk", "split": "test"}, eval_strategy="steps"))
    local = hub.folder / "models" / "shop" / "tiny"
    text = hub.folder / "datasets" / "shop" / "talk" / "data" / "train.jsonl"
    # one rank of a launcher, so that it trains in the process that has imported everything
    environ = environment(tmp_path, hub.url, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    environ["MASTER_PORT"] = closed_port().rpartition(":")[2]
    runs = [
        ["train", file, "output_dir=named"],
        [
            "train",
            file,
            "output_dir=local",
            f"model={local}",
            f"data.path={text}",
        ]
        + ["data.dataset=null", "eval_strategy=no", "eval_data=null"],
        ["train", file, "--check", "tokenizer=shop/words", "data.streaming=true", "output_dir=other"],
        *(["train", file, "--check", "output_dir=other", *changes] for changes, _ in WRONG),
    ]
    found = run_all(runs, environ, tmp_path)
    assert [status for status, _ in found] == [0, 0, 0, *(2 for _ in WRONG)], found
    for (_, said), (_, parts) in zip(found[3:], WRONG, strict=True):
        assert said.count("\n") == 1, said
        for part in parts:
            assert part.format(url=hub.url) in said, said
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("named", "local")
    ]
    assert [loss for loss in losses[0] if loss is not None] == losses[1]
    assert json.loads((tmp_path / "named" / "model" / "config.json").read_text())["hidden_size"] == 32
    assert f"GET /shop/tiny/resolve/{COMMIT}/config.json" in hub.asked

    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    questions = [
        ["train", file, "--check", "output_dir=other"],
        ["train", file, "--check", "output_dir=other", "model=shop/new", "tokenizer=bytes"],
        ["train", file, "--check", "output_dir=other", "tokenizer=shop/new"],
        ["train", file, "--check", "output_dir=other", "data.dataset=shop/new"],
        ["train", file, "--check", "output_dir=other", "model=shop/tinny", "tokenizer=bytes"],
    ]
    gone = closed_port()
    found = run_all(questions, environment(tmp_path, gone, **alone), tmp_path)
    assert [status for status, _ in found] == [0, 2, 2, 2, 2], found
    assert found[0][1].startswith(f"shardwright train: {gone} cannot be reached (Connection refused); what was fetched")
    assert "has not all of it - did you mean 'shop/tiny'?" in found[4][1]
    for (_, said), key in zip(found[1:4], ("model", "tokenizer", "data.dataset"), strict=True):
        assert f"shardwright train: {key}='shop/new': there is no such directory, {gone} is not asked" in said, said
        assert said.count("\n") == 1, said


def test_what_is_on_the_hub_is_known_from_the_recipe(tmp_path: Path) -> None:
    given = recipe(tmp_path, model="shop/tiny", tokenizer="bytes")
    assert list(names_on_hub(build_recipe(given))) == ["shop/tiny"]
    assert not list(names_on_hub(build_recipe({**given, "model": str(tmp_path)})))
    mixed = {"mix": [{"dataset": "shop/talk"}, {"path": "a.jsonl"}]}
    assert list(names_on_hub(build_recipe({**given, "model": str(tmp_path), "data": mixed}))) == ["shop/talk"]
