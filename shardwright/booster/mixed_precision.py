"""Mixed precision for plugins that leave the number format to the booster: autocast, and for fp16 a dynamic loss
scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..interface import ModelWrapper, OptimizerWrapper
from ..interface.optimizer import NO_GRAD_SCALER, gradients
from ..precision.scaler import DynamicScaler, ScalerConfig
from ..utils.device import get_current_device
from ..utils.errors import one_of
from ..utils.tensors import local_tensor, multiply_


class MixedPrecision(ABC):
    """Wraps a model and its optimizer for one number format; subclass it to bring your own to
    `Booster(mixed_precision=...)`.
    """

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable[..., Any] | None]: ...


class AutocastModel(ModelWrapper):
    """Runs the forward under autocast; outputs keep the dtype that autocast gives them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(get_current_device().type, self.dtype):
            return self.module(*args, **kwargs)


class BF16MixedPrecision(MixedPrecision):
    """Weights stay in their own dtype, matmuls run in bf16. No loss scale: bf16 has fp32's range."""

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable[..., Any] | None]:
        return AutocastModel(model, torch.bfloat16), optimizer, _autocast_call(criterion, torch.bfloat16)


class FP16MixedPrecision(MixedPrecision):
    """Weights stay in their own dtype, matmuls run in fp16, the loss is scaled and steps that overflow are skipped
    on all ranks.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        hysteresis: int = 1,
        max_scale: float = 2.0**32,
    ) -> None:
        self.config = ScalerConfig(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
        )

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable[..., Any] | None]:
        if optimizer is not None:
            optimizer = ScaledOptimizer(optimizer, DynamicScaler(self.config, get_current_device()))
        return AutocastModel(model, torch.float16), optimizer, _autocast_call(criterion, torch.float16)


class ScaledOptimizer(OptimizerWrapper):
    """Scales the loss, unscales the gradients once before they are read, and skips the step where any rank
    overflowed.
    """

    scaler: DynamicScaler

    def __init__(self, optim: OptimizerWrapper, scaler: DynamicScaler) -> None:
        super().__init__(optim, optim.max_norm)
        self.scaler = scaler
        self._found_inf: torch.Tensor | None = None  # set while the gradients are unscaled
        self._overflow: torch.Tensor | None = None  # found before gradients were scaled again for more of them
        self._scaled_backward = False  # whether a backward of this step has scaled its loss

    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        self._scale_again()
        self._scaled_backward = True
        super().backward(loss * self.scaler.scale, inputs, retain_graph)

    def unscale(self) -> torch.Tensor:
        """Divide the gradients by the scale, once per step; returns 1.0 where any rank found an inf or nan, else
        0.0.
        """
        if self._found_inf is None:
            if not self._scaled_backward and gradients(self.parameters()):
                raise ValueError(
                    "gradients from a backward whose loss was not scaled for fp16, so that they would be divided by "
                    "the loss scale: write booster.backward(loss, optimizer) instead of loss.backward(), after "
                    "optimizer.zero_grad()"
                )
            found = torch.zeros((), dtype=torch.float32, device=self.scaler.scale.device)
            grads = [local_tensor(grad) for grad in gradients(self.parameters())]
            if grads:
                # inf and nan both survive a maximum
                largest = torch.nn.utils.get_total_norm(grads, norm_type=float("inf"))
                found = (~torch.isfinite(largest)).to(found)
                inverse = self.scaler.scale.double().reciprocal()
                for grad in grads:
                    grad.mul_(
                        inverse.to(grad.device, grad.dtype)
                        if grad.dtype is torch.float64
                        else inverse.float().to(grad.device)
                    )
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            self._found_inf = found if self._overflow is None else torch.maximum(found, self._overflow)
        return self._found_inf

    def _scale_again(self) -> None:
        """Before more gradients are added to those that were unscaled: both must carry the scale."""
        if self._found_inf is not None:
            multiply_([local_tensor(grad) for grad in gradients(self.parameters())], self.scaler.scale)
            self._found_inf, self._overflow = None, self._found_inf

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        self.unscale()
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        self.unscale()
        super().clip_grad_by_value(clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        self.unscale()
        return super().get_grad_norm(norm_type)

    def _take_step(self) -> Any:
        found = self.unscale()
        overflowed = bool(found)  # the step is a host decision: torch optimizers cannot be skipped on the device
        result = None if overflowed else super()._take_step()
        self.scaler.update(found)
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """See `MixedPrecisionOptimizer`."""
        raise ValueError(NO_GRAD_SCALER)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._found_inf = self._overflow = None
        self._scaled_backward = False

    def unwrap(self) -> Optimizer:
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim


def _autocast_call(criterion: Callable[..., Any] | None, dtype: torch.dtype) -> Callable[..., Any] | None:
    if criterion is None:
        return None

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(get_current_device().type, dtype):
            return criterion(*args, **kwargs)

    return under_autocast


_BY_NAME: dict[str, Callable[[], MixedPrecision]] = {"fp16": FP16MixedPrecision, "bf16": BF16MixedPrecision}


def resolve(mixed_precision: str | MixedPrecision | None) -> MixedPrecision | None:
    """The object for a name; None and "fp32" mean none."""
    if mixed_precision is None or isinstance(mixed_precision, MixedPrecision):
        return mixed_precision
    if mixed_precision == "fp32":
        return None
    if mixed_precision in _BY_NAME:
        return _BY_NAME[mixed_precision]()
    raise one_of("mixed_precision", mixed_precision, [*_BY_NAME, "fp32"])
