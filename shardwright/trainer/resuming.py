"""What holds when a run goes on: its data is that of the checkpoint, its options are those that it is given now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from .errors import RecipeError


class Options:
    """Those of an optimizer and of its schedule, which a checkpoint would bring its own of.

    The learning rate of a LambdaLR, which transformers' schedules are, is what it has for the step that is reached.
    Others go on from the checkpoint's.
    """

    def __init__(self, optimizer: Any, schedule: Any) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self.rates = list(schedule.base_lrs) if isinstance(schedule, LambdaLR) else None

    def restore(self) -> None:
        for group, given in zip(self.optimizer.param_groups, self.groups, strict=True):
            rate = group["lr"] if self.schedule is not None else given["lr"]
            group.update({**given, "lr": rate})
        if self.rates is None:
            return
        schedule = self.schedule
        schedule.base_lrs = self.rates
        now = [rate * share(schedule.last_epoch) for rate, share in zip(self.rates, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        schedule._last_lr = now


def require_match(saved: Mapping[str, Any], given: Mapping[str, Any], path: str | Path) -> None:
    """RecipeError that names what differs."""
    names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
    if names:
        changes = "; ".join(f"{name} was {saved.get(name)!r} and is {given.get(name)!r}" for name in names)
        raise RecipeError(
            f"resume: the position in the data that {path} has means nothing now: {changes}. Give what it was, or "
            "begin another run in another output_dir from the model of this one"
        )
