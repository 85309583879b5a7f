"""Optimizers with the arguments of Colossal-AI's, on torch's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...optim import HybridAdam as NativeAdam


class HybridAdam(NativeAdam):
    """Further arguments, which only ended up in `optimizer.defaults`, are refused."""

    def __init__(
        self,
        model_params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        if defaults:
            name, value = next(iter(defaults.items()))
            raise ValueError(f"HybridAdam({name}={value!r}): nothing looks at it; put it into the parameter groups")
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            adamw_mode,
            nvme_offload_fraction,
            nvme_offload_dir,
        )


class FusedSGD(torch.optim.SGD):
    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise ValueError(
                "wd_after_momentum=True: torch's SGD decays weights before momentum; use False, or a "
                "torch.optim.Optimizer of your own"
            )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)  # type: ignore[arg-type]
