"""What a device computes, moves and sends for an action: counted from the operators that it calls.

with Operators() as operators:
    ...
operators.work        by name of the part of the step
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from ..kernels.lazy_logits import LazyLogits
from ..utils.pytree import tree_leaves
from .gradient_sums import GradientSums

_aten = torch.ops.aten
_FREE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten._unsafe_view.default,
}


class Operator(NamedTuple):
    """A call.

    kind    "product", "attention", "other", or the name of a collective
    flops   of a product
    moved   bytes of all that it reads and writes; of a collective what it is given
    made    of these, what a product or attention gives
    """

    kind: str
    flops: int
    moved: int
    made: int = 0


class Operators(GradientSums):
    """Counts calls by what they are, and by the part of the step that `part` says."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        self.calls: dict[str, Counter[Operator]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = self.unwatched(func, args)
        result = func(*args, **(kwargs or {}))
        if self.part:
            found = _read(func, args, kwargs or {}, result)
            if found is not None:
                self.calls.setdefault(self.part, Counter())[found] += 1
        return result


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operator | None:
    name = func._schema.name
    if func.namespace == "c10d":
        return Operator(name.removeprefix("c10d::").strip("_"), 0, bytes_of(args[0]))
    if func.namespace != "aten":
        return None
    aliases = [each.alias_info for each in func._schema.returns]
    if func in _FREE or any(alias is not None and not alias.is_write for alias in aliases):
        return None  # a view, or room for what comes
    moved = bytes_of((args, kwargs, result))
    if not moved:
        return None
    if "scaled_dot_product" in name:
        return Operator("attention", _attention_flops(name, args), moved, bytes_of(result))
    if "_grouped_mm" in name:
        groups = args[1].shape[0] if args[0].dim() > 2 else 1
        return Operator("product", 2 * args[0].numel() * args[1].shape[-1] // groups, moved, bytes_of(result))
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return Operator("product", int(count(*args, **kwargs, out_val=result)), moved, bytes_of(result))
    return Operator("other", 0, moved)


def bytes_of(tree: Any) -> int:
    """Of the tensors in nested lists."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors if not isinstance(leaf, LazyLogits))


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    backward = "backward" in name
    query, key = args[1:3] if backward else args[:2]
    return attention_flops(query, key, backward, any(arg is True for arg in args))


def attention_flops(query: torch.Tensor, key: torch.Tensor, backward: bool, causal: bool) -> int:
    """Two products forward and five backward; of causal ones half, which is what kernels compute."""
    full = 2 * (5 if backward else 2) * query.numel() * key.shape[-2]
    return int(full // 2 if causal else full)
