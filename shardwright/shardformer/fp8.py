"""Which linears of a model compute in 8 bits, and letting them.

Those of the repeated layers whose sizes are multiples of 16 on every rank. What stays in the dtype of the parameters:

    heads, embeddings and all else outside of the layers
    routers, whose choices are decided by small differences
    LoRA's A and B, which are small; the linear that they are added to does compute in 8 bits
    experts in stacked parameters, which are no linears
    linears with a forward or a parametrized weight of their own, or of sizes that are no multiples of 16

Modules keep their identity, names and parameters; the class of a plain linear becomes a subclass of what it was.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..comm.quantised_wire import exact_group
from ..models.blocks import find_blocks
from ..ops.fp8 import ALIGNED, Fp8Products
from ..spec import get_spec
from .layer.linear import ColumnParallel, RowParallel, computes_plainly, input_size, is_conv1d, is_linear, output_size
from .layer.parallel_module import ParallelModule, combined_class

_ROUTER = re.compile(r"(^|_)(gate|router)$")
_ADAPTER = re.compile(r"(^|\.)lora_")


@dataclass
class Converted:
    """
    names   of the modules that compute in 8 bits
    left    of linears that do not, by why
    """

    names: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        left = [f"{why}: {_counted(names)}" for why, names in self.left.items()]
        return f"{_counted(self.names)}; not in fp8: {'; '.join(left) or 'no linear'}"


class _InFp8(nn.Module):
    weight: Tensor
    bias: Any
    fp8: Fp8Products

    def forward(self, x: Tensor) -> Tensor:
        return self.fp8.linear(x, self.weight, self.bias, self.weight, is_conv1d(self))


def find_fp8_linears(model: nn.Module) -> Converted:
    """Which linears would compute in 8 bits, as they are laid out now."""
    found = Converted()
    inside = {
        id(module): f"{name}.{child}" for name, layer in find_blocks(model) for child, module in layer.named_modules()
    }
    for name, module in model.named_modules():
        if not is_linear(module):
            if id(module) in inside and any(map(_is_stack, module.parameters(recurse=False))):
                found.left.setdefault("experts in stacked parameters", []).append(name)
            continue
        why = "outside of the layers" if id(module) not in inside else _why_not(name, module)
        if why is None:
            found.names.append(name)
        else:
            found.left.setdefault(why, []).append(name)
    return found


def require_fp8_linears(model: nn.Module, option: str) -> Converted:
    """ValueError for a model that has none, which `option` (as text) asks for."""
    found = find_fp8_linears(model)
    if not found.names:
        raise ValueError(
            f"{option}: {type(model).__name__} has no linear that can compute in fp8 ({found}); such linears are those "
            f"of the repeated layers whose sizes are multiples of {ALIGNED} on every rank; use precision='bf16'"
        )
    return found


def compute_in_fp8(model: nn.Module, option: str, rowwise: bool, emulated: bool) -> Converted:
    """Let the linears of `model` compute in 8 bits. Sharding comes first, and so does `let_weight_grads_wait`."""
    found = require_fp8_linears(model, option)
    for name in found.names:
        module: Any = model.get_submodule(name)
        if isinstance(module, ColumnParallel | RowParallel):
            cut = "outputs" if isinstance(module, ColumnParallel) else "inputs"
            module.fp8 = Fp8Products(rowwise, emulated, cut, exact_group(module.parallel.group))  # type: ignore[arg-type]
        else:
            module.__class__ = combined_class(_InFp8, type(module))
            module.fp8 = Fp8Products(rowwise, emulated)
    return found


def fp8_linears_of(model: nn.Module) -> dict[str, Fp8Products]:
    """Those that are left of a model, after it was cut into stages too."""
    return {
        name: module.fp8
        for name, module in model.named_modules()
        if isinstance(getattr(module, "fp8", None), Fp8Products)
    }


def _why_not(name: str, module: nn.Module) -> str | None:
    if _ADAPTER.search(name):
        return "LoRA's own"
    if _ROUTER.search(name.rpartition(".")[2]):
        return "routers"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "read by torch's MultiheadAttention, which does not call them"
    known = isinstance(module, ColumnParallel | RowParallel) or not isinstance(module, ParallelModule)
    if not known or not computes_plainly(module):
        return "with a forward of their own"
    if "weight" not in module._parameters:
        return "whose weight is made of other parameters"
    if any(size % ALIGNED or not size for size in _sizes(module)):
        return f"sizes that are no multiples of {ALIGNED}"
    return None


def _is_stack(param: nn.Parameter) -> bool:
    """Of matrices, one for each expert. Tokens and positions that are learned have one in front of them."""
    return param.dim() == 3 and param.shape[0] > 1


def _sizes(module: nn.Module) -> set[int]:
    """Of inputs and outputs, on all ranks that share the linear."""
    sizes = {input_size(module), output_size(module)}
    spec = get_spec(module.get_parameter("weight"))
    if spec is not None and spec.is_sharded:
        sizes |= {sum(piece.length for piece in pieces) for pieces in spec.pieces}
    return sizes


def _counted(names: list[str]) -> str:
    """`14 linears (q_proj, k_proj, ...)`"""
    kinds = Counter(name.rpartition(".")[2] if not name[-1].isdigit() else name for name in names)
    shown = list(kinds)[:8]
    return f"{len(names)} ({', '.join(shown)}{', ...' if len(kinds) > len(shown) else ''})"
