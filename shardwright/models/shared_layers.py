"""Layers that a forward applies more than once (ALBERT: one layer, all the way up): the chain of a model whose lists of
layers are shorter than it is deep.

Which of its modules run again and again no config says, so it is seen in a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from .config import LAYERS, config_of, first_int
from .dry_run import meta_copy, run_dry
from .example_inputs import example_batches


def repeated_applications(model: nn.Module) -> list[str] | None:
    """Names of the layers in the order in which they are applied, some of them several times; None where no list of
    layers is gone through like that.

    The list is an outermost one whose children hold modules and parameters. Together these are applied as often as the
    config says that the model is deep, where it says so; of several lists the one with most parameters at work counts.
    """
    depth = first_int(config_of(model), LAYERS)
    lists = list(compound_lists(model))
    if not lists:
        return None
    for example in example_batches(model):
        order: list[str] = []
        try:
            copied = meta_copy(model)
            for _, children in lists:
                for child in children:
                    copied.get_submodule(child).register_forward_hook(_noting(order, child))
            run_dry(copied, example)
        except Exception:  # the model's own code: anything can happen on a guessed batch
            continue
        found = [[name for name in order if name in children] for _, children in lists]
        deep = [calls for calls in found if len(calls) > len(set(calls)) and depth in (None, len(calls))]
        return max(deep, key=lambda calls: _work(model, calls), default=None)
    return None


def compound_lists(model: nn.Module) -> Iterator[tuple[str, Sequence[str]]]:
    """The outermost ModuleLists whose children hold modules and parameters: their names and those of the children."""
    seen: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in seen):
            continue
        holds = [any(True for _ in child.children()) and any(True for _ in child.parameters()) for child in module]
        if holds and all(holds):
            seen.append(name)
            yield name, [f"{name}.{index}" for index in range(len(module))]


def _noting(order: list[str], name: str) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        order.append(name)

    return note


def _work(model: nn.Module, calls: Iterable[str]) -> int:
    return sum(parameter.numel() for name in calls for parameter in model.get_submodule(name).parameters())
