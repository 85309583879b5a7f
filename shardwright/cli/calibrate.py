"""`shardwright calibrate`: what operators, collectives and messages take on this machine, for `shardwright plan`."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .outputs import problem_with
from .relaunch import inside_launcher, relaunch

HELP = "measure operators, collectives and messages on this machine, for the times of shardwright plan"

# torch, and what imports it, is imported in functions, so that `--help` answers at once.

_CPU_RANKS = 4
_POWERS = {"cpu": range(10, 25, 2), "cuda": range(12, 29, 2)}  # bytes of collectives and messages
_TOKENS = 8  # so few that a layer has hardly anything to compute
_NOTHING = {"layer": 0.0, "around": 0.0, "step": 0.0}  # of a rank for which there is no core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("calibration.json"), metavar="FILE", help="where the figures go"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, each measured for a shorter time")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes the GPUs if there are any"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"ranks for collectives and messages (default: one per GPU, at most 8, or {_CPU_RANKS} on a CPU); 1: none",
    )


def run(args: argparse.Namespace) -> int:
    if inside_launcher():
        return _measure(args)
    problem = problem_with(args.output)
    if problem:
        print(f"shardwright calibrate: --output {problem}", file=sys.stderr)
        return 1
    gpus = 0 if args.device == "cpu" else _count_gpus()
    if args.device == "cuda" and not gpus:
        print("shardwright calibrate: --device cuda, but torch sees no CUDA device here; use cpu", file=sys.stderr)
        return 1
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ranks = getattr(args, "world_size", min(gpus, 8) if gpus else _CPU_RANKS)
    if ranks < 1 or (gpus and ranks > gpus):
        limit = f", and at most the number of GPUs, {gpus}" if gpus else ""
        print(
            f"shardwright calibrate: --world-size {ranks} must be at least 1{limit}",
            file=sys.stderr,
        )
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets for the ranks of a job
    words = ["calibrate", "-o", str(args.output.resolve()), "--device", "cuda" if gpus else "cpu"]
    return relaunch([*words, *(["--quick"] if args.quick else [])], ranks)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _measure(args: argparse.Namespace) -> int:
    """On every rank; the first one writes."""
    import torch
    import torch.distributed as dist

    from ..cluster.launch import launch_from_torch
    from ..planner import measure
    from ..planner.calibration import Calibration, write
    from ..planner.measure_links import links
    from ..planner.measure_steps import shares
    from ..utils.errors import counted

    torch.set_num_threads(1)
    launch_from_torch(backend="nccl" if args.device == "cuda" else "gloo")
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()

    def say(what: str) -> None:
        if rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    size = measure.SIZES[device.type]
    powers = _POWERS[device.type]
    if args.quick:
        size, powers = size.shorter(), powers[::2]
    collectives, messages = links(device, powers, say) if world > 1 else ({}, [])
    meeting: list[Any] = [tempfile.mkdtemp(prefix="shardwright-calibrate-") if rank == 0 else None]
    if rank == 0:
        atexit.register(shutil.rmtree, meeting[0], ignore_errors=True)  # also where somebody interrupts
    dist.broadcast_object_list(meeting, src=0, device=device)
    dist.destroy_process_group()
    cores = os.cpu_count() or 1
    found: dict[str, Any] = {}
    # on a CPU all cores are busy, as they are in a job
    if rank == 0 or (device.type == "cpu" and rank < cores):
        found = measure.operators(device, size, say)
        say("what the host takes for an operator")
        found["host"] = {"call": found.pop("call"), **_host(device, size)}
    if device.type == "cpu" and world > 1 and rank < 2:
        say("what the host takes for being one of two ranks")
        found["host"] = found.get("host", _NOTHING) | _layouts(rank, meeting[0], found.get("host", _NOTHING), size)
    whole: dict[int, Any] = {}
    if device.type == "cpu":
        for ranks in (ranks for ranks in (1, 2, 4) if rank < ranks <= world):
            say(f"steps of six models on {counted(ranks, 'rank')}")
            whole[ranks] = _steps(rank, ranks, meeting[0], size)
    if rank == 0:
        calibration = Calibration(
            device=_facts(device, cores if device.type == "cpu" else 0, world),
            made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            versions=_versions(),
            collectives=collectives,
            messages=messages,
            **found,
        )
        if whole:
            calibration = replace(calibration, whole=shares(wide_llama, calibration, whole))
        write(calibration, args.output)
        if not collectives:
            print("no collectives and messages were measured, with one rank: plans take links from the table")
        print(f"wrote {args.output}")
    return 0


def _host(device: Any, size: Any) -> dict[str, float]:
    """As the only rank of a job."""
    import torch.distributed as dist

    from ..cluster.launch import launch
    from ..planner import measure

    launch(0, 1, None, None, backend="fake")
    try:
        return measure.host(_model(), lambda samples: _batch(samples, device), device, size)
    finally:
        dist.destroy_process_group()


def _layouts(rank: int, directory: str, alone: Any, size: Any) -> dict[str, float]:
    """As one of the two ranks of a job, which meet in `directory`."""
    import torch

    from ..planner.measure_layouts import layouts

    with _joined(rank, 2, f"{directory}/layouts"):
        return layouts(_model(), lambda samples, begin: _batch(samples, torch.device("cpu"), begin), size, alone)


def _steps(rank: int, world: int, directory: str, size: Any) -> Any:
    """As one of so many ranks of a job."""
    from ..planner.measure_steps import steps

    with _joined(rank, world, f"{directory}/steps-{world}"):
        return steps(wide_llama, size)


@contextmanager
def _joined(rank: int, world: int, store: str) -> Iterator[None]:
    """Inside, this process is a rank of a job whose ranks meet at `store`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _facts(device: Any, cores: int, world: int) -> dict[str, Any]:
    import torch

    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": found.name, "memory": found.total_memory, "cores": 0, "count": world}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"type": "cpu", "name": f"{_processor()}, {cores} cores", "memory": memory, "cores": cores, "count": world}


def _processor() -> str:
    """What the system calls it."""
    import platform

    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    import torch

    from .._version import __version__

    return {"shardwright": __version__, "torch": torch.__version__, "cuda": torch.version.cuda or ""}


def _model() -> Callable[[int], Any]:
    """A Llama whose layers have hardly anything to compute, with so many of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from .presets import PRESETS

    _, settings = PRESETS["llama-tiny"]
    return lambda layers: LlamaForCausalLM(LlamaConfig(**{**settings, "num_hidden_layers": layers}))


def wide_llama(width: int, words: int) -> Any:
    """A Llama of three layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def _batch(samples: int, device: Any, begin: int = 0) -> dict[str, Any]:
    import torch

    ids = torch.arange(begin, begin + _TOKENS, device=device).repeat(samples, 1)
    return {"input_ids": ids, "labels": ids}
