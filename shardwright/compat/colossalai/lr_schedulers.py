"""The learning-rate schedules of Colossal-AI: the number of steps comes second in all of them.

Those that begin with a warm-up rise linearly from lr / warmup_steps to lr, and then do over the steps that are left
what they do without one, so that two steps have the whole rate. LinearWarmupLR rises by lr / (warmup_steps + 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from ...optim.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]


class _ByStep(lr_scheduler.LambdaLR):
    """The rate of a step is `rate_of(base rate, steps after the warm-up, number of them)`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int,
        last_epoch: int,
        rate_of: Callable[[float, int, int], float],
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and less than total_steps={total_steps}")
        bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

        def factor(base: float, step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return rate_of(base, step - warmup_steps, total_steps - warmup_steps) / base if base else 1.0

        super().__init__(optimizer, [partial(factor, base) for base in bases], last_epoch)


def _cosine(base: float, done: float, least: float) -> float:
    """From `base` at done=0 to `least` at done=1."""
    return least + (base - least) * 0.5 * (1 + math.cos(math.pi * done))


def _refuse_more(kwargs: dict[str, Any]) -> None:
    if kwargs:
        name, value = next(iter(kwargs.items()))
        raise ValueError(f"{name}={value!r}: no schedule looks at it; leave it out")


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        _refuse_more(kwargs)
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class FlatAnnealingWarmupLR(_ByStep):
    """The base rate for `pct_start` of the steps, then half a cosine down to `eta_min`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _refuse_more(kwargs)
        if not 0.0 <= pct_start <= 1.0:
            raise ValueError(f"pct_start={pct_start} must be a share of the steps, from 0 to 1")

        def rate(base: float, step: int, steps: int) -> float:
            flat = int(steps * pct_start)
            return base if step < flat else _cosine(base, min(1.0, (step - flat) / max(1, steps - flat)), eta_min)

        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, rate)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch, **kwargs)


class MultiStepWarmupLR(_ByStep):
    """Multiplied by `gamma` at each of the `milestones`, which count from the first step of all."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _refuse_more(kwargs)
        if not milestones:
            raise ValueError(f"milestones={milestones!r} must be a list of steps, such as [30, 80]")
        reached = sorted(step - warmup_steps for step in milestones if step >= warmup_steps)

        def rate(base: float, step: int, steps: int) -> float:
            return float(base * gamma ** sum(step >= milestone for milestone in reached))

        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, rate)


class MultiStepLR(MultiStepWarmupLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, milestones=milestones, gamma=gamma, last_epoch=last_epoch, **kwargs)


class OneCycleLR(lr_scheduler.OneCycleLR):
    """The highest rate of each group is the one it has."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _refuse_more(kwargs)
        super().__init__(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,  # type: ignore[arg-type]
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )


class PolynomialWarmupLR(_ByStep):
    """From the base rate to `end_lr` with the `power` of what is left."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _refuse_more(kwargs)
        if end_lr < 0:
            raise ValueError(f"end_lr={end_lr} must be at least 0")

        def rate(base: float, step: int, steps: int) -> float:
            return float(end_lr + (base - end_lr) * (1 - min(step, steps) / steps) ** power)

        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, rate)


class PolynomialLR(PolynomialWarmupLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch, **kwargs)


class LambdaLR(lr_scheduler.LambdaLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class MultiplicativeLR(lr_scheduler.MultiplicativeLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class StepLR(lr_scheduler.StepLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(lr_scheduler.ExponentialLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)
