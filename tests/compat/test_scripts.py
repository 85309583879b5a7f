"""A script of Colossal-AI's users, as it is, comes to the losses and weights of plain transformers in one process."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import shardwright.compat.colossalai  # noqa: F401 - for the script's own imports
from tests.forked_scripts import environment, run_forked

HERE = Path(__file__).parent
SCRIPT = HERE / "scripts" / "finetune.py"

# Arguments of a run, and the number of its data-parallel ranks.
RUNS: dict[str, tuple[list[str], int]] = {
    "llama-tp": (["--plugin", "hybrid_parallel", "--model", "llama", "--tp", "2", "--lazy"], 1),
    "gpt2-pp": (["--plugin", "hybrid_parallel", "--model", "gpt2", "--pp", "2"], 1),
    "bert-pp": (["--plugin", "hybrid_parallel", "--model", "bert", "--pp", "2"], 1),
    "llama-gemini": (["--plugin", "gemini", "--model", "llama"], 2),
    "bert-zero": (["--plugin", "low_level_zero", "--model", "bert"], 2),
    "gpt2-ddp": (["--plugin", "torch_ddp", "--model", "gpt2"], 2),
    "llama-fsdp": (["--plugin", "torch_fsdp", "--model", "llama"], 2),
}

# Runs that share their processes, whose start takes longer than they do.
TOGETHER = (
    ("llama-tp", "gpt2-pp", "bert-pp"),
    ("llama-gemini", "bert-zero", "gpt2-ddp", "llama-fsdp"),
)


def plain(script: dict[str, Any], arguments: list[str], ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training by torch and transformers alone, where the loss is the mean of those of
    the data-parallel ranks.

    eps is large enough for biases of keys, whose gradient is zero but for rounding, to stay where they are.
    """
    plugin, name = arguments[1], arguments[3]
    torch.manual_seed(42)
    lazy = script["LazyInitContext"]
    with lazy() if "--lazy" in arguments else nullcontext():
        model = script["build_model"](name, script["CONFIGS"][name])
    lazy.materialize(model)
    data = script["RandomDataset"](name)
    decays = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm.weight" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm.weight" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )
    per_step = 2 * ranks
    steps = len(data) // per_step
    if name == "bert":
        scheduler = script["get_linear_schedule_with_warmup"](optimizer, 1, steps)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: (
                (step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / (steps - 2)))
            ),
        )
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for rank in range(ranks):
            rows = range(step * per_step + rank, (step + 1) * per_step, ranks)
            batch = {key: torch.stack([data[row][key] for row in rows]) for key in data[0]}
            loss = model(**batch).loss / ranks
            loss.backward()
            total += loss.detach()
        if plugin not in ("torch_ddp", "torch_fsdp"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(total))
    return losses, model.state_dict()


@pytest.mark.parametrize("names", TOGETHER, ids=["hybrid", "data-parallel"])
def test_scripts_train_as_plain_transformers_does(names: tuple[str, ...], tmp_path: Path) -> None:
    runs = [[*RUNS[name][0], "--output", name] for name in names]
    codes, printed = run_forked(2, HERE / "run.py", str(SCRIPT), json.dumps(runs), cwd=tmp_path)
    assert codes == [0, 0], printed
    script = runpy.run_path(str(SCRIPT))
    for output in names:
        arguments, ranks = RUNS[output]
        losses, weights = plain(script, arguments, ranks)
        found = json.loads((tmp_path / f"{output}.json").read_text())
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        auto = AutoModelForSequenceClassification if "bert" in arguments else AutoModelForCausalLM
        trained = auto.from_pretrained(tmp_path / output).state_dict()
        for key, weight in weights.items():
            torch.testing.assert_close(
                trained[key], weight, rtol=1e-5, atol=1e-5, msg=lambda text, at=(output, key): f"{at}: {text}"
            )
        assert (tmp_path / f"{output}.safetensors").is_file()


def test_the_command_runs_a_script_and_names_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport colossalai, beside\nfrom colossalai.cluster import DistCoordinator\n"
        "colossalai.launch_from_torch(seed=1)\nassert DistCoordinator().is_master() and beside.VALUE == 3\n"
        "print(__name__, sys.argv[1:])\nfrom colossalai.nn.optimizer import Lamb\n"
    )
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    command = [sys.executable, "-m", "shardwright.compat.colossalai", str(script), "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "__main__ ['--lr', '1']", done.stderr
    assert done.returncode == 1
    assert "colossalai.nn.optimizer.Lamb is not offered by shardwright.compat.colossalai: use HybridAdam" in done.stderr
