"""`shardwright config`: every key of a configuration is read or named, and what is written is taken by its reader."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli import config as command
from shardwright.cli.main import main
from shardwright.compat.configs import SOURCES, TARGETS, read_file, write
from shardwright.compat.configs.statements import read_assignments
from shardwright.plugins.hybrid.config_form import read_config
from shardwright.trainer import build_recipe
from tests.compat.config_files import CASES as PLAIN
from tests.compat.config_files import Case
from tests.compat.realistic_files import REALISTIC

CASES = [*PLAIN, *REALISTIC]

NEEDED = {"model": "gpt2", "data": {"path": "a.jsonl"}, "eval_data": {"path": "b.jsonl"}}


def written(case: Case, tmp_path: Path) -> Path:
    path = tmp_path / case.file
    path.write_text(case.text)
    return path


@pytest.mark.parametrize("case", CASES, ids=[case.file for case in CASES])
def test_every_key_is_read_or_named(case: Case, tmp_path: Path) -> None:
    source, found = read_file(written(case, tmp_path))
    assert source == case.source
    assert found.layout == case.layout
    assert found.recipe == case.recipe
    assert sorted(note.key for note in found.notes) == sorted(case.noted)
    data = {**NEEDED["data"], **found.recipe.get("data", {})}  # type: ignore[dict-item]
    held_out = NEEDED["eval_data"] if "eval_steps" in found.recipe else None
    given = {**found.recipe, **NEEDED, "data": data, "eval_data": held_out, "layout": found.layout}
    recipe = build_recipe(given)
    assert recipe.layout == case.layout


@pytest.mark.parametrize("case", CASES, ids=[case.file for case in CASES])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target(case: Case, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(written(case, tmp_path)), "--to", target]) == 0
    text = capsys.readouterr().out
    if target == "shardwright":
        read = yaml.safe_load(text)
        assert read.pop("layout", {}) == case.layout
        assert read == case.recipe
        assert all(key in text for key in case.noted)
    elif target == "plugin":
        (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
        assert {"precision"} <= {each.arg for each in call.value.keywords}  # type: ignore[attr-defined]
    elif target == "from_config":
        found = read_config(read_assignments(text, "x.py")[0]).arguments
        kept = {name: found[name] for name in ("tp_size", "pp_size", "num_model_chunks") if name in case.layout}
        assert kept == {name: case.layout[name] for name in kept}
        assert (found["zero_stage"] == 3) == (case.layout.get("zero_stage") == 3)
    elif target == "deepspeed":
        assert json.loads(text)["zero_optimization"]["stage"] == case.layout.get("zero_stage", 0)


def test_a_recipe_of_deepspeed_keys_goes_there_and_back(tmp_path: Path) -> None:
    recipe = {"learning_rate": 1e-3, "bf16": True, "gradient_accumulation_steps": 2, "adam_beta2": 0.95, "seed": 3}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "layout": {"zero_stage": 3, "cpu_offload": True}}))
    text, notes = write(read_file(path)[1], "deepspeed")
    assert [note.key for note in notes] == ["seed"]
    (tmp_path / "back.json").write_text(text)
    back = read_file(tmp_path / "back.json")[1]
    assert back.layout == {"zero_stage": 3, "cpu_offload": True}
    recipe.pop("seed")
    assert back.recipe == {**recipe, "adam_beta1": 0.9, "optim": "adamw_torch", "max_grad_norm": 1.0}


def test_batches_and_a_schedule_go_there_and_back(tmp_path: Path) -> None:
    """A step has as many samples there as here, however the layout cuts them."""
    steps = {"lr_scheduler_type": "linear", "warmup_steps": 20, "max_steps": 200, "learning_rate": 1e-3}
    recipe = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 3, "fp16": True, **steps}
    for layout, parts in (
        ({"num_microbatches": 12}, (8, 12)),
        ({"microbatch_size": 16}, (16, 6)),
        ({}, (32, 3)),
        ({"num_microbatches": 7}, (32, 3)),  # which does not divide them
    ):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**recipe, "layout": {**layout, "initial_scale": 1024.0}}))
        text, notes = write(read_file(path)[1], "deepspeed")
        there = json.loads(text)
        assert (there["train_micro_batch_size_per_gpu"], there["gradient_accumulation_steps"]) == parts
        assert parts[0] * parts[1] == 96
        assert [note.key for note in notes] == (["layout.num_microbatches"] if 7 in layout.values() else [])
        (tmp_path / "back.json").write_text(text)
        back = read_file(tmp_path / "back.json")[1]
        assert {name: back.recipe[name] for name in steps} == steps
        assert back.layout == {"initial_scale": 1024.0, "zero_stage": 0}
        assert back.notes == []


def test_accelerate_takes_what_is_written_for_it(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "recipe.yaml"
    path.write_text("nproc: 4\nbf16: true\nlayout: {zero_stage: 3, tp_size: 2}\n")
    text, notes = write(read_file(path)[1], "accelerate")
    assert [note.key for note in notes] == ["max_grad_norm"]
    (tmp_path / "accelerate.yaml").write_text(text)
    loaded = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (loaded.num_processes, loaded.mixed_precision, loaded.distributed_type) == (4, "bf16", "FSDP")
    back = read_file(tmp_path / "accelerate.yaml")[1]
    assert back.layout == {"zero_stage": 3, "tp_size": 2}


WRONG: list[tuple[str, str, list[str], str]] = [
    ("a.json", "{", [], "a.json, line 1: this is not JSON"),
    ("a.yaml", "a: [", [], "this is not YAML"),
    ("a.yaml", "- 1", [], "a configuration is a mapping of keys, not a list"),
    ("a.yaml", "some: thing", [], "say --from colossalai or internlm"),
    ("a.py", "x = (", [], "line 1: this is not python"),
    ("a.py", "x = 1", ["--from", "colossalai"], "builds none of HybridParallelPlugin"),
    ("a.py", "parallel = dict(zero1=1, tensor='2')", [], "parallel.tensor='2' must be a whole number"),
    ("a.json", '{"zero_optimization": {"reduce_bucket_size": "big"}}', [], "reduce_bucket_size = 'big' is no value"),
    ("a.sh", "echo hello", [], "no options such as --plugin 3d"),
]


@pytest.mark.parametrize(("file", "text", "options", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_cannot_be_read(
    file: str, text: str, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(text)
    assert main(["config", str(tmp_path / file), *options]) == 2
    said: Any = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def test_a_directory_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"shardwright config: {tmp_path} is a directory; name a configuration in it\n"


FUSED = ("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention")
DEFAULTS: list[tuple[str, str, dict[str, Any], dict[str, Any], list[str]]] = [
    (
        "a.json",
        """{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "scheduler": {"type": "WarmupLR",
        "params": {"warmup_type": "linear"}}, "zero_optimization": {"stage": 2, "cpu_offload": true}}""",
        {"zero_stage": 2, "cpu_offload": True},
        {
            "lr_scheduler_type": "constant_with_warmup",
            "max_grad_norm": 0.0,
            "warmup_steps": 1000,
            "learning_rate": 0.001,
        },
        ["train_micro_batch_size_per_gpu", "bf16.enabled"],
    ),
    (
        "a.json",
        """{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 5,
        "warmup_type": "linear"}}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "gradient_clipping": 1, "zero_optimization": {}}""",
        {},
        {
            "lr_scheduler_type": "linear",
            "warmup_steps": 5,
            "optim": "adamw_torch",
            "learning_rate": 2e-4,
            "max_grad_norm": 1,
        },
        ["optimizer.params.lr"],
    ),
    (
        "a.py",
        """TP = 2
layout = dict(tp_size=TP, **dict(pp_size=4))
same = layout
same["zero_stage"] = 1
def main(TP):
    lr = 1e-3
    plugin = HybridParallelPlugin(**layout, precision="bf16", microbatch_size=TP)
    optimizer = HybridAdam(model.parameters(), lr / 2, betas=(0.9, 0.95))
    schedule = CosineAnnealingWarmupLR(optimizer, 500, 20, eta_min=0.1 * lr)
    for group in optimizer.param_groups:
        group["lr"] = 1
layout.update(pp_size=2)
TP = 8
""",
        {"tp_size": 2, "pp_size": 2, "zero_stage": 1},
        {
            "bf16": True,
            "max_grad_norm": 0.0,
            "optim": "hybrid_adam",
            "learning_rate": 5e-4,
            "weight_decay": 0.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "lr_scheduler_type": "cosine",
            "max_steps": 500,
            "warmup_steps": 20,
        },
        ["microbatch_size", "CosineAnnealingWarmupLR.eta_min", "learning_rate"],
    ),
    (
        "a.py",
        "p = HybridParallelPlugin(2, 2, None, 'fp32', 1, True, True, True, *more)\nAdam(x, 1e-4, weight_decay=0.1)",
        {"tp_size": 2, "pp_size": 2, "zero_stage": 1, **dict.fromkeys(FUSED, True)},
        {"optim": "adamw_torch", "learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.0},
        ["*", "Adam.weight_decay"],
    ),
    (
        "a.py",
        "p = MoeHybridParallelPlugin(1, 2, 4, None, 'bf16')\nStepLR(o, 3)\nb = Booster(plugin=p)",
        {"tp_size": 1, "pp_size": 2, "ep_size": 4},
        {"bf16": True, "max_grad_norm": 0.0},
        ["StepLR"],
    ),
    (
        "a.py",
        "p = GeminiPlugin(None, None, 'static', False, 2, 1.0, 1.0, 0.0, 0.8, 0.9, 'bf16', max_norm=1.0)",
        {"zero_stage": 3, "gather_ahead": 2, "cpu_offload": True},
        {"bf16": True, "max_grad_norm": 1.0},
        [],
    ),
    (
        "a.yaml",
        "distributed_type: FSDP\nmixed_precision: fp16\ntpu_env: []\nfsdp_config: {fsdp_offload_params: 'false'}",
        {"zero_stage": 3},
        {"fp16": True},
        ["max_grad_norm"],
    ),
    (
        "a.yaml",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero3_init_flag: false}",
        {"zero_stage": 2},
        {},
        ["max_grad_norm"],
    ),
    (
        "fsdp.json",
        '{"activation_checkpointing": "false", "cpu_offload": "False", "fsdp_use_orig_params": "true"}',
        {"zero_stage": 3},
        {},
        [],
    ),
    (
        "a.py",
        "p = LowLevelZeroPlugin(2, args.precision, cast_inputs=False, master_weights=False)",
        {"zero_stage": 2},
        {"max_grad_norm": 0.0},
        ["precision", "LowLevelZeroPlugin.cast_inputs", "LowLevelZeroPlugin.master_weights"],
    ),
    (
        "a.py",
        "p = GeminiPlugin(precision='bf16', shard_param_frac=0.3, offload_optim_frac=0.5, enable_async_reduce=False)",
        {"zero_stage": 3, "cpu_offload": True, "overlap_communication": False},
        {"bf16": True, "max_grad_norm": 0.0},
        ["GeminiPlugin.shard_param_frac", "GeminiPlugin.offload_optim_frac"],
    ),
    ("a.py", "b = Booster(plugin=TorchDDPPlugin(), mixed_precision='fp16')", {}, {"fp16": True}, ["max_grad_norm"]),
    (
        "a.sh",
        "  # python old.py --tp 8\ntorchrun --nproc_per_node=8 a.py -g -x --plugin zero2 --lr=2e-5 --precision bf16",
        {"zero_stage": 2},
        {"nproc": 8, "bf16": True, "learning_rate": 2e-5},
        ["-g", "-x"],
    ),
    (
        "a.sh",
        "torchrun --nproc_per_node $N train.py --tp 2 --precision fp16",
        {"tp_size": 2},
        {"fp16": True},
        ["--nproc_per_node"],
    ),
]


@pytest.mark.parametrize(("file", "text", "layout", "recipe", "noted"), DEFAULTS)
def test_what_a_file_leaves_to_defaults_or_writes_as_text(
    file: str, text: str, layout: dict[str, Any], recipe: dict[str, Any], noted: list[str], tmp_path: Path
) -> None:
    """The other framework's defaults where they are not those of recipes; "false" is not true; "auto" is named."""
    (tmp_path / file).write_text(text)
    _, found = read_file(tmp_path / file)
    assert (found.layout, found.recipe) == (layout, recipe)
    assert [note.key for note in found.notes] == noted


def test_python_files_are_not_run(tmp_path: Path) -> None:
    text = "import os\nos.remove('x')\nA = 9**9**9\nB = __import__('os')\nC = [1] * 10**9\nD = 2**3 + 1\nE = f'{D}b'\n"
    values, unread = read_assignments(text, "a.py")
    assert values == {"D": 9, "E": "9b"}
    assert [name for name, _ in unread] == ["A", "B", "C"]


def test_positional_arguments_have_the_order_of_colossalai(tmp_path: Path) -> None:
    code = (
        "import inspect, shardwright.compat.colossalai, colossalai.booster.plugin as theirs\n"
        "from shardwright.compat.configs.plugin_arguments import ORDER\n"
        "for name, order in ORDER.items():\n"
        "    assert tuple(inspect.signature(getattr(theirs, name)).parameters)[: len(order)] == order, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    # Scripts are read without that import, which refuses to stand beside an installed Colossal-AI.
    (tmp_path / "a.py").write_text("plugin = LowLevelZeroPlugin(2, 'bf16')")
    code = (
        "import sys; from shardwright.compat.configs import read_file; from pathlib import Path\n"
        "read_file(Path(sys.argv[1])); assert 'shardwright.compat.colossalai' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.py")], check=True)


def test_the_command_offers_what_there_is() -> None:
    """It lists them itself, so that `--help` imports nothing."""
    assert (command.SOURCES, command.TARGETS) == (SOURCES, TARGETS)
