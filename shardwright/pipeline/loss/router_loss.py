"""Router losses of microbatches, weighed so that they add up to one of the step.

transformers computes a load-balancing loss of what all routers gave for a batch: a product of two means over its tokens
(how many of them visit an expert, how probable it was), which no sum over microbatches gives. It is taken for every
microbatch by itself, as all training with microbatches does, and the step's is their mean, weighed by tokens, over
microbatches and data-parallel ranks:

    loss = sum over i of  tokens_i / tokens * router_loss_i,   tokens_i those that attention_mask keeps, or all

One microbatch on one data-parallel rank is the whole batch, and has the loss of plain transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from .facts import Axis, Recipe
from .router_logits import FLAG, RouterLogits, are_wanted, configs_of
from .terms import TermWatcher

_FUNCTION = "load_balancing_loss_func"  # in transformers' modeling files, each of which has its own
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class RouterLoss:
    """The router loss of one model.

    homes     modules, of those that its class and its parts come from, whose function computes it
    own_ways  those whose function takes something else than what is known here
    """

    def __init__(self, model: nn.Module) -> None:
        names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
        homes = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _FUNCTION)]
        known = [list(inspect.signature(getattr(home, _FUNCTION)).parameters) == _ARGUMENTS for home in homes]
        self.homes = [home for home, is_known in zip(homes, known, strict=True) if is_known]
        self.own_ways = [home.__name__ for home, is_known in zip(homes, known, strict=True) if not is_known]
        self._configs = configs_of(model)
        self._model = type(model).__name__

    def of_step(self, microbatches: Sequence[Any], routers: RouterLogits | None, is_cut: bool) -> RouterLoss | None:
        """This, if the forwards of these microbatches compute a router loss, else None; ValueError where they cannot.

        routers  whose logits travel; `is_cut`: they have to
        """
        wanted = {are_wanted(self._configs, microbatch) for microbatch in microbatches}
        if True not in wanted:
            return None
        if len(wanted) > 1:
            raise ValueError(
                f"{FLAG} is True in some microbatches of a step and not in others; give all of them the same"
            )
        asked = any(isinstance(microbatch, Mapping) and microbatch.get(FLAG) for microbatch in microbatches)
        if is_cut and (routers is None or (asked and not routers.taps)):
            raise ValueError(
                f"{FLAG}=True, but when {self._model} was cut into pipeline stages it collected no router logits, so "
                f"none travel: set model.config.{FLAG}=True before booster.boost. Where it was, the model collects "
                "them in a way that pipelines cannot follow, and pp_size=1 works"
            )
        return self

    def require_known(self) -> None:
        """ValueError for a loss of which it is not known how microbatches weigh."""
        if self.own_ways:
            raise ValueError(
                f"{FLAG}=True: {self._model} computes the loss of its routers in its own way "
                f"({', '.join(self.own_ways)}), of which it is not known how microbatches weigh. Use one microbatch on "
                f"one data-parallel rank, a criterion with criterion.weight(inputs), or model.config.{FLAG}=False"
            )

    @contextmanager
    def weighed(self, watcher: TermWatcher) -> Iterator[None]:
        """Inside, the model's router loss is this microbatch's part of the step's."""
        originals = [getattr(home, _FUNCTION) for home in self.homes]
        try:
            for home, original in zip(self.homes, originals, strict=True):
                setattr(home, _FUNCTION, _weighed(original, watcher))
            yield
        finally:
            for home, original in zip(self.homes, originals, strict=True):
                setattr(home, _FUNCTION, original)


def _weighed(original: Callable[..., Any], watcher: TermWatcher) -> Callable[..., Any]:
    def router_loss(
        gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        def whole() -> Any:
            if isinstance(gate_logits, tuple) and gate_logits and gate_logits[0].is_meta:
                return gate_logits[0].float().sum()  # it counts into bins, for which data is needed
            return original(gate_logits, num_experts, top_k, attention_mask)

        if not isinstance(gate_logits, tuple) or not gate_logits:
            return whole()
        if attention_mask is None:
            rows = gate_logits[0].shape[0]
            return watcher.part_of_mean(whole, rows, Axis(None, Fraction(rows, watcher.samples)).rows)
        recipe = watcher.fact(attention_mask).recipe
        return watcher.part_of_mean(whole, attention_mask.sum(), None if recipe is None else _kept(recipe))

    return router_loss


def _kept(recipe: Recipe) -> Callable[[Any], torch.Tensor]:
    return lambda entries: recipe.make(entries).sum()
