"""Trains a tiny model on the ranks that a launcher started and does one thing wrong, which its arguments name; the
parts of the fault matrix that need real processes.

    python faulty_script.py LAYOUT FAULT RANK STEP DIRECTORY
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwright
from shardwright.booster import Booster
from shardwright.comm.p2p import PipeComm
from shardwright.files import disk
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

STEPS = 8
LAYOUTS: dict[str, Any] = {
    "pp2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"),
    "tp2": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "tp2pp2": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2, precision="fp32"),
    "dp2": lambda: HybridParallelPlugin(zero_stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "zero3": lambda: LowLevelZeroPlugin(stage=3, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}


def model_and_batch() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 16}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **sizes)

    def batch(step: int, size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(32, (size, 8), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids.clone()}

    return LlamaForCausalLM(config), batch


def commit(fault: str, model: Any, optimizer: Any) -> None:
    """What this rank does wrong in its own code between two steps."""
    match fault:
        case "kill" | "kill while away":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" | "stop first":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pause":  # a debugger, a swapping machine
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        case "sleep" | "sleep all":
            time.sleep(300)
        case "slow":
            time.sleep(1)
        case "spin":
            while True:
                sum(range(1000))
        case "deaf":  # a call in C that does not return
            ctypes.PyDLL(None).sleep(300)
        case "raise":
            raise KeyError("in the loop")
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            sys.exit(3)
        case "leave":
            raise StopIteration
        case "nan":
            weights = [param for name, param in model.named_parameters() if "down_proj" in name and param.numel()]
            weights[-1].data.view(-1)[0] = float("nan")
        case "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        case "weights":
            list(model.parameters())[-1].data.view(-1)[0] += 1
        case "nan gradient":
            weights = [param for name, param in model.named_parameters() if "down_proj" in name]
            weights[-1].register_hook(lambda grad: grad * float("nan"))
        case "kill in step" | "terminate in step":
            number = signal.SIGKILL if "kill" in fault else signal.SIGTERM
            layers = [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]
            layers[-1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), number))


class Rows(Dataset[Any]):
    """Batches that a worker process of this rank reads, until one of them ends it or holds it up."""

    def __init__(self, read: Callable[[int], Any], fault: str, when: int, directory: Path) -> None:
        self.read, self.fault, self.when, self.directory = read, fault, when, directory

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        step = index + 1
        if step == self.when:
            (self.directory / "worker").write_text(str(os.getpid()))
            match self.fault:
                case "worker sleeps":
                    time.sleep(300)
                case "worker killed":
                    time.sleep(2)  # it reads ahead of the steps
                    os.kill(os.getpid(), signal.SIGKILL)
                case "worker raises":
                    raise OSError("bad file")
        return self.read(step)


def begin_badly(fault: str) -> None:
    """What is wrong with this rank before the job begins."""
    match fault:
        case "seed":
            torch.manual_seed(7)
        case "version":
            import transformers

            transformers.__version__ = "4.0.0"
        case "message":  # a memory or a network that changes bits
            encode = PipeComm._encode
            PipeComm._encode = lambda *args: _changed(encode(*args))  # type: ignore[method-assign]


def _changed(wire: Any) -> Any:
    wire[-1][5] = 0
    return wire


def broken_disk(fault: str) -> None:
    """What the disk of this rank does in the middle of writing a checkpoint."""

    writes: list[Path] = []

    def probe(operation: str, path: Path) -> None:
        if operation == "half-way write":
            match fault:
                case "full disk":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                case "read-only disk":
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                case "kill in save":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop in save":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "terminate in save":
                    os.kill(os.getpid(), signal.SIGTERM)
                case "slow disk":
                    writes.append(path)
                    time.sleep(len(writes) <= 3)

    disk.set_probe(probe)


def main() -> None:
    layout, fault, culprit, when, directory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    if fault == "stop first":
        when = 1
    limit = float(os.environ.get("STEP_TIMEOUT", "3"))
    taken = socket.socket()
    if fault == "port" and os.environ["SLURM_PROCID"] == "0":
        taken.bind(("", int(os.environ["MASTER_PORT"])))
        taken.listen()
    shardwright.launch_from_torch(
        seed=1,
        timeout={"port": 10, "stop first": 20}.get(fault, 60),
        step_timeout=limit,
        idle_timeout=limit if fault == "sleep all" else None,
    )
    rank = torch.distributed.get_rank()
    is_culprit = rank == culprit
    if is_culprit:
        begin_badly(fault)
    plugin = LAYOUTS[layout]()
    names = "name" if fault.startswith("nan") else None
    booster = Booster(plugin=plugin, on_nan="stop", check_replicas=1, detect_anomaly=names)
    model, batch_of = model_and_batch()
    rate = 0.02 if is_culprit and fault == "argument" else 0.01
    if is_culprit and fault in ("stop in boost", "kill in boost"):
        number = signal.SIGKILL if "kill" in fault else signal.SIGSTOP
        type(plugin).lay_out = lambda *_: os.kill(os.getpid(), number)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=rate))
    count, place = plugin.data_parallel

    def criterion(outputs: Any, batch: Any) -> torch.Tensor:
        if is_culprit and fault == "criterion" and step == when:
            raise ValueError("in the criterion")
        loss: torch.Tensor = outputs.loss
        return loss

    def share_of(step: int) -> dict[str, torch.Tensor]:
        return {name: value.chunk(count)[place] for name, value in batch_of(step, 4).items()}

    if fault.startswith("worker"):
        rows = Rows(share_of, fault, when if is_culprit else 0, Path(directory))
        batches: Iterator[Any] = iter(DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    else:
        batches = map(share_of, itertools.count(1))
    for step in range(1, STEPS + 1):
        if (is_culprit or fault == "sleep all") and step == when:
            broken_disk(fault)
            try:
                commit(fault, model.unwrap(), optimizer)
            except StopIteration:
                break
        batch = next(batches)
        if not is_culprit and fault == "kill while away" and step == when:
            time.sleep(300)
        if is_culprit and fault == "batch" and step == when:
            batch = {name: value[:, :5] for name, value in batch.items()}
        if fault == "nan batch":
            seen = torch.ones(*batch["input_ids"].shape, 16)
            batch = {"inputs_embeds": seen * (float("nan") if is_culprit and step == when else step), **batch}
            del batch["input_ids"]
        if isinstance(plugin, HybridParallelPlugin):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        if fault.endswith("clip"):
            if is_culprit and step == when:
                commit(fault.split()[0], model, optimizer)
            optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3 and ("disk" in fault or "save" in fault or "damage" in fault):
            booster.save(Path(directory) / f"step-{step}", model=model, optimizer=optimizer, step=step)
        (Path(directory) / f"rank-{rank}").write_text(str(step))
    if fault == "damaged":
        look_for_the_newest(booster, Path(directory), is_culprit, model=model, optimizer=optimizer)
    end(fault, is_culprit)


def end(fault: str, is_culprit: bool) -> None:
    if fault == "stop at the end":
        if is_culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # the others come to their end behind that
    print("trained", flush=True)


def look_for_the_newest(booster: Booster, directory: Path, damages: bool, **state: Any) -> None:
    """The newest checkpoint has lost the end of a file: the one before is loaded."""
    if damages:
        file = max((directory / f"step-{STEPS}").glob("*.safetensors"), key=lambda file: file.stat().st_size)
        os.truncate(file, file.stat().st_size - 4)
    torch.distributed.barrier()
    loaded = booster.load(directory, **state)
    print(f"went back to step {loaded['step']}", flush=True)


if __name__ == "__main__":
    main()
