"""What optimizers of all ZeRO stages share: loss scaling, overflow, the norm, clipping and the inner step.

Gradients lie in the buffers as *raw* sums; everything that multiplies them (the mean over data-parallel ranks, the
inverse loss scale, the clip coefficient) is collected in one factor and applied once, inside the kernel that steps
where there is one. Which call may do what to them when: [Note: states of gradients]. Nothing here waits for the device
unless the caller asks for a number, or fp16 meets an optimizer without a fused kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..cluster import job
from ..interface import OptimizerWrapper
from ..interface.optimizer import NO_COPY, NO_GRAD_SCALER
from ..interface.shards import LoadedShard, ParamShard, ShardedOptimizer
from ..optim.kind import choose_fused
from ..utils.labels import label, labelled
from ..utils.tensors import multiply_
from .grad_norm import clip_coefficient, power_sum, total_norm
from .grad_state import GradState
from .scaler import DynamicScaler
from .shown_state import ShownState


class MixedPrecisionOptimizer(OptimizerWrapper):
    """Template of a step; subclasses say where gradients are and how updated weights reach the model.

    divisor     raw gradients are this many times the gradient of the step (data-parallel ranks that were summed)
    norm_group  all ranks of the model: the norm and the overflow check are agreed over it
    running     optimizers whose backward is running, the innermost last
    backwards   how many of them there have been
    guests      contexts of other optimizers whose parameters this one's backward has reached; left when it ends
    """

    running: ClassVar[list[MixedPrecisionOptimizer]] = []
    backwards: ClassVar[int] = 0
    guests: ExitStack

    def __init__(
        self,
        optim: Optimizer,
        *,
        device: torch.device,
        max_norm: float = 0.0,
        scaler: DynamicScaler | None = None,
        norm_group: dist.ProcessGroup | None = None,
        divisor: float = 1.0,
    ) -> None:
        super().__init__(optim, max_norm)
        if max_norm < 0:
            raise ValueError(f"max_norm={max_norm} must be 0 (no clipping) or positive")
        self.scaler: DynamicScaler | None = scaler
        self.device = device
        self.norm_group = norm_group
        self.grad_state = GradState.ACCUMULATING
        self._divisor = divisor
        self._clip: torch.Tensor | None = None
        self._raw_norm: torch.Tensor | None = None
        # 1.0 where gradients were non-finite before they were clamped or handed out
        self._overflow: torch.Tensor | None = None
        self._has_gradients = False  # whether a backward has run since zero_grad
        self._has_stepped = False
        self._fused = choose_fused(optim, device)
        self._constants: dict[tuple[float, torch.device], torch.Tensor] = {}
        self._stepped_scale: torch.Tensor | None = None  # of the loss, when a step left gradients as they were

    # What a subclass brings.

    @abstractmethod
    def _finish_gradients(self) -> None:
        """Bring all gradients of the step to their final raw value; called before anything reads them, cheap when
        repeated.
        """

    @abstractmethod
    def _stepped_gradients(self) -> Sequence[torch.Tensor]:
        """The gradients that the inner optimizer steps on."""

    @abstractmethod
    def _owned_gradients(self) -> Sequence[torch.Tensor]:
        """The gradients that this rank counts in the norm (see `precision.grad_norm`)."""

    @abstractmethod
    def _set_aside(self, scale: float | torch.Tensor) -> None:
        """More backwards follow: keep reduced gradients, times `scale`, apart from what will accumulate, until that
        is reduced too.
        """

    @abstractmethod
    def _publish(self) -> None:
        """Bring updated weights to the model."""

    # The face of OptimizerWrapper.

    @property
    def sharded(self) -> ShardedOptimizer:
        """Subclasses bring what `ShardedOptimizer` asks for."""
        return self

    @property
    def state(self) -> ShownState:  # type: ignore[override]
        return ShownState(self.optim.state)

    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        with self._running_backward([loss]):
            super().backward(self.scale_loss(loss), inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grads: torch.Tensor | Sequence[torch.Tensor | None] | None,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """As in `OptimizerWrapper`; `grads` come from a scaled loss already."""
        with self._running_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors):
            super().backward_by_grad(tensors, grads, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: multiplied by the loss scale in fp16, else itself."""
        return loss if self.scaler is None else loss.float() * self.scaler.scale

    def require_cleared(self) -> None:
        """See `OptimizerWrapper`."""
        if self._has_stepped:
            raise ValueError(
                "backward after step without zero_grad: the last gradients are still there; call zero_grad() first"
            )

    @contextmanager
    def _running_backward(self, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the backward of `roots` runs."""
        self._before_backward()
        self._has_gradients = True
        with ExitStack() as self.guests:
            self.running.append(self)
            MixedPrecisionOptimizer.backwards += 1
            try:
                yield
            finally:
                self.running.pop()
        self._after_backward()

    def _before_backward(self) -> None:
        """From here on gradients accumulate; those of the step that were reduced before are set aside."""
        self.require_cleared()
        if self.grad_state is GradState.CONSUMED:
            self._set_aside(1.0 / self._base_factor())
        else:
            self._set_aside(1.0 if self._clip is None else self._clip)
        self.grad_state = GradState.ACCUMULATING
        self._clip = None
        self._raw_norm = None
        self._grad_norm = None
        self._stepped_scale = None

    def _after_backward(self) -> None:
        """Called when a backward started through this wrapper has returned."""

    @job.heeds_failures
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            return super().step(closure)  # raises: gradients are reduced once per step
        if self.loss_guard is not None and self.loss_guard.withholds(self):
            return None
        with label("optimizer: gradients"):
            self._finish_gradients()
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        found_inf = self._found_inf() if self.scaler is not None else None
        with label("optimizer: update"):
            if not self._step_at_once(found_inf):
                self._inner_step(found_inf)
            elif self.scaler is not None:
                self._stepped_scale = self._loss_scale()
        if self.scaler is not None and found_inf is not None:
            self.scaler.update(found_inf)
        self._has_stepped = self._has_gradients
        with label("optimizer: weights to their readers"):
            self._publish()
        return None

    # State.

    @abstractmethod
    def trained(self) -> dict[str, int]: ...

    @abstractmethod
    def shards(self) -> list[ParamShard]: ...

    @abstractmethod
    def load_shards(self, loaded: Mapping[str, LoadedShard]) -> None: ...

    @abstractmethod
    def publish_masters(self) -> None: ...

    @abstractmethod
    def refresh_masters(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters, states, hyperparameters and loss scale, by parameter name; for the same layout only."""
        shards = {
            shard.name: {"master": shard.master, "state": shard.state, "extra": shard.extra} for shard in self.shards()
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {
            "shards": shards,
            "param_groups": groups,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "amax_history": self.amax_history.state_dict() if self.amax_history is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"{len(state_dict['param_groups'])} param groups saved, this optimizer has {len(self.param_groups)}"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self.scaler is not None and state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        if self.amax_history is not None and state_dict.get("amax_history") is not None:
            self.amax_history.load_state_dict(state_dict["amax_history"])
        self.load_shards({name: LoadedShard(**parts) for name, parts in state_dict["shards"].items()})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler.step asks before it looks for gradients, which are not where it would find them."""
        raise ValueError(NO_GRAD_SCALER)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles."""
        raise ValueError(NO_COPY)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.loss_guard is not None:
            self.loss_guard.drop()
        self.grad_state = GradState.ACCUMULATING
        self._clip = None
        self._raw_norm = None
        self._overflow = None
        self._stepped_scale = None
        self._has_gradients = False
        self._has_stepped = False

    @labelled("optimizer: clip")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global norm of the step's gradients; returns the norm before, a 0-d tensor. All ranks must call."""
        norm = self._measure(norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is non-finite: {float(norm)}")
        coefficient = clip_coefficient(norm, max_norm)
        if self.grad_state is GradState.CONSUMED:
            multiply_(self._stepped_gradients(), coefficient)
        else:
            self._clip = coefficient if self._clip is None else self._clip * coefficient
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._finish_gradients()
        if self.scaler is not None:
            asked = self._grad_norm
            self._found_inf()  # a clamped infinity looks like any other number
            self._grad_norm = asked  # that of the clamped gradients is still to be measured
        self._apply_factor()
        grads = list(self._stepped_gradients())
        if grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """The norm before clipping (all ranks must call).

        That which the last clip or step measured, until the next backward, also after zero_grad; where none of this
        order was measured, that of the gradients as they are, and None while there are none.
        """
        if self._grad_norm is not None and norm_type == self._norm_type:
            return float(self._grad_norm)
        if not self._has_gradients:
            return None
        if self._grad_norm is None:
            return float(self._measure(norm_type))
        return float(self._raw(norm_type) * self._factor())

    # Inside.

    def _measure(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of the step's gradients with every factor but this one's clipping applied."""
        self._raw_norm = self._raw(norm_type)
        self._grad_norm, self._norm_type = self._raw_norm * self._factor(), norm_type
        return self._grad_norm

    def _raw(self, norm_type: float) -> torch.Tensor:
        """Norm of what lies in the buffers."""
        self._finish_gradients()
        return total_norm(self._power_sum(norm_type), self.norm_group, norm_type)

    def _power_sum(self, norm_type: float) -> torch.Tensor:
        """`grad_norm.power_sum` of what this rank owns."""
        return power_sum(self._owned_gradients(), self.device, norm_type)

    def _base_factor(self) -> float | torch.Tensor:
        """What makes raw sums the gradients of the step."""
        return 1.0 / self._divisor if self.scaler is None else 1.0 / self._divisor / self._loss_scale()

    def _loss_scale(self) -> torch.Tensor:
        """The scale that the gradients in the buffers have; a step moves that of the next ones."""
        assert self.scaler is not None
        return self.scaler.scale if self._stepped_scale is None else self._stepped_scale

    def _factor(self) -> float | torch.Tensor:
        """What the gradients in the buffers must still be multiplied by."""
        if self.grad_state is GradState.CONSUMED:
            return 1.0
        factor = self._base_factor()
        return factor if self._clip is None else factor * self._clip

    def _found_inf(self) -> torch.Tensor:
        """1.0 on every rank where a gradient of the step is or was non-finite on any, else 0.0. All ranks must call."""
        if self._raw_norm is None:
            self._measure()
        assert self._raw_norm is not None
        found = (~self._raw_norm.isfinite()).float()
        self._overflow = found if self._overflow is None else torch.maximum(found, self._overflow.to(found.device))
        return self._overflow

    def _apply_factor(self) -> None:
        """Multiply the gradients by what is pending, in place."""
        multiply_(self._stepped_gradients(), self._factor())
        self._consume()

    def _consume(self) -> None:
        """Note that the gradients are those of the step now."""
        self.grad_state = GradState.CONSUMED

    def _step_at_once(self, found_inf: torch.Tensor | None) -> bool:
        """Whether a kernel of ours has taken the step, with the pending factor, which stays pending."""
        return False

    def _inner_step(self, found_inf: torch.Tensor | None) -> None:
        """Step the inner optimizer with the pending factor, or not at all where `found_inf` is set."""
        grads = self._stepped_gradients()
        factor = self._factor()
        # The fused kernels take the factor as a fp32 divisor, too coarse for fp64 gradients.
        if self._fused and grads and not any(grad.dtype == torch.float64 for grad in grads):
            pending = not (isinstance(factor, float) and factor == 1.0)
            if pending or found_inf is not None:
                device = grads[0].device
                divisor = (
                    self._constant(1.0 / factor, device)
                    if isinstance(factor, float)
                    else (1.0 / factor.to(device)).float()
                )
                self.optim.grad_scale = divisor  # type: ignore[attr-defined]
                self.optim.found_inf = self._constant(0.0, device) if found_inf is None else found_inf.to(device)  # type: ignore[attr-defined]
            try:
                self._step_wrapped()
            finally:
                for name in ("grad_scale", "found_inf"):
                    self.optim.__dict__.pop(name, None)
            self._consume()  # the kernel writes back what it has scaled
            return
        if found_inf is not None and bool(found_inf):
            self._consume()
            return
        self._apply_factor()
        self._step_wrapped()

    def _constant(self, value: float, device: torch.device) -> torch.Tensor:
        """`value` on the device, copied there once: a copy from the host would wait for the device at every step."""
        key = (value, device)
        if key not in self._constants:
            self._constants[key] = torch.tensor(value, dtype=torch.float32, device=device)
        return self._constants[key]
