"""`LazyInitContext` with the arguments of Colossal-AI's."""

from __future__ import annotations

from typing import Any

import torch

from ...lazy import LazyInitContext as NativeContext


class LazyInitContext(NativeContext):
    def __init__(self, tensor_cls: Any = None, default_device: torch.device | str | int | None = None) -> None:
        if tensor_cls is not None:
            raise ValueError(f"tensor_cls={tensor_cls!r}: parameters are torch's own, on the meta device; leave it out")
        device = torch.device("cuda", default_device) if isinstance(default_device, int) else default_device
        super().__init__(default_device=device)
