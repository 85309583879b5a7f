"""Rules for products and other functions of whole samples or rows (`rules`)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from .facts import CONST, SUM, Fact, Kind, Recipe, first_unknown, unknown
from .rules import TOGETHER, Call, Rule, elementwise, from_right, named, recomputed


def matmul(call: Call) -> Fact:
    if blame := first_unknown(call.facts):
        return blame
    kinds = {fact.kind for fact in call.facts}
    if Kind.ROWS not in kinds:
        if sum(fact.kind is Kind.SUM for fact in call.facts) == 1 and call.facts.count(CONST) == len(call.facts) - 1:
            return SUM
        return elementwise(call) if kinds <= {Kind.CONST, Kind.WHOLE} else unknown(f"{call.name} of sums over samples")
    (left, right), (one, other) = call.tensors[:2], call.facts[:2]
    if call.name == "linear":
        free = (
            one.kind is Kind.ROWS
            and all(fact.kind is Kind.CONST for fact in call.facts[1:])
            and one.dim != left.dim() - 1
        )
        return one.without_origin() if free else unknown(TOGETHER.format(name=call.name), coupled=True)
    contracted = -1 if right.dim() == 1 else -2
    place = from_right(left, one) if one.kind is Kind.ROWS else None
    there = from_right(right, other) if other.kind is Kind.ROWS else None
    if (one.kind is Kind.ROWS and place is None) or (other.kind is Kind.ROWS and there is None):
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if place == -1 and there == contracted and one.order == other.order:
        return SUM if left.dim() <= 2 and right.dim() <= 2 else unknown(TOGETHER.format(name=call.name), coupled=True)
    if place == -1 or there == contracted or (place == -2 and there is not None) or (there == -1 and place is not None):
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if place is not None and there is not None and (place != there or one.order != other.order):
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    fact = one if place is not None else other
    found = place if place is not None else there
    assert found is not None
    if right.dim() == 1:
        found += 1
    elif left.dim() == 1:
        found += found < -1
    return fact.without_origin()._replace(dim=call.result.dim() + found)


def einsum(call: Call) -> Fact:
    if blame := first_unknown(call.facts):
        return blame
    equation = call.args[0]
    if not isinstance(equation, str) or "..." in equation or not any(fact.kind is Kind.ROWS for fact in call.facts):
        return (
            elementwise(call)
            if all(fact.kind is Kind.CONST for fact in call.facts)
            else unknown("einsum is not followed here")
        )
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters: set[str] = set()
    orders: set[Hashable] = set()
    for term, fact in zip(inputs.split(","), call.facts, strict=True):
        if fact.kind is Kind.ROWS and fact.dim is not None:
            letters.add(term[fact.dim])
            orders.add(fact.order)
        elif fact.kind is not Kind.CONST:
            return unknown("einsum is not followed here")
    if len(letters) != 1 or len(orders) != 1 or "->" not in equation:
        return unknown(TOGETHER.format(name="einsum"), coupled=True)
    letter = letters.pop()
    if any(letter in term for term, fact in zip(inputs.split(","), call.facts, strict=True) if fact.kind is Kind.CONST):
        return unknown("einsum gives every place in the batch a value of its own")
    first = next(fact for fact in call.facts if fact.kind is Kind.ROWS)
    return first.without_origin()._replace(dim=output.index(letter)) if letter in output else SUM


# Dims that an input has when its first one counts samples.
_BATCHED = {
    "batch_norm": 2,
    "group_norm": 2,
    "conv2d": 4,
    "conv3d": 5,
    "conv_transpose2d": 4,
    "max_pool2d": 4,
    "avg_pool2d": 4,
    "adaptive_avg_pool2d": 4,
    "adaptive_max_pool2d": 4,
    "pixel_shuffle": 4,
}


def per_sample(call: Call) -> Fact:
    """Layers that work on each row of dim 0, with weights."""
    if blame := first_unknown(call.facts):
        return blame
    rows = [fact for fact in call.facts if fact.kind is Kind.ROWS]
    if not rows:
        return elementwise(call)
    training = call.name == "batch_norm" and call.kwargs.get("training", call.args[5] if len(call.args) > 5 else False)
    batched = call.first.dim() >= _BATCHED.get(call.name, 3)
    # Filters that samples have made meet all samples; what attention meets is each sample's own.
    if call.name == "scaled_dot_product_attention":
        places = {
            from_right(tensor, fact)
            for tensor, fact in zip(call.tensors, call.facts, strict=True)
            if fact.kind is Kind.ROWS
        }
        met = len(places) > 1
    else:
        met = len(rows) > 1 or call.facts[0].kind is not Kind.ROWS
    if any(fact.dim != 0 or fact.order != rows[0].order for fact in rows) or not batched or training or met:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return rows[0].without_origin()


def per_row(call: Call) -> Fact:
    """Losses with one number for each row of dim 0."""
    if blame := first_unknown(call.facts):
        return blame
    rows = [fact for fact in call.facts if fact.kind is Kind.ROWS]
    if not rows or any(fact.dim != 0 or fact.order != rows[0].order for fact in rows):
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return rows[0].without_origin()


def ctc(call: Call) -> Fact:
    """ctc_loss: log_probs [T, N, C], targets [N, S] or all in one row, lengths [N]; the mean is one over targets,
    then over samples.
    """
    if blame := first_unknown(call.facts):
        return blame
    lengths = call.argument(3, "target_lengths")
    rows = call.facts[0]
    aligned = [fact.kind is Kind.ROWS and fact.dim == 0 and fact.order == () for fact in call.facts[1:]]
    if rows.kind is not Kind.ROWS or rows.dim != 1 or rows.order != () or len(aligned) != 3 or not all(aligned):
        return unknown(f"{call.name} with lengths that are no tensors, one number for each sample")
    reduction = call.argument(5, "reduction", default="mean")
    fact = Fact(Kind.ROWS, 0, rows.axis)
    if reduction != "mean":
        return fact if reduction == "none" else SUM
    if again := recomputed(call.name):
        return again
    if rows.axis is None:
        return unknown(f"{call.name} of a number of samples that is not known in other microbatches")
    each = call.func(
        *call.args[:5], **{**call.kwargs, "reduction": "none"}, **_named_from(call.args, 6, "zero_infinity")
    )
    total = (each / lengths.clamp(min=1)).sum()
    call.result = total / call.watch.rows(rows.axis).to(total)
    return SUM


def _named_from(args: tuple[Any, ...], place: int, name: str) -> dict[str, Any]:
    return {name: args[place]} if len(args) > place else {}


def bincount(call: Call) -> Fact:
    """How many samples each class has: known ahead, if every microbatch counts as many classes."""
    fact = call.facts[0]
    classes = call.argument(2, "minlength", default=0)
    if fact.kind is not Kind.ROWS or fact.recipe is None or len(call.facts) > 1 or not classes:
        return (
            fact
            if fact.kind is Kind.UNKNOWN
            else unknown("bincount without minlength, or of what the model has computed")
        )
    recipe, local, watch = Recipe(None, torch.bincount, (fact.recipe,), {"minlength": classes}), call.result, call.watch
    return Fact(Kind.WHOLE, whole=cache(lambda: watch.total(recipe.make, local)))


def last_dims(call: Call) -> Fact:
    """layer_norm, one_hot, embedding, glu: the dims of the argument that counts rows stay in front."""
    if blame := first_unknown(call.facts):
        return blame
    rows = [fact for fact in call.facts if fact.kind is Kind.ROWS]
    if not rows:
        return elementwise(call)
    fact = call.facts[0]
    ok = fact.kind is Kind.ROWS and len(rows) == 1 and fact.dim is not None
    if call.name in ("layer_norm", "rms_norm"):
        ok = ok and fact.dim is not None and fact.dim < call.first.dim() - len(call.argument(1, "normalized_shape"))
    elif call.name == "one_hot":
        if call.argument(1, "num_classes", default=-1) == -1:
            return unknown("one_hot without num_classes makes as many classes as the microbatch happens to have")
    elif call.name == "glu":
        ok = ok and fact.dim != call.argument(1, "dim", default=-1) % call.first.dim()
    return fact.without_origin() if ok else unknown(TOGETHER.format(name=call.name), coupled=True)


def matrices(call: Call) -> Fact:
    """Functions of whole matrices, which the last two dims hold."""
    if blame := first_unknown(call.facts):
        return blame
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS or len(call.facts) > 1 or fact.dim is None or fact.dim >= call.first.dim() - 2:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return fact.without_origin()


def distance(call: Call) -> Fact:
    """cosine_similarity and pairwise_distance: elementwise, then one dim goes."""
    fact = elementwise(call)
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return fact
    ndim = max(tensor.dim() for tensor in call.tensors)
    dim = (call.argument(2, "dim", default=1) if call.name == "cosine_similarity" else -1) % ndim
    if dim == fact.dim:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return fact._replace(dim=fact.dim - (dim < fact.dim))


PRODUCT_RULES: dict[str, Rule] = {
    **named(matmul, "matmul mm bmm mv dot linear"),
    **named(einsum, "einsum"),
    **named(
        per_sample,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d max_pool1d max_pool2d avg_pool1d avg_pool2d batch_norm",
    ),
    **named(
        per_sample, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d interpolate group_norm instance_norm"
    ),
    **named(per_sample, "scaled_dot_product_attention pixel_shuffle"),
    **named(last_dims, "layer_norm rms_norm one_hot embedding glu"),
    **named(ctc, "ctc_loss"),
    **named(bincount, "bincount"),
    **named(distance, "cosine_similarity pairwise_distance"),
    **named(matrices, "linalg_svdvals det logdet linalg_det inverse linalg_inv pinverse linalg_pinv matrix_exp"),
    **named(matrices, "linalg_matrix_exp cholesky linalg_cholesky linalg_eigvalsh nuclear_norm rot90 cov corrcoef"),
}
