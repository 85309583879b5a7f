"""Files for SLURM, Ray and SkyPilot: what stands in them, that the shell of one does what it says, and refusals."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import main
from shardwright.utils.nccl import NCCL


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: x\n")
    (tmp_path / "train.py").write_text("")
    return tmp_path


TRAIN = ("--", "shardwright", "train", "recipe.yaml", "max_steps=9")
# What the file of a job calls; ranks that get TERM write a checkpoint and fail, as interrupted runs do.
STUBS = {
    "scontrol": '[ "$1" = show ] && echo "node7\nnode8" || echo "$*" >> calls',
    "srun": 'echo "$*" > srun-called\nexec sleep-and-save',
    "sleep-and-save": "trap 'sleep 0.3; echo saved > checkpoint; exit 143' TERM\ntouch started\n"
    "while :; do sleep 0.05; done",
}


def test_slurm_saves_and_asks_for_another_turn(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "4", "--partition", "gpu", "--time", "1-00", "--max-turns", "3"]
    more = [
        "--env",
        "HF_HOME=/data/h f",
        "--setup",
        'touch was-set-up; echo "$NOT_SET"',
        "--cpus-per-node",
        "32",
        "--sbatch",
        "exclusive",
        "--output",
        "job.sh",
    ]
    assert main(["launch", "slurm", *options, *more, *TRAIN]) == 0
    assert capsys.readouterr().out == "wrote job.sh; start it with: sbatch job.sh\n"
    text = Path("job.sh").read_text()
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "requeue", "signal=B:USR1@300"} < set(lines)
    assert {"partition=gpu", "exclusive", "time=1-00"} < set(lines)
    assert {f"export {name}={value}" for name, value in NCCL.items()} < set(text.splitlines())
    assert text.index("#SBATCH --exclusive") < text.index("set -uo pipefail"), "SLURM reads up to the first command"
    for name, stub in STUBS.items():
        (recipe / name).write_text(f"#!/bin/bash\n{stub}\n")
        (recipe / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "PATH": f"{recipe}:{os.environ['PATH']}"}
    for turn, requeued in ((0, True), (2, False)):
        for left in ("started", "calls", "checkpoint"):
            (recipe / left).unlink(missing_ok=True)
        with subprocess.Popen(
            ["bash", "job.sh"], env=os.environ | variables | {"SLURM_RESTART_COUNT": str(turn)}
        ) as job:
            until = time.monotonic() + 60
            while not (recipe / "started").exists():
                assert time.monotonic() < until
                time.sleep(0.02)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(60) == 143
        assert (recipe / "checkpoint").read_text() == "saved\n", "the job has waited for it"
        assert (recipe / "calls").exists() == requeued
    called = (recipe / "srun-called").read_text()
    assert "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=node7:24711 --rdzv-id=4711-2" in called
    assert called.endswith("-m shardwright.cli train recipe.yaml max_steps=9 resume=true\n")
    assert called.startswith("--wait=300 --cpus-per-task=32 torchrun "), "srun does not take it from sbatch"
    assert (recipe / "was-set-up").exists()
    assert "export HF_HOME='/data/h f'" in text


def test_a_job_that_fails_by_itself_is_not_started_again(recipe: Path) -> None:
    assert main(["launch", "slurm", "--output", "job.sh", *TRAIN]) == 0
    for name, stub in {**STUBS, "sleep-and-save": "exit 3"}.items():
        (recipe / name).write_text(f"#!/bin/bash\n{stub}\n")
        (recipe / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n", "PATH": f"{recipe}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "job.sh"], env=os.environ | variables, timeout=60, check=False).returncode == 3
    assert not (recipe / "calls").exists()


def test_skypilot(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "3", "--accelerator", "A100-80GB", "--spot", "--infra", "aws", "--mount", "/out=s3://mine"]
    assert main(["launch", "skypilot", *options, "--", "python", "train.py", "--lr", "a b"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert task["resources"] == {"accelerators": "A100-80GB:8", "infra": "aws", "use_spot": True}
    assert task["num_nodes"] == 3
    assert task["file_mounts"] == {"/out": {"source": "s3://mine", "mode": "MOUNT"}}
    assert task["run"].splitlines()[1].endswith("--master-port=29500 train.py --lr 'a b'")
    assert all(isinstance(value, str) for value in task["envs"].values())


def test_ray(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "4", "--cpus-per-node", "16"]
    assert main(["launch", "ray", *options, *TRAIN]) == 0
    said = {}
    for node in ast.parse(capsys.readouterr().out).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            said[node.targets[0].id] = ast.literal_eval(node.value)
    assert said["BUNDLE"] == {"CPU": 16.0}
    assert said["OPTIONS"] == ["--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d"]
    assert said["COMMAND"] == ["-m", "shardwright.cli", *TRAIN[2:], "resume=true"]


def test_a_resume_of_the_users_is_kept(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", *TRAIN, "--resume=out/step-3"]) == 0
    assert "max_steps=9 --resume=out/step-3 &" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["slurm"], "there is nothing to start; end with -- shardwright train"),
        (["slurm", "--nodes", "0", *TRAIN], "--nodes 0 is too small"),
        (["slurm", "--gpus-per-node", "0", *TRAIN], "needs --ranks-per-node"),
        (["slurm", "--ranks-per-node", "4", *TRAIN], "there is a rank per GPU"),
        (["slurm", "--time", "tomorrow", *TRAIN], "is no time of SLURM"),
        (["slurm", "--time", "5:00", *TRAIN], "is not longer than --grace 300"),
        (["slurm", "--partition", "a\nb", *TRAIN], "must be one line"),
        (["slurm", "--env", "HF_HOME", *TRAIN], "is not NAME=VALUE"),
        (["slurm", "--name", "a b", *TRAIN], "letters, digits"),
        (["slurm", "--output", "train.py", *TRAIN], "exists; name another file, or add --force"),
        (["slurm", "--", "shardwright", "train", "recip.yaml"], "no such file - did you mean 'recipe.yaml'?"),
        (["slurm", "--", "shardwright", "doctor"], "train RECIPE.yaml is the one"),
        (["slurm", "recipe.yaml"], "for a recipe say -- shardwright train recipe.yaml"),
        (["ray", "--", "bash", "x.sh"], "torchrun starts one of these on every rank"),
        (["ray", "--max-turns", "0", *TRAIN], "--max-turns 0 is too small"),
        (["skypilot", "--accelerator", "H100:8", *TRAIN], "how many is said by --gpus-per-node"),
        (["skypilot", "--mount", "s3://mine", *TRAIN], "is not PATH=BUCKET"),
    ],
)
def test_refusals(recipe: Path, capsys: pytest.CaptureFixture[str], options: list[Any], said: str) -> None:
    assert main(["launch", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shardwright launch {options[0]}: ")
    assert said in line
