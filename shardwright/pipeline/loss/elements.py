"""How many losses a loss function of torch computes, one by one, and how they are counted in the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from .facts import SAMPLES, Axis, Fact, Kind, first_unknown, unknown
from .functions import CLASS_LOSSES, ROW_LOSSES, WEIGHED_MEANS, has_class_targets
from .products import per_row
from .rules import TOGETHER, Call, Watch, elementwise


def elements_of(watch: Watch, call: Call, arguments: Mapping[str, Any]) -> Fact | tuple[Fact, Any]:
    """(fact of the losses one by one, how to count them), or the fact that says why this is not known."""
    if has_class_targets(call.func, arguments):
        return _class_elements(watch, call, arguments)
    return _elements(watch, call, arguments)


def _class_elements(watch: Watch, call: Call, arguments: Mapping[str, Any]) -> Fact | tuple[Fact, Any]:
    """(fact of the losses one by one, how to count them): targets that are not ignored, each with the weight of
    its class.
    """
    logits, target = arguments["input"], arguments["target"]
    weight, ignored = arguments["weight"], arguments["ignore_index"]
    one, other = watch.fact(logits), watch.fact(target)
    if blame := first_unknown([one] if other.recipe is not None else [one, other]):
        return blame
    if Kind.SUM in (one.kind, other.kind) or Kind.ROWS not in (one.kind, other.kind):
        return unknown(f"{call.name} of a sum over samples")
    if one.kind is not other.kind or one.dim != other.dim or one.order != other.order:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if one.dim is not None and one.dim == 1 and logits.dim() > 1:
        return unknown(f"{call.name} with the samples where the classes belong", coupled=True)
    recipe = other.recipe
    if weight is not None:
        known = watch.fact(weight)
        if known.kind not in (Kind.CONST, Kind.WHOLE):
            return (
                known
                if known.kind is Kind.UNKNOWN
                else unknown(f"{call.name} with class weights that the model or samples have made")
            )
        if known.whole is not None:
            call.args = tuple(known.whole() if value is weight else value for value in call.args)
            call.kwargs = {key: known.whole() if value is weight else value for key, value in call.kwargs.items()}
            weight = known.whole()
    if recipe is None:
        if arguments["reduction"] != "mean":
            return (other._replace(samples=False, mask=None), None)
        return unknown(
            f"the targets of {call.name}, of shape {tuple(target.shape)}, do not follow from the batch's entries "
            f"({', '.join(str(key) for key in watch.entries if key != SAMPLES)}) alone, so their number in other "
            "microbatches is unknown"
        )

    weights = None if weight is None else watch.kept(weight)

    def count(entries: Mapping[Any, Any]) -> torch.Tensor:
        targets = recipe.make(entries)
        valid = targets != ignored
        if weights is None:
            return valid.sum()
        return (weights.detach()[targets.clamp(0, len(weights) - 1)].double() * valid).sum()

    return other._replace(recipe=None, samples=False, mask=None), count


def _elements(watch: Watch, call: Call, arguments: Mapping[str, Any]) -> Fact | tuple[Fact, Any]:
    """(fact of the losses one by one, how to count them): all elements, or one for each distribution or row."""
    fact = per_row(call) if call.func in ROW_LOSSES else elementwise(call)
    if fact.kind is not Kind.ROWS:
        return fact if fact.kind is Kind.UNKNOWN else unknown(f"{call.name} of a sum over samples")
    shapes = [tensor.shape for tensor in call.tensors]
    if call.func in CLASS_LOSSES:  # probabilities of classes, which are on dim 1 (dim 0 without a batch dim)
        shape = list(arguments["input"].shape)
        del shape[1 if len(shape) > 1 else 0]
        if fact.dim == 1:
            return unknown(f"{call.name} with the samples where the classes belong", coupled=True)
    elif call.func in ROW_LOSSES:
        with torch.no_grad():
            shape = list(call.func(**{**arguments, "reduction": "none"}).shape)
    else:
        shape = list(torch.broadcast_shapes(*shapes))
    weight = arguments.get("weight")
    if call.func in WEIGHED_MEANS and weight is not None and arguments["reduction"] == "mean":
        recipe = watch.fact(weight).recipe
        if recipe is None:
            return unknown(
                f"the mean of {call.name} with weights that do not follow from the batch's entries alone, so that "
                "their sum in other microbatches is unknown"
            )
        return fact._replace(samples=False), lambda entries: recipe.make(entries).double().sum()
    if fact.dim is None:
        return fact._replace(samples=False), Axis(None, Fraction(math.prod(shape), watch.samples)).rows
    others = math.prod(shape[: fact.dim] + shape[fact.dim + 1 :])
    return fact._replace(samples=False), fact.axis.times(others).rows if fact.axis is not None else None
