"""The examples run as their documentation says, on CPU ranks with tiny settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_scripts import ROOT, environment, run_forked

BERT = ("bert/finetune.py", "--tiny", "--epochs", "1", "--batch-size", "8")
LLAMA = ("llama/benchmark.py", "--tiny", "--steps", "3", "--ignore-steps", "1", "--max-length", "16")


def run(ranks: int, script: str, *options: str, cwd: Path) -> str:
    """What the script prints, on all ranks together."""
    codes, printed = run_forked(ranks, ROOT / "examples" / script, *options, cwd=cwd)
    assert codes == [0] * ranks, f"{script} {' '.join(options)}: {codes}\n{printed}"
    return printed


def run_by_torchrun(ranks: int, script: str, *options: str, cwd: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *options]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def accuracy(printed: str) -> float:
    found = re.search(r"accuracy (\d\.\d+)", printed)
    assert found, printed
    return float(found[1])


@pytest.mark.parametrize("plugin", ["torch_fsdp", "low_level_zero"])
def test_bert_on_two_ranks(plugin: str, tmp_path: Path) -> None:
    printed = run(2, *BERT, "--plugin", plugin, "--model_type", "bert", "--target_f1", "0", cwd=tmp_path)
    assert 0 <= accuracy(printed) <= 1
    assert re.search(r"f1 [01]\.\d+", printed), printed


def test_bert_with_tensor_parallelism_and_pipelines(tmp_path: Path) -> None:
    assert 0 <= accuracy(run(4, *BERT, "--plugin", "hybrid_parallel", cwd=tmp_path)) <= 1


def test_bert_on_one_rank_and_on_a_pipeline_come_to_the_same(tmp_path: Path) -> None:
    options = ("--plugin", "hybrid_parallel", "--tp", "1", "--precision", "fp32")
    alone = run(1, *BERT, *options, "--pp", "1", cwd=tmp_path)
    assert accuracy(alone) == accuracy(run(2, *BERT, *options, "--pp", "2", cwd=tmp_path))


def test_plugins_that_are_compared_come_to_the_same(tmp_path: Path) -> None:
    options = ("--plugin", "torch_ddp", "hybrid_parallel", "--tp", "2", "--pp", "1", "--precision", "fp32")
    printed = run(2, *BERT, *options, "--epochs", "3", "--batch-size", "4", "--target_f1", "0.86", cwd=tmp_path)
    assert "apart by: accuracy 0.000, f1 0.000" in printed


def test_llama_benchmark(tmp_path: Path) -> None:
    options = ("--plugin", "3d", "--tp", "2", "--pp", "2", "--zero", "1", "--grad-checkpoint")
    assert re.search(r"[1-9][\d,]* tokens/s", run(4, *LLAMA, *options, cwd=tmp_path))


@pytest.mark.timeout(300)  # imports of every rank and of torchrun, on a busy machine
@pytest.mark.parametrize("plugin", ["zero", "fsdp", "ddp"])
def test_llama_benchmark_with_other_plugins(plugin: str, tmp_path: Path) -> None:
    run_it = run_by_torchrun if plugin == "zero" else run
    assert "tokens/s" in run_it(1, *LLAMA, "--plugin", plugin, cwd=tmp_path)


@pytest.mark.timeout(300)
def test_pretraining_learns_and_saves(tmp_path: Path) -> None:
    printed = run_by_torchrun(
        2, "llama/pretrain.py", "--tiny", "--tp", "2", "--steps", "30", "--output", "trained", cwd=tmp_path
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < losses[0] / 2
    code = "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained('trained').num_parameters())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
