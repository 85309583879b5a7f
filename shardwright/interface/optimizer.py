"""The wrapper around a boosted optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..cluster import job
from ..utils.labels import label, labelled
from ..utils.tensors import local_tensor
from .loss_guard import LossGuard
from .shards import ShardedOptimizer

NO_GRAD_SCALER = (
    "torch.amp.GradScaler around an optimizer that boost returned: it finds no gradients to unscale. Leave the "
    "GradScaler out (or "
    'enabled=False) and say precision="fp16" to the plugin, or Booster(mixed_precision="fp16"), which scales the loss '
    "and skips overflows"
)


NO_COPY = (
    "copying or pickling a boosted optimizer (copy.deepcopy(optimizer), torch.save(optimizer, ...)): it shares "
    "buffers, hooks and groups with its model. Save it with booster.save_optimizer(optimizer, path); "
    "optimizer.state_dict() is this rank's part"
)


# What ranks wait for each other in when a script calls it by itself; within a step it is a part of that.
_TOGETHER = ("backward", "clip_grad_by_norm", "clip_grad_by_value", "get_grad_norm")


class LossScaler(Protocol):
    """What checkpoints keep of a loss scale, and whether overflows can be its fault."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...

    def can_fall(self) -> bool: ...


class AmaxHistory(Protocol):
    """What checkpoints keep of delayed scales: by the name of a linear that this rank has."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class OptimizerWrapper(Optimizer):
    """One face for every plugin's optimizer:
    `backward, step, zero_grad, clip_grad_by_norm, clip_grad_by_value, get_grad_norm`.

    It is a `torch.optim.Optimizer` by type, so that lr schedulers accept it, but holds no state of its own:
    `param_groups` and `state` are those of the optimizer it wraps. A scheduler built on the original optimizer before
    boosting keeps driving it.

    `max_norm > 0` clips the global gradient norm at every `step`.

    What the booster, plugins, pipelines and checkpoints may ask beside that is all here, with the answer of an
    optimizer that has no part in it; wrappers that have override it:

    measures_before_step  whether `get_grad_norm` can tell the norm of a step that has not been taken
    scaler        its loss scale, if the number format needs one
    amax_history  what linears in 8 bits saw in the last steps, if they go by it
    sharded       who answers for masters and states that are not the model's own parameters
    require_sync, no_sync()  whether backward reduces gradients
    require_cleared()        refuses backwards onto gradients that were stepped on
    plain_parameters()       context in which the model runs
    """

    measures_before_step = True
    scaler: LossScaler | None = None
    amax_history: AmaxHistory | None = None
    require_sync = True

    def __init__(self, optim: Optimizer, max_norm: float = 0.0) -> None:
        # Deliberately without Optimizer.__init__: parameters and defaults belong to `optim`.
        self.optim = optim
        self.max_norm = max_norm
        self._inner = optim if isinstance(optim, OptimizerWrapper) else None  # which then answers what is asked
        if self._inner is not None and self._inner.scaler is not None:
            self.scaler = self._inner.scaler
        if self._inner is not None:
            self.amax_history = self._inner.amax_history
        # what to do about losses that are nan, set by the booster on the optimizer it returns
        self.loss_guard: LossGuard | None = None
        # raises for a loss of a script's own loop that this layout cannot differentiate, set by the plugin
        self.check_loss: Callable[[torch.Tensor], None] | None = None
        self._grad_norm: torch.Tensor | None = None
        self._norm_type = 2.0  # of `_grad_norm`
        self.is_stepping = False  # whether the wrapped optimizer steps because this one does

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & set(_TOGETHER):
            setattr(cls, name, job.heeds_failures_alone(vars(cls)[name]))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @job.heeds_failures_alone
    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        self._grad_norm = None
        if self.loss_guard is not None:
            self.loss_guard.note(loss)
        if self._inner is not None:
            self._inner.backward(loss, inputs=inputs, retain_graph=retain_graph)
            return
        loss.backward(inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grads: torch.Tensor | Sequence[torch.Tensor | None] | None,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backward from inner tensors whose gradients came from elsewhere (the next pipeline stage)."""
        self._grad_norm = None
        if self._inner is not None:
            self._inner.backward_by_grad(tensors, grads, inputs=inputs, retain_graph=retain_graph)
            return
        torch.autograd.backward(tensors, grads, inputs=inputs, retain_graph=retain_graph)

    @job.heeds_failures
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            raise ValueError(
                "step(closure=...) is not supported by a boosted optimizer: gradients are reduced once per step; call "
                "step() without it"
            )
        if self.loss_guard is not None and self.loss_guard.withholds(self):
            return None
        return self._take_step()

    def _take_step(self) -> Any:
        """A step that nothing speaks against."""
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        return self._step_wrapped()

    def _step_wrapped(self) -> Any:
        job.begin_update()
        self.is_stepping = True
        try:
            with label("optimizer: update"):
                return self.optim.step()
        finally:
            self.is_stepping = False

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """None: the model's own parameters are stepped on, and the wrapped optimizer holds their states."""
        return None if self._inner is None else self._inner.sharded

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward accumulates gradients without reducing them."""
        return nullcontext() if self._inner is None else self._inner.no_sync()

    def require_cleared(self) -> None:
        """Refuse backwards onto the gradients of a step that was taken, where these cannot be added to. A pipeline
        asks before any rank communicates.
        """
        if self._inner is not None:
            self._inner.require_cleared()

    def plain_parameters(self) -> AbstractContextManager[None]:
        """Context in which the model runs; optimizers that watch reads of gradients do not inside."""
        return nullcontext() if self._inner is None else self._inner.plain_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.loss_guard is not None:
            self.loss_guard.drop()
        self.optim.zero_grad(set_to_none=set_to_none)

    @job.heeds_failures_alone
    @labelled("optimizer: clip")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before clipping."""
        if self._inner is not None:
            return self._inner.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters(), max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        self._grad_norm, self._norm_type = _whole(norm), norm_type
        return self._grad_norm

    @job.heeds_failures_alone
    def clip_grad_by_value(self, clip_value: float) -> None:
        if self._inner is not None:
            self._inner.clip_grad_by_value(clip_value)
            return
        for grad in gradients(self.parameters()):
            local_tensor(grad).clamp_(-clip_value, clip_value)

    @job.heeds_failures_alone
    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """The global norm before clipping: that of the last clipped step, else of the gradients as they are. None
        without gradients.

        A norm of another order than the one that was clipped by is that of the gradients as they are.
        """
        if self._inner is not None:
            return self._inner.get_grad_norm(norm_type)
        if self._grad_norm is not None and norm_type == self._norm_type:
            return float(self._grad_norm)
        grads = gradients(self.parameters())
        return float(_whole(torch.nn.utils.get_total_norm(grads, norm_type=norm_type))) if grads else None

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "add_param_group after boost is not supported: the plugin has laid out the parameters; add the group "
            "before booster.boost"
        )

    # Hooks of a step run around the wrapped optimizer's, with gradients as it sees them.

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.optim.register_step_post_hook(hook)

    def _refuse_state_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        raise ValueError(
            "hooks on the state dict of a boosted optimizer: its states are laid out over the ranks and would pass "
            "them by; change the dict that state_dict() returns, or that load_state_dict(...) is given"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_state_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_state_hook

    def unwrap(self) -> Optimizer:
        return self.optim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        if type(self).__init__ is not OptimizerWrapper.__init__:
            raise ValueError(NO_COPY)  # it holds more than the wrapped optimizer
        return {"optim": self.optim, "max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def gradients(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _whole(norm: torch.Tensor) -> torch.Tensor:
    full: Callable[[], torch.Tensor] | None = getattr(norm, "full_tensor", None)
    return full() if full is not None else norm
