"""A training script that fails on one rank as its argument says; started by torchrun or by the tests themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwright
from shardwright.booster import Booster
from shardwright.cluster.job import current
from shardwright.plugins import HybridParallelPlugin


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Net(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Unreadable(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise OSError("bad file")


def train(how: str) -> None:
    rank = dist.get_rank()
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    begun: list[int] = []  # steps

    def criterion(outputs: torch.Tensor, batch: object) -> torch.Tensor:
        if how == "raise" and rank == 3 and len(begun) == 2:
            raise ValueError("bad batch")
        return outputs.square().mean()

    for step in range(3):
        begun.append(step)
        batch = {"input_ids": torch.ones(4, 4, dtype=torch.int64)}
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def live() -> None:
    """What scripts do that fails nobody: children that are ended, exits that are caught or end a thread only,
    joining a second time.
    """
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
    for how in (3, signal.SIGTERM):
        assert _fork(how) == (-how if how is signal.SIGTERM else how)
    assert os.system("exit 3") == 3 << 8
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    with contextlib.suppress(SystemExit):
        sys.exit(2)
    port = [0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port[0] = free.getsockname()[1]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
    thread = threading.Thread(target=shardwright.launch_from_torch)
    thread.start()
    thread.join()
    job = current()
    assert job is not None
    assert job.wait_for([f"host/{rank}" for rank in range(job.world_size)], 30)
    dist.barrier()


def _fork(how: int) -> int:
    """The exit code of a raw child that ends by itself, as the script would, or by a signal."""
    pid = os.fork()
    if pid == 0:
        if how is signal.SIGTERM:
            os.kill(os.getpid(), how)
        sys.exit(how)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def communicate(how: str) -> None:
    """No model: ranks that meet in one collective after the other."""
    total = torch.ones(3)
    for step in range(3):
        if step == 1 and dist.get_rank() == 2:
            match how:
                case "exit":
                    sys.exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "return":
                    return
                case "sleep":
                    time.sleep(300)
                case "interrupted":
                    raise KeyboardInterrupt
                case "worker":
                    list(DataLoader(Unreadable(), num_workers=1))
                case "loop":
                    raise KeyError("in the loop")
                case "interrupt":
                    print("READY", flush=True)
                    time.sleep(60)
        dist.all_reduce(total)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    shardwright.launch_from_torch(seed=1, timeout=float(os.environ.get("TIMEOUT", "60")))
    if arguments[0] in ("raise", "well"):
        train(arguments[0])
    elif arguments[0] == "live":
        live()
    else:
        communicate(arguments[0])
