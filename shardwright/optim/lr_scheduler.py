"""Learning-rate schedules by their number of steps. They drive a plain optimizer as well as a boosted one."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class CosineAnnealingWarmupLR(LambdaLR):
    """Linear from lr / warmup_steps to lr over `warmup_steps`, then half a cosine down to `eta_min` at `total_steps`.

    The last step of the warm-up and the first one of the cosine both have the whole rate. The cosine spans
    `total_steps - warmup_steps` steps; afterwards the rate stays at `eta_min`.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        _check(total_steps, warmup_steps)
        self.total_steps, self.warmup_steps, self.eta_min = total_steps, warmup_steps, eta_min
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer, [partial(self._factor, rate=rate) for rate in rates], last_epoch)

    def _factor(self, step: int, rate: float) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        least = self.eta_min / rate if rate else 0.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


class LinearWarmupLR(LambdaLR):
    """Linear from lr / (warmup_steps + 1) over `warmup_steps`, then linear down from lr to 0 at `total_steps`.

    Other than in CosineAnnealingWarmupLR, the whole rate is that of the first step after the warm-up alone.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        _check(total_steps, warmup_steps)
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        super().__init__(optimizer, self._factor, last_epoch)

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return max(0.0, (self.total_steps - step) / (self.total_steps - self.warmup_steps))


def _check(total_steps: int, warmup_steps: int) -> None:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and less than total_steps={total_steps}")
