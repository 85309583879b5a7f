"""Optimizers that step past the one that boost returned: the original one, or one that was built on the boosted model's
parameters.

Both train something that looks healthy: each rank with gradients of its own. torch lets hooks look at every step of an
optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..interface import OptimizerWrapper
from ..precision.optimizer import MixedPrecisionOptimizer

_MARK = "_shardwright_boosted"  # on parameters that only a wrapper's step may change
_TAKEN = "_shardwright_taken"  # on optimizers that were boosted
_is_watching = False


def is_taken(optimizer: Optimizer) -> bool:
    """Whether boost was given this very optimizer, or returned it."""
    return _TAKEN in _innermost(optimizer).__dict__


def take(optimizer: Optimizer, wrapped: OptimizerWrapper | None) -> None:
    """Boost was given `optimizer` and returned `wrapped` for it."""
    _innermost(optimizer).__dict__[_TAKEN] = True
    if isinstance(wrapped, MixedPrecisionOptimizer) or (
        wrapped is not None and isinstance(wrapped.optim, OptimizerWrapper)
    ):
        _watch_optimizer(_innermost(optimizer), wrapped)


def keep_frozen(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse steps once parameters that were frozen require gradients: nobody reduces these, and perhaps nobody
    steps on them.
    """
    frozen = [
        (name, param)
        for name, param in model.named_parameters()
        if not param.requires_grad and param.is_floating_point()
    ]
    if not frozen:
        return

    def check(*_: Any) -> None:
        for name, param in frozen:
            if param.requires_grad:
                raise ValueError(
                    f"{name} was frozen when the model was boosted and requires gradients now: unfreeze it before "
                    "booster.boost. To train it from a later step on, boost it unfrozen in a param group with lr=0 "
                    "until then"
                )

    _innermost(optimizer).register_step_pre_hook(check)


def _innermost(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.optim
    return optimizer


def watch_model(model: nn.Module) -> None:
    """From here on only what boost returned steps on the parameters of `model`."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_refuse_latecomers)
        _is_watching = True
    for param in model.parameters():
        param.__dict__[_MARK] = True


def _watch_optimizer(original: Optimizer, wrapped: OptimizerWrapper) -> None:
    """Refuse steps of `original` that do not come from `wrapped`; other calls of it that would miss the wrapper's
    state go to it.
    """
    back = weakref.ref(wrapped)
    busy = [False]

    def refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        wrapper = back()
        if wrapper is not None and not wrapper.is_stepping:
            raise ValueError(
                f"this {type(original).__name__} was given to booster.boost: stepped by itself it sees neither the "
                "reduced gradients nor their scale. Step what boost returned: model, optimizer, *_ = "
                "booster.boost(model, optimizer); optimizer.step()"
            )

    def refuse_state(optimizer: Optimizer, *_: Any) -> None:
        raise ValueError(
            f"load_state_dict of a {type(original).__name__} that was given to booster.boost: its tensors are laid out "
            "otherwise now. booster.save(path, optimizer=optimizer) and booster.load(path, optimizer=optimizer) keep "
            "its state at any layout"
        )

    def refuse_group(param_group: dict[str, Any]) -> None:
        wrapped_now = back()
        if wrapped_now is not None:
            wrapped_now.add_param_group(param_group)  # says why not

    def zero_grad(set_to_none: bool = True) -> None:
        wrapper = back()
        if wrapper is None or busy[0]:
            type(original).zero_grad(original, set_to_none)
            return
        busy[0] = True
        try:
            wrapper.zero_grad(set_to_none)
        finally:
            busy[0] = False

    original.register_step_pre_hook(refuse_step)
    original.register_load_state_dict_pre_hook(refuse_state)
    original.add_param_group = refuse_group  # type: ignore[method-assign]
    original.zero_grad = zero_grad  # type: ignore[method-assign]


def _refuse_latecomers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, OptimizerWrapper) or _TAKEN in optimizer.__dict__:
        return
    for group in optimizer.param_groups:
        if group["params"] and getattr(group["params"][0], _MARK, False):
            raise ValueError(
                f"this {type(optimizer).__name__} was built on the parameters of a boosted model: it would step with "
                "what this rank alone computed. Build it on the model before booster.boost and step what boost "
                "returns: model, optimizer, *_ = booster.boost(model, optimizer)"
            )
