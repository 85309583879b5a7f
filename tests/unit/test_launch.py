"""Who this process is, and how it joins the job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright
from shardwright.cluster import environment
from shardwright.cluster.config import load_config
from shardwright.cluster.heart import heart
from shardwright.cluster.launch import _take_device, get_default_parser, resolve_backend
from shardwright.testing import run_ranks
from shardwright.utils.nccl import NCCL

launching = import_module("shardwright.cluster.launch")  # whose name in the package is that of its function

SCRIPT = """
import os, sys, torch, torch.distributed as dist
import shardwright
from shardwright.cluster import DistCoordinator
shardwright.launch_from_torch(seed=3)
shardwright.launch_from_torch(seed=5)  # idempotent: only seeds again
drawn = torch.rand(1)
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
coordinator = DistCoordinator()
with coordinator.priority_execution():
    pass
coordinator.block_all()
if sys.argv[1:] == ["fail"] and coordinator.is_last_process():
    raise KeyError("this rank failed first")
if sys.argv[1:] == ["fail"]:
    dist.all_reduce(total)
# One write, its newline in it: the ranks share a pipe, and an unbuffered print() writes the newline on its own.
place = f"RANK {dist.get_rank()} OF {dist.get_world_size()}"
sys.stdout.write(f"{place} {dist.get_backend()} {int(total)} {drawn.item():.6f}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def clean_environment(**extra: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "TORCHELASTIC_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(launchers)}, **extra}


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("RANK"))


def test_the_same_script_under_python_torchrun_and_slurm(script: str) -> None:
    plain = subprocess.run(
        [sys.executable, script], env=clean_environment(), capture_output=True, text=True, timeout=100, check=True
    )
    [alone] = lines(plain.stdout)
    assert alone.startswith("RANK 0 OF 1 gloo 1")
    drawn = alone.split()[-1]

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    torchrun = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100, check=True)
    assert lines(torchrun.stdout) == [f"RANK {rank} OF 2 gloo 3 {drawn}" for rank in range(2)]

    srun = [
        subprocess.Popen(
            [sys.executable, script],
            env=clean_environment(
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_NTASKS="2",
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_NODELIST="localhost",
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = "".join(process.communicate(timeout=100)[0] for process in srun)
    assert [process.returncode for process in srun] == [0, 0]
    assert lines(printed) == [f"RANK {rank} OF 2 gloo 3 {drawn}" for rank in range(2)]


def test_a_rank_that_raises_ends_all_with_its_traceback_last(script: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, script, "fail"],
            env=clean_environment(
                SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_JOB_ID=str(os.getpid() + 7), SLURM_NODELIST="localhost"
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert all(process.returncode != 0 for process in processes)
    assert errors[1].strip().splitlines()[-1] == "KeyError: 'this rank failed first'"
    assert errors[1].startswith("rank 1 failed first: KeyError: 'this rank failed first'\n")
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL gloo may have words of its own about the rank that is gone.
    own = [line for line in errors[0].strip().splitlines() if not line.startswith("[rank0]:[E")]
    assert own == ["rank 0 stopped: rank 1 failed first: KeyError: 'this rank failed first'"]


def test_identity_from_each_launcher() -> None:
    torchrun = environment.detect(
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    )
    assert (torchrun.rank, torchrun.world_size, torchrun.local_rank, torchrun.host, torchrun.port) == (3, 8, 1, "a", 1)
    srun = environment.detect(
        {"SLURM_PROCID": "5", "SLURM_NPROCS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[07-09],x"}
    )
    assert (srun.rank, srun.world_size, srun.local_rank, srun.host, srun.port) == (5, 8, 1, "gpu07", 15000)
    mpirun = environment.detect(
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    )
    assert (mpirun.rank, mpirun.world_size, mpirun.local_rank, mpirun.host) == (1, 2, 1, "127.0.0.1")
    assert environment.detect({}).world_size == 1
    with pytest.raises(ValueError, match="SLURM_PROCID"):
        environment.from_slurm({})
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK"):
        environment.from_openmpi({})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-006,9],cpu1", "gpu003"), ("a,b", "a"), ("n[1-2].example", "n1.example"), ("localhost", "localhost")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert environment.first_host(nodes) == host


def test_a_device_that_the_launcher_dealt_out_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # srun --gpus-per-task=1
    _take_device(3, explicit=True)
    assert taken == [0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # all ranks see the same one
    with pytest.raises(ValueError, match="local_rank=3 needs 4 CUDA devices"):
        _take_device(3, explicit=True)


@pytest.mark.parametrize(
    ("config", "set_by_user", "started", "expected"),
    [
        ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, None, False, "1"),
        ({"parallel": {"tensor": 4}}, None, False, "1"),
        ({"parallel": {"tensor": 4}}, "8", False, "8"),
        ({"parallel": {"tensor": 4}}, None, True, None),  # too late, CUDA has read it
        ({"parallel": {"tensor": {"size": 1}, "pipeline": 2}}, None, False, None),
        ({}, None, False, None),
    ],
)
def test_tensor_parallel_jobs_start_kernels_in_order(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    set_by_user: str | None,
    started: bool,
    expected: str | None,
) -> None:
    monkeypatch.setattr(launching, "resolve_backend", lambda backend: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(launching, "_take_device", _stop)
    monkeypatch.setattr(launching.groups, "keep_out_of_forks", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setenv(launching.ONE_QUEUE, set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv(launching.ONE_QUEUE)
    with pytest.raises(KeyboardInterrupt):  # where CUDA would start
        launching.launch(0, 1, None, None, config=config)
    assert os.environ.get(launching.ONE_QUEUE) == expected


def test_nccl_is_told_to_end_hanging_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "resolve_backend", lambda backend: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(launching, "_take_device", _stop)
    monkeypatch.setattr(launching.groups, "keep_out_of_forks", lambda: None)
    for name in NCCL:
        monkeypatch.setenv(name, "")  # so that it is as before behind this test
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")  # the user's own stays
    with pytest.raises(KeyboardInterrupt):
        launching.launch(0, 1, None, None)
    assert {name: os.environ.get(name) for name in NCCL} == {**NCCL, "TORCH_FR_BUFFER_SIZE": "7"}


def _stop(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "fake"])
def test_an_explicit_backend_is_honoured(backend: str) -> None:
    assert resolve_backend(backend) == backend


@pytest.mark.parametrize(
    ("backend", "words"), [("glooo", "did you mean 'gloo'"), ("mpi", "'nccl', 'gloo'"), ("cuda:hccl", "'hccl'")]
)
def test_an_unknown_backend_is_refused(backend: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_backend(backend)


def test_config_forms(tmp_path: Path) -> None:
    parallel = {"data": 1, "pipeline": 1, "tensor": {"size": 2, "mode": "1d"}}
    assert load_config({"parallel": parallel}) == {"parallel": parallel}
    path = tmp_path / "config.py"
    path.write_text(
        "import math\nparallel = dict(data=1, pipeline=1, tensor=dict(size=2, mode='1d'))\n_private = "
        "3\nclip = math.pi\n"
    )
    assert load_config(path) == {"parallel": parallel, "clip": 3.141592653589793}
    assert load_config(None) == {}
    bad: list[tuple[Any, str]] = [
        ("missing.py", "existing Python file"),
        (3, "dict or the path"),
        ({"parallel": 4}, "must be a dict"),
    ]
    for config, words in bad:
        with pytest.raises(ValueError, match=words):
            load_config(config)


def test_the_default_parser_knows_what_launch_needs() -> None:
    args = get_default_parser().parse_args(
        ["--host", "h", "--port", "1", "--world_size", "2", "--rank", "1", "--config", "c.py"]
    )
    assert (args.host, args.port, args.world_size, args.rank, args.config, args.backend, args.local_rank) == (
        "h",
        1,
        2,
        1,
        "c.py",
        None,
        None,
    )


def _launched_again(rank: int, world: int) -> list[Any]:
    """What is given of a step's time, and of that between two, after each call."""
    found = []
    steps = ({"step_timeout": 30}, {}, {"seed": 7}, {"step_timeout": 40}, {"step_timeout": None}, {})
    for given in (*steps, {"idle_timeout": 9}, {"step_timeout": 5}, {}):
        shardwright.launch(rank, world, None, None, **given)  # type: ignore[arg-type]
        found.append((heart.budgets.given, heart.budgets.idle))
    return found


def test_a_second_call_keeps_what_it_does_not_name() -> None:
    assert (
        run_ranks(_launched_again, 2, timeout=60)
        == [[*((step, None) for step in (30, 30, 30, 40, None, None)), (None, 9), (5, 9), (5, 9)]] * 2
    )


@pytest.mark.usefixtures("no_launcher")
def test_a_job_does_not_begin_with_the_idle_time_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "since", time.monotonic() - 60)
    assert heart.idle() > 50
    shardwright.launch(0, 1, None, None, backend="gloo")
    assert heart.idle() == 0


def test_tracebacks_have_one_prefix_behind_several_jobs(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from shardwright import launch\n"
        "for _ in range(3):\n"
        "    launch(0, 1, None, None, backend='gloo')\n"
        "    dist.destroy_process_group()\n"
        "raise ValueError('at last')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode
    assert "[rank0]: ValueError: at last" in done.stderr
    assert "[rank0]: [rank0]" not in done.stderr
