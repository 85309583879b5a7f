"""Which kernels are there for a tensor: modules that are imported where they are first used, because Triton takes
long to import and is not on every machine.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

INTERPRETED = False  # kernels run on a CPU too, by Triton's interpreter: for tests


def triton_kernels(name: str, x: Tensor) -> Any:
    """The module `kernels.triton.<name>`, or None where its kernels cannot run on `x`."""
    return _module(name) if (x.is_cuda or INTERPRETED) and not x.is_meta and has_triton() else None


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def liger() -> Any:
    """liger-kernel's RMS norm and layer norm as functions of autograd, or None where it is not installed."""
    if find_spec("liger_kernel") is None:
        return None
    try:
        rms, layer = (importlib.import_module(f"liger_kernel.ops.{name}") for name in ("rms_norm", "layer_norm"))
        return rms.LigerRMSNormFunction, layer.LigerLayerNormFunction
    except (ImportError, AttributeError):  # of a version that is laid out in another way
        return None


@cache
def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.triton.{name}")
