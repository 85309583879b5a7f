"""Facts about the machine that figures were taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "liger-kernel")
MORE = ("deepspeed", "accelerate", "peft", "pytest", "pytest-xdist", "pytest-timeout")
_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "load": round(os.getloadavg()[0], 1),
        "packages": {name: version for name in (*PACKAGES, *MORE) if (version := _version(name)) is not None},
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
    }
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        found["device"] = one.name
        found["capability"] = f"{one.major}.{one.minor}"
        found["memory_gib"] = round(one.total_memory / 2**30, 1)
        found["multiprocessors"] = one.multi_processor_count
        nccl = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
        found["cudnn"] = torch.backends.cudnn.version()
        found |= {"now": clocks()}
    return found


def clocks() -> dict[str, str]:
    """What the driver says of the first GPU now: clocks, power, temperature."""
    said = _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader")
    return (
        dict(zip(_QUERY.split(","), (part.strip() for part in said.splitlines()[0].split(",")), strict=False))
        if said
        else {}
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return run.stdout.strip() if run.returncode == 0 else ""
