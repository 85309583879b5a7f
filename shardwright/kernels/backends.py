"""Which kernels are there for a tensor: modules that are imported where they are first used, because Triton takes
long to import and is not on every machine.
"""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..comm.compat import differentiates_functions
from ..utils.device import chosen_as_for
from ..utils.torch_names import FakeTensor
from ..utils.versions import is_installed

PLAIN_TENSORS = (Tensor, FakeTensor)  # whose operators are torch's own; fakes are those of plans
INTERPRETED = False  # kernels run on a CPU too, by Triton's interpreter: for tests
_LIGER = {
    "rms_norm": "LigerRMSNormFunction",
    "layer_norm": "LigerLayerNormFunction",
    "swiglu": "LigerSiLUMulFunction",
    "geglu": "LigerGELUMulFunction",
}


def operators_only() -> bool:
    """Whether the operators of a model are looked at one by one, so that functions of autograd cannot stand for
    several: torch compiles, traces, or differentiates by `torch.func` or forwards.
    """
    return torch.compiler.is_compiling() or differentiates_functions() or torch.jit.is_tracing()


def triton_kernels(name: str, x: Tensor) -> Any:
    """The module `kernels.triton.<name>`, or None where its kernels cannot run on `x`."""
    return _module(name) if (x.is_cuda or INTERPRETED) and not x.is_meta and has_triton() else None


def stands_for_gpu(x: Tensor) -> bool:
    """Whether `x` is a tensor without memory of a job of GPUs that is planned, wherever this runs: operators then keep
    and make what the kernels do that CUDA has.
    """
    return isinstance(x, FakeTensor) and chosen_as_for("cpu") == "cuda"


@cache
def has_triton() -> bool:
    return is_installed("triton")


def cpp_compiler() -> tuple[str, bool]:
    """What inductor compiles with for a CPU, and whether it is there."""
    compiler = os.environ.get("CXX") or "g++"
    return compiler, shutil.which(compiler) is not None


@cache
def liger(name: str) -> Any:
    """liger-kernel's function of autograd in its module `ops.<name>`, or None where it is not installed."""
    if not is_installed("liger_kernel"):
        return None
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{name}"), _LIGER[name])
    except (ImportError, AttributeError):  # of a version that is laid out in another way
        return None


def source(of_liger: str = "") -> str:
    """Where kernels come from on this machine, in a word; `of_liger` names liger-kernel's, where those are taken."""
    if not torch.cuda.is_available():
        return "torch"
    return "liger-kernel" if of_liger and liger(of_liger) is not None else "Triton" if has_triton() else "torch"


@cache
def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.triton.{name}")
