"""The examples run as their documentation says, on CPU ranks with tiny settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BERT = ("bert/finetune.py", "--tiny", "--epochs", "1", "--batch-size", "8", "--lr", "1e-3")
LLAMA = ("llama/benchmark.py", "--config", "tiny", "--steps", "3", "--ignore-steps", "1", "--max-length", "16")


def run(ranks: int, script: str, *options: str, cwd: Path) -> str:
    """What the script prints, on all ranks together."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *options]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def accuracy(printed: str) -> float:
    found = re.search(r"accuracy (\d\.\d+)", printed)
    assert found, printed
    return float(found[1])


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp", "low_level_zero"])
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


def test_llama_benchmark(tmp_path: Path) -> None:
    options = ("--plugin", "3d", "--tp", "2", "--pp", "2", "--zero", "1", "--grad-checkpoint")
    assert re.search(r"[1-9][\d,]* tokens/s", run(4, *LLAMA, *options, cwd=tmp_path))


@pytest.mark.parametrize("plugin", ["zero", "fsdp", "ddp"])
def test_llama_benchmark_with_other_plugins(plugin: str, tmp_path: Path) -> None:
    assert "tokens/s" in run(1, *LLAMA, "--plugin", plugin, cwd=tmp_path)


def test_pretraining_learns_and_saves(tmp_path: Path) -> None:
    printed = run(2, "llama/pretrain.py", "--steps", "30", "--output", "trained", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < losses[0] / 2
    code = "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained('trained').num_parameters())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
