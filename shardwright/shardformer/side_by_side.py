"""One reduction for an attention and an MLP that stand side by side: y = x + attention(n(x)) + mlp(n(x)).

Their row linears end in partial sums A_r and M_r, and what the layer makes of the two is their sum. So the first one
keeps A_r back and returns zeros in its place, and the last one returns the sum over ranks of A_r + M_r:

    forward    first: 0      last: sum over ranks of (A_r + M_r)      the layer adds up: x + 0 + sum
    backward   dA_r = dy from the zeros, dM_r = dy from the sum: the same, as both are only added

Zeros are exact: every rank gets the same bits. That the layer does nothing but add the two is proven on tensors without
data (`proven`), where every tensor that was computed from them is followed operator by operator up to the one in which
both have come together, each once; a layer for which that fails reduces twice. Dropout with a probability of its own
on each branch is no sum of both: while it is active the layer reduces twice, as it does where a hook may look at the
branches by themselves, and while compiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..models.dry_run import meta_copy, run_dry
from ..models.example_inputs import training_batches
from ..ops.layer_parts import runs_in_parts
from ..spec import ParamSpec
from ..utils.pytree import TorchDispatchMode, tree_leaves
from .adapters import has_adapters
from .layer.linear import Together
from .layer.parallel_module import ParallelModule
from .styles import Decision, Site, Style


@dataclass(frozen=True)
class SideBySide(Style):
    """A layer in which the outputs of two row linears are only added up.

    first, last     their names below the layer, in the order in which they run
    between         dropouts that their outputs pass before they meet; the proof fills it in
    """

    first: str
    last: str
    between: tuple[str, ...] = ()

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is not None:
            raise ValueError("SideBySide applies to a layer, but the rule names a parameter; name its layer")
        for name in (self.first, self.last):
            try:
                site.module.get_submodule(name)
            except AttributeError:
                raise ValueError(f"SideBySide: there is no {name!r} in it; name two row linears") from None
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        layer = _TogetherForward.adopt(site.module, site.parallel)
        layer.together = Together()
        layer.dropouts = tuple(site.module.get_submodule(name) for name in self.between)
        layer.passed = tuple(_passed(site.module, (self.first, self.last)))
        for name in (self.first, self.last):
            row = cast(Any, _row(site.module, name))
            row.together, row.comes_first = layer.together, name == self.first


class _TogetherForward(ParallelModule):
    """
    dropouts    that the two outputs pass before they meet
    passed      modules whose hooks would see one of the outputs by itself
    """

    together: Together
    dropouts: tuple[nn.Module, ...]
    passed: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        apart = (
            torch.compiler.is_compiling()
            or runs_in_parts(self)  # of which one may be a graph
            or any(dropout.training and cast(Any, dropout).p > 0 for dropout in self.dropouts)
            or any(module._forward_hooks or module._backward_hooks for module in self.passed)
        )
        if apart:
            return super().forward(*args, **kwargs)
        with self.together.running():
            return super().forward(*args, **kwargs)


def proven(model: nn.Module, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions without those for `SideBySide` that do not hold, and with what is known about those that do."""
    claimed = {each.site.name: each.style for each in decisions if isinstance(each.style, SideBySide)}
    if not claimed:
        return list(decisions)
    found = _proof(model, claimed)
    kept = []
    for each in decisions:
        if not isinstance(each.style, SideBySide):
            kept.append(each)
        elif each.site.name in found:
            kept.append(replace(each, style=found[each.site.name]))
    return kept


def _proof(model: nn.Module, claimed: Mapping[str, SideBySide]) -> dict[str, SideBySide]:
    """The layers whose two outputs only come together, with the dropouts that they pass before."""
    for batch in training_batches(model):
        try:
            found = []
            for training in (True, False):
                copied = meta_copy(model).train(training)
                followed = {name: _Follow(copied.get_submodule(name), style) for name, style in claimed.items()}
                with _without_dropout(list(followed.values())):
                    run_dry(copied, batch)
                found.append({name: follow.between for name, follow in followed.items() if follow.holds})
        except Exception:  # a foreign forward on a batch that was made up
            continue
        return {
            name: replace(style, between=tuple(dict.fromkeys(found[0][name] + found[1][name])))
            for name, style in claimed.items()
            if name in found[0] and name in found[1]
        }
    return {}


def _row(layer: nn.Module, name: str) -> nn.Module:
    module = layer.get_submodule(name)
    return cast(Any, module).base_layer if has_adapters(module) else module


def _passed(layer: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """The two row linears and the modules between them and the layer."""
    for name in names:
        yield _row(layer, name)
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            yield layer.get_submodule(".".join(parts[:length]))


_SAME_NUMBERS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "clone", "contiguous", "unsqueeze"}


class _Follow(TorchDispatchMode):
    """Follows the outputs of the two linears of one layer through one forward.

    holds       whether they have only been added, and came together
    between     names of the dropouts that they passed
    """

    def __init__(self, layer: nn.Module, style: SideBySide) -> None:
        super().__init__()
        self.holds = False
        self.between: list[str] = []
        self._ended = False
        self._counts: dict[int, tuple[Tensor, int, int]] = {}  # tensor, how often first and last are in it
        self._ran: list[str] = []
        for name, first in ((style.first, 1), (style.last, 0)):
            _row(layer, name).register_forward_hook(
                lambda module, args, output, first=first: self._begin(output, first)  # type: ignore[misc]
            )
        layer.register_forward_pre_hook(self._enter)
        layer.register_forward_hook(self._leave, always_call=True)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_pre_hook(lambda module, args, name=name: self._meet(name, args))  # type: ignore[misc]

    def dropped(self, x: Any) -> None:
        """A dropout that is no module is applied to x."""
        if id(x) in self._counts:
            self._ended = True  # its probability is nowhere to be looked up

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        met = [value for value in tree_leaves((args, kwargs or {})) if id(value) in self._counts]
        if met and not self._take(func._opname, args, kwargs or {}, output):
            self._ended = True
        return output

    def _take(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> bool:
        """Whether the operator leaves whole what it was given, or adds something."""
        if name in _SAME_NUMBERS:
            _, first, last = self._counts[id(args[0])]
        elif name in ("add", "add_") and not kwargs and isinstance(args[1], Tensor):
            if name == "add_" and id(args[0]) not in self._counts:
                return False
            counts = [self._counts.get(id(value), (None, 0, 0)) for value in args[:2]]
            first, last = (sum(cast(int, count[place]) for count in counts) for place in (1, 2))
            if any(value.shape != output.shape for value in args[:2] if id(value) in self._counts):
                return False
        else:
            return False
        if first == last == 1:  # the whole sum: from here on anything may be done with it
            self._counts.pop(id(output), None)  # of what was added in place
            self.holds = True
            return True
        self._note(output, first, last)
        return max(first, last) == 1

    def _begin(self, output: Tensor, first: int) -> None:
        self._ran.append("first" if first else "last")
        self._note(output, first, 1 - first)

    def _note(self, output: Tensor, first: int, last: int) -> None:
        self._counts[id(output)] = (output, first, last)

    def _meet(self, name: str, args: tuple[Any, ...]) -> None:
        if args and id(args[0]) in self._counts:
            self.between.append(name)

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self.holds = False
        self._ran.clear()
        self.__enter__()

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.__exit__(None, None, None)
        self.holds = self.holds and not self._ended and self._ran == ["first", "last"]
        self._counts.clear()


@contextmanager
def _without_dropout(followed: Sequence[_Follow]) -> Iterator[None]:
    """Dropout hands on what it was given, and who follows it is told."""

    def of_module(self: nn.Dropout, x: Tensor) -> Tensor:
        return x

    def of_function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for follow in followed:
            follow.dropped(x)
        return x

    with patch.object(nn.Dropout, "forward", of_module), patch.object(F, "dropout", of_function):
        yield
