"""Gradients of FSDP2 as a script sees them, where DTensor would give a wrong answer.

With data parallelism alone a gradient is a DTensor that knows all of its parts, and torch's functions on it are right. Along tensor and
pipeline axes DTensor knows nothing of the other ranks, and in fp16 gradients carry the loss scale.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from .param_guard import METADATA
from .script_reads import INSTEAD


class RefusedGradient(DTensor):
    """What `param.grad` is made for as long as it must not be read: the class is swapped, the tensor stays (as in `param_guard`)."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(
            "param.grad: between backward and zero_grad this rank's gradient is a part of the model's (tensor or pipeline parallelism at "
            f"ZeRO stage 3), or carries the loss scale of fp16, and torch.nn.utils.clip_grad_norm_ would be wrong; {INSTEAD}"
        )
