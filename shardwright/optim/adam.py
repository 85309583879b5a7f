"""HybridAdam, CPUAdam, FusedAdam: the names scripts know, on torch's fused Adam kernels, with nothing to compile.

torch's fused kernels exist for CPU and CUDA alike, so one class serves parameters on either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Adam


class HybridAdam(Adam):
    """Adam (`adamw_mode=False`: weight decay enters the gradient) or AdamW (`adamw_mode=True`: it shrinks the weights),
    fused.

    Parameters may lie on the CPU or on a GPU, also some on each.
    """

    elementwise = True

    def __init__(
        self,
        model_params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        *,
        amsgrad: bool = False,
    ) -> None:
        if not bias_correction:
            raise ValueError(
                "bias_correction=False: torch's fused Adam always corrects the bias; use bias_correction=True"
            )
        if nvme_offload_fraction or nvme_offload_dir is not None:
            raise ValueError(
                f"nvme_offload_fraction={nvme_offload_fraction}, nvme_offload_dir={nvme_offload_dir!r}: states are not "
                "offloaded to disk; use 0.0 and None, and the plugin's cpu_offload=True to move them to host memory"
            )
        super().__init__(
            model_params,  # type: ignore[arg-type]
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
            decoupled_weight_decay=adamw_mode,
        )


class CPUAdam(HybridAdam):
    """HybridAdam for parameters on the CPU; refuses others."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.device.type != "cpu":
                raise ValueError(f"CPUAdam got a parameter on {param.device}; move it to the CPU or use HybridAdam")


class FusedAdam(HybridAdam):
    """HybridAdam with the argument order of apex's FusedAdam."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not set_grad_none:
            raise ValueError("set_grad_none=False: pass set_to_none=False to zero_grad() instead")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, amsgrad=amsgrad)
