"""Optimizers and schedules that scripts build, as keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .found import Found
from .literals import Unknown
from .statements import Called

_ADAM = ("params", "lr", "betas", "eps", "weight_decay")
_HYBRID = ("model_params", "lr", "bias_correction", "betas", "eps", "weight_decay", "adamw_mode")


class Optimizer(NamedTuple):
    """arguments in their order; the optimizer of recipes; what it takes where a script does not say."""

    order: tuple[str, ...]
    optim: str
    defaults: Mapping[str, Any]


OPTIMIZERS: dict[str, Optimizer] = {
    "HybridAdam": Optimizer(_HYBRID, "hybrid_adam", {"lr": 1e-3, "weight_decay": 0.0}),
    "CPUAdam": Optimizer(_HYBRID, "hybrid_adam", {"lr": 1e-3, "weight_decay": 0.0}),
    "FusedAdam": Optimizer(
        ("params", "lr", "bias_correction", "betas", "eps", "adamw_mode", "weight_decay"),
        "adamw_torch",
        {"lr": 1e-3, "weight_decay": 0.0},
    ),
    "AdamW": Optimizer(_ADAM, "adamw_torch", {"lr": 1e-3, "weight_decay": 0.01}),
    "Adam": Optimizer(_ADAM, "adamw_torch", {"lr": 1e-3, "weight_decay": 0.0}),
    "SGD": Optimizer(
        ("params", "lr", "momentum", "dampening", "weight_decay"), "sgd", {"lr": 1e-3, "weight_decay": 0.0}
    ),
}
_KEYS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
_QUIET = ("bias_correction", "adamw_mode", "fused", "foreach")  # as recipes have it, or of no effect on the numbers

_TOTAL = ("optimizer", "total_steps", "warmup_steps")
_WARM = ("optimizer", "num_warmup_steps", "num_training_steps")
SCHEDULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "CosineAnnealingWarmupLR": ("cosine", (*_TOTAL, "eta_min")),
    "LinearWarmupLR": ("linear", _TOTAL),
    "get_linear_schedule_with_warmup": ("linear", _WARM),
    "get_cosine_schedule_with_warmup": ("cosine", _WARM),
    "get_constant_schedule_with_warmup": ("constant_with_warmup", _WARM[:2]),
    "get_constant_schedule": ("constant", _WARM[:1]),
}
_STEPS = {
    "total_steps": "max_steps",
    "num_training_steps": "max_steps",
    "warmup_steps": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
}
_RUN = "no constant; the file is read, not run"


def is_schedule(name: str) -> bool:
    """Whether a call builds a schedule, of those that are known or of others."""
    return name in SCHEDULES or (name.endswith(("LR", "Scheduler")) and name != "Scheduler") or name == "get_scheduler"


def read_optimizer(name: str, call: Called, found: Found) -> None:
    kind = OPTIMIZERS[name]
    given = {key: value for key, value in named(call, kind.order).items() if key not in kind.order[:1]}
    found.recipe["optim"] = kind.optim
    if name == "Adam" and given.get("weight_decay", 0) != 0:
        found.note("Adam.weight_decay", given.pop("weight_decay"), "weights decay as in AdamW")
    for key, value in {**kind.defaults, **given}.items():
        if isinstance(value, Unknown):
            found.note(f"{name}.{key}", value.why, _RUN)
        elif key in _KEYS:
            found.recipe[_KEYS[key]] = value
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            found.recipe["adam_beta1"], found.recipe["adam_beta2"] = value
        elif key in _QUIET and value in (True, None):
            continue
        elif value not in (None, False, 0):
            found.note(f"{name}.{key}", value, f"no option of optim: {kind.optim}")


def read_schedule(name: str, call: Called, found: Found) -> None:
    if name not in SCHEDULES:
        found.note(name, f"line {call.node.lineno}", "the learning rate follows it there; say lr_scheduler_type")
        return
    word, order = SCHEDULES[name]
    found.recipe["lr_scheduler_type"] = word
    for key, value in named(call, order).items():
        if key == "optimizer" or (key == "last_epoch" and value == -1):
            continue
        if isinstance(value, Unknown):
            found.note(f"{name}.{key}", value.why, _RUN)
        elif key in _STEPS:
            found.recipe[_STEPS[key]] = value
        elif value not in (None, 0):
            found.note(f"{name}.{key}", value, "the learning rate falls to 0")


def named(call: Called, order: tuple[str, ...]) -> dict[str, Any]:
    """Arguments by name: those without one have the names of `order`, and numbers behind its end."""
    found: dict[str, Any] = {}
    place = 0
    for name, value in call.arguments:
        if name is None:
            found[order[place] if place < len(order) else f"argument {place + 1}"] = value
            place += 1
        else:
            found[name] = value
            if name == "*":
                place = len(order)  # it may be any number of them
    return found
