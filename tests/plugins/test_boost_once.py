"""Boosting computes nothing twice: what preflight found out is handed on."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.optim.kind import check_supported, has_stepped, is_elementwise
from shardwright.pipeline.cut.plan import CutPlan, plan_cut
from shardwright.pipeline.cut.surveyor import survey_model
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin
from shardwright.plugins.hybrid import plugin as hybrid
from shardwright.plugins.hybrid.preflight import preflight
from shardwright.precision.policy import PrecisionPolicy
from shardwright.shardformer.plan import Plan
from shardwright.testing import run_ranks, zoo
from shardwright.zero.entries import check_job, collect_entries

FUNCTIONS = (
    check_supported,
    is_elementwise,
    has_stepped,
    plan_cut,
    survey_model,
    preflight,
    check_job,
    collect_entries,
)
METHODS = ((PrecisionPolicy, "dtypes"), (Plan, "decide"), (Plan, "check"), (CutPlan, "apply"))


def count_calls(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of the functions above, under whatever name a module of the package has imported them."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    for function in FUNCTIONS:
        wrapper = counted(function.__name__, function)
        for module in [module for name, module in sys.modules.items() if name.startswith("shardwright.")]:
            for name, value in list(vars(module).items()):
                if value is function:
                    patch.setattr(module, name, wrapper)
    for owner, name in METHODS:
        patch.setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
    return counts


def boost(rank: int, world_size: int, make: Callable[[], Plugin], expected: dict[str, int], trained: bool) -> None:
    model = zoo.build("llama-causal-lm")
    optimizer = torch.optim.AdamW(model.parameters()) if trained else None
    booster = Booster(plugin=make())
    with pytest.MonkeyPatch.context() as patch:
        counts = count_calls(patch)
        booster.boost(model, optimizer)
    assert dict(counts) == expected


def keep_no_weights(rank: int, world_size: int) -> None:
    """When ZeRO takes over, nobody remembers the weights of other stages."""
    made = HybridParallelPlugin(pp_size=2, zero_stage=1, precision="bf16", num_microbatches=2)
    model = zoo.build("llama-causal-lm")
    weights = {name: weakref.ref(param) for name, param in model.named_parameters()}
    left: list[set[str]] = []
    original = hybrid.lay_out

    def looking(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gc.collect()
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        left.append({name for name, param in weights.items() if param() is not None} - held)
        return original(model, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, "lay_out", looking)
        Booster(plugin=made).boost(model, torch.optim.AdamW(model.parameters()))
    assert left == [set()]


ONCE = {
    **dict.fromkeys((function.__name__ for function in FUNCTIONS), 1),
    **{f"{owner.__name__}.{name}": 1 for owner, name in METHODS},
}


def test_a_hybrid_layout_is_computed_once() -> None:
    make = partial(HybridParallelPlugin, tp_size=2, pp_size=2, zero_stage=1, precision="bf16", num_microbatches=2)
    run_ranks(boost, 4, make, ONCE, True, timeout=100)


def test_what_is_handed_on_keeps_no_weights() -> None:
    run_ranks(keep_no_weights, 2, timeout=100)


def test_zero_alone_is_computed_once() -> None:
    wanted = (
        "check_supported",
        "is_elementwise",
        "has_stepped",
        "check_job",
        "collect_entries",
        "PrecisionPolicy.dtypes",
    )
    run_ranks(boost, 2, partial(LowLevelZeroPlugin, stage=2), dict.fromkeys(wanted, 1), True, timeout=100)
    untrained = dict.fromkeys(("check_job", "PrecisionPolicy.dtypes"), 1)
    run_ranks(boost, 2, partial(LowLevelZeroPlugin, stage=3), untrained, False, timeout=100)
