"""Functions of torch by what following a loss has to do with them, and the names under which they come."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch.nn.functional as F

from ...ops.vocab_mode import sharded_cross_entropy
from .facts import (
    names,
)

CLASS_LOSSES = (
    F.cross_entropy,
    sharded_cross_entropy,
    F.nll_loss,
)  # their targets are class indices, with an ignore index


ELEMENT_LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
)


ROW_LOSSES = (  # one number per row of dim 0
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
)


SIGNATURES = {function: inspect.signature(function) for function in (*CLASS_LOSSES, *ELEMENT_LOSSES, *ROW_LOSSES)}


READ_BY_HOST = names("""item __int__ __float__ __index__ __bool__ tolist numpy __array__""")


SILENT = names(
    """dim is_floating_point is_complex is_contiguous element_size stride data_ptr get_device ndimension requires_grad_
    is_nonzero backward register_hook retain_grad _set_grad_enabled __hash__ __repr__ __format__ __str__ is_pinned
    untyped_storage storage_offset is_shared share_memory_ finfo iinfo is_same_size result_type can_cast promote_types
    broadcast_shapes"""
)


SIZES = names("""size numel nelement __len__""")


_IN_PLACE_DUNDERS = names("""__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__ __ixor__ __ipow__""")


_OPERATORS = {
    "rtruediv": "rdiv", "truediv": "div", "rmul": "mul", "radd": "add", "invert": "bitwise_not",
    "and": "bitwise_and", "rand": "bitwise_and",
    "or": "bitwise_or", "ror": "bitwise_or", "xor": "bitwise_xor", "rxor": "bitwise_xor", "rmatmul": "matmul",
}  # fmt: skip


ARITHMETIC = names(
    """add sub mul div rdiv rsub pow rpow true_divide divide multiply subtract clamp clip clamp_min clamp_max tensor
    as_tensor"""
)


SHAPED = names(
    "view reshape unflatten expand zeros ones full empty arange new_zeros new_ones new_full new_empty getitem"
)


COMPARISONS = names("lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose")


RANDOM = names(
    """dropout bernoulli multinomial rand randn randint rand_like randn_like randint_like empty empty_like new_empty"""
)


def with_lost_weight(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with the weight that l1_loss of torch 2.13 leaves out when it hands its arguments on to who watches."""
    if func is not F.l1_loss or "weight" in kwargs:
        return kwargs
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    weight = frame.f_locals.get("weight") if frame is not None else None
    return kwargs if weight is None else {**kwargs, "weight": weight}


WEIGHED_MEANS = (F.mse_loss, F.l1_loss)  # with a weight for each element they divide by the sum of these


def has_class_targets(func: Any, arguments: Mapping[str, Any]) -> bool:
    return func in CLASS_LOSSES and not arguments["target"].is_floating_point()


@cache
def operation(name: str) -> tuple[str, bool]:
    """(the operation, whether it changes its first argument), however it was written: as an operator, in place, as a
    function.
    """
    if name in _IN_PLACE_DUNDERS:
        return "div" if name in ("__itruediv__", "__idiv__") else name[3:-2], True
    if name.startswith("__") and name.endswith("__"):
        return _OPERATORS.get(name[2:-2], name[2:-2]), name == "__setitem__"
    return (name[:-1], True) if name.endswith("_") else (name, False)
