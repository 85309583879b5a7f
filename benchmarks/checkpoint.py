"""Checkpoints against plain writes, safetensors and torch.distributed.checkpoint: the same bytes, one alternating run,
medians.

    python benchmarks/checkpoint.py                     # one process, 384 MB: fp32 weights and two moments
    python benchmarks/checkpoint.py --megabytes 1536 --rounds 5 --directory /scratch

Every way of saving ends with its data on the disk (fsync). "raw" writes one buffer front to back; ours also computes
checksums, a manifest and the marker, and publishes by renames. Memory is the growth of the process's peak while saving.
The stall of an asynchronous save is what a step waits for; the step beside it is forward, backward and AdamW of the
same model on 64 x 8 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright import Booster

MB = 1 << 20


class Job:
    """A model of `megabytes` with its AdamW moments, and all ways of bringing them to disk and back."""

    def __init__(self, megabytes: int, root: Path) -> None:
        width = 1024
        layers = max(megabytes * MB // (3 * 4 * width * width), 1)
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.booster = Booster(device="cpu")
        self.model, self.optimizer, *_ = self.booster.boost(module, torch.optim.AdamW(module.parameters(), fused=True))
        self.rows = torch.randn(512, width)
        self.step()
        self.root = root
        self.bytes = sum(tensor.numel() * tensor.itemsize for tensor in self.tensors().values())

    def step(self) -> None:
        self.model(self.rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        states = {
            f"{key}.{name}": value
            for name, param in named.items()
            for key, value in self.optimizer.state[param].items()
        }
        return {**{name: param.detach() for name, param in named.items()}, **states}

    def place(self, name: str) -> Path:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

    # Saving.

    def raw(self) -> None:
        with self.place("raw").open("wb", buffering=0) as file:
            for tensor in self.tensors().values():
                view = tensor.reshape(-1).view(torch.uint8).numpy().data
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def safetensors(self) -> None:
        path = self.place("safetensors")
        save_file(self.tensors(), path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def dcp(self) -> None:
        writer = dcp.FileSystemWriter(self.place("dcp"), single_file_per_rank=True, sync_files=True)
        dcp.save(self.tensors(), storage_writer=writer, no_dist=True)

    def ours(self) -> None:
        self.booster.save(self.place("ours"), model=self.model, optimizer=self.optimizer)

    def ours_async(self) -> None:
        self.booster.save(self.place("async"), model=self.model, optimizer=self.optimizer, use_async=True)

    # Loading, into tensors that exist.

    def load_safetensors(self) -> None:
        loaded = load_file(self.root / "safetensors")
        for name, tensor in self.tensors().items():
            tensor.copy_(loaded[name])

    def load_dcp(self) -> None:
        dcp.load(self.tensors(), storage_reader=dcp.FileSystemReader(self.root / "dcp"), no_dist=True)

    def load_ours(self) -> None:
        self.booster.load(self.root / "ours", model=self.model, optimizer=self.optimizer)

    def load_ours_unverified(self) -> None:
        self.booster.load(self.root / "ours", model=self.model, optimizer=self.optimizer, verify=False)


def peak_growth(function: Callable[[], None]) -> float:
    """Megabytes by which the process's peak memory grows over what it has before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(megabytes: int, rounds: int, directory: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory, prefix="shardwright-checkpoint-") as root:
        job = Job(megabytes, Path(root))
        saves = {"raw": job.raw, "safetensors": job.safetensors, "dcp": job.dcp, "ours": job.ours}
        loads = {
            "safetensors": job.load_safetensors,
            "dcp": job.load_dcp,
            "ours": job.load_ours,
            "ours, unverified": job.load_ours_unverified,
        }
        times: dict[str, list[float]] = {}
        memory = {name: peak_growth(save) for name, save in saves.items()}  # also the warm-up
        for _ in range(rounds):
            for name, save in saves.items():
                times.setdefault(f"save {name}", []).append(seconds(save))
            for name, load in loads.items():
                times.setdefault(f"load {name}", []).append(seconds(load))
            times.setdefault("step", []).append(seconds(job.step))
            times.setdefault("async stall", []).append(seconds(job.ours_async))
            job.booster.wait()
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "megabytes": round(job.bytes / MB, 1),
            "rounds": rounds,
            "MB/s": {
                name: round(job.bytes / MB / value)
                for name, value in medians.items()
                if name.startswith(("save", "load"))
            },
            "save, of raw": round(medians["save raw"] / medians["save ours"], 2),
            "seconds": {name: round(medians[name], 3) for name in ("step", "async stall")},
            "peak memory growth, MB": {name: round(value, 1) for name, value in memory.items()},
            "largest tensor, MB": round(
                max(tensor.numel() * tensor.itemsize for tensor in job.tensors().values()) / MB, 1
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write; default: the directory for temporary files")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.megabytes, arguments.rounds, arguments.directory), indent=2))


if __name__ == "__main__":
    main()
