"""Which dtype each parameter, buffer and input works in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from ..utils.errors import one_of
from ..utils.tensors import map_tensors

T = TypeVar("T")

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF = (torch.float16, torch.bfloat16)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PrecisionPolicy:
    """`precision` applied to a model.

    fp32    half-precision parameters are raised to fp32; fp32 and fp64 stay as they are
    bf16    floating-point parameters work in bf16
    fp16    floating-point parameters work in fp16, with a scaled loss

    Modules, parameters and buffers that a transformers model names in `_keep_in_fp32_modules_strict` stay in fp32, in
    fp16 also those of `_keep_in_fp32_modules`, whose numbers leave its range (as transformers itself loads them); so
    do classifiers of routers with a `router_dtype` of fp32 (Switch, NLLB-MoE), which their forward casts in place, and
    batch norms, whose running statistics would stop moving in 8 bits of mantissa. Persistent buffers follow the
    parameters; non-persistent ones (rotary frequencies, masks) keep the dtype that the model computed them in, but for
    sinusoidal tables (M2M-100, XGLM), which are added to embeddings as they are.
    """

    def __init__(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise one_of("precision", precision, tuple(PRECISIONS))
        self.precision = precision
        self.dtype = PRECISIONS[precision]

    @property
    def is_half(self) -> bool:
        return self.dtype in HALF

    @property
    def needs_scaler(self) -> bool:
        return self.dtype == torch.float16

    def dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Working dtype of every parameter of `model` by each of its full names."""
        kept = _kept_in_fp32(model, self.dtype)
        found = {id(param): self._dtype_of(param, is_kept) for param, is_kept in _with_kept(model, kept)}
        return {name: found[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}

    def _dtype_of(self, tensor: torch.Tensor, keep: bool) -> torch.dtype:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return tensor.dtype  # integers and fp8 storage belong to whoever made them
        if self.is_half:
            return torch.float32 if keep else self.dtype
        return torch.float32 if tensor.dtype in HALF else tensor.dtype

    def cast_buffers(self, model: nn.Module) -> None:
        """Bring persistent floating-point buffers to the dtype of the parameters beside them."""
        kept = _kept_in_fp32(model, self.dtype)
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_table = name == "weights" and hasattr(module, "make_weights")
                if is_table or name not in module._non_persistent_buffers_set:
                    keep = _stays(kept, module, prefix, name)
                    module._buffers[name] = buffer.to(self._dtype_of(buffer, keep))

    def cast_inputs(self, tree: T) -> T:
        """Floating-point tensors of `tree` in the working dtype; token ids and masks of integers are left alone."""
        if not self.is_half:
            return tree
        return map_tensors(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor, tree)


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """Pattern of module names that the model wants in fp32 where it works in `dtype`, whole name parts only; None where
    it names none.
    """
    attributes = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype == torch.float16)
    names: set[str] = set()
    for prefix, module in model.named_modules():
        for attribute in attributes:
            names.update(getattr(module, attribute, None) or ())
        if vars(module).get("dtype") is torch.float32 and isinstance(getattr(module, "classifier", None), nn.Module):
            names.add(f"{prefix}.classifier".lstrip("."))  # a router that casts it in each call
    if not names:
        return None
    return re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(names)))


def _with_kept(model: nn.Module, kept: re.Pattern[str] | None) -> Iterator[tuple[nn.Parameter, bool]]:
    """Parameters, and whether they stay in fp32."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield param, _stays(kept, module, prefix, name)


def _stays(kept: re.Pattern[str] | None, module: nn.Module, prefix: str, name: str) -> bool:
    """Whether the tensor `name` of `module` stays in fp32: models name modules, and parameters and buffers (a router's
    e_score_correction_bias) by themselves.
    """
    full = f"{prefix}.{name}" if prefix else name
    return isinstance(module, BATCH_NORMS) or bool(kept and kept.search(full))
