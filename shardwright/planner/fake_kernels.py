"""Operators on fakes whose results are told without asking `FakeTensorMode`.

The mode goes a long way to a result: rules in Python, devices that differ, numbers that are known, and before all that
a cache whose keys are dear to make. Nearly every operator of a model stays on one device and is a view or a change in
place, which torch's kernels make in microseconds, or one that `meta_results` has a rule for, or was asked before.

Checked on torch 2.11 and 2.13: `in_kernel_invocation_manager`, inside of which the mode calls kernels itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from ..models.meta_results import Remembered, find_result, has_rule

_aten = torch.ops.aten
_DIRECT = {
    func: func
    for func in (
        *(_aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.t.default, _aten.transpose.int),
        *(_aten.permute.default, _aten.expand.default, _aten.unsqueeze.default, _aten.detach.default),
        *(_aten.copy_.default, _aten.fill_.Scalar, _aten.div_.Scalar, _aten.bernoulli_.float),
    )
}
_DIRECT[_aten._unsafe_view.default] = _aten.view.default  # which has a kernel of its own, in Python
_REMEMBERED = frozenset(
    (
        *(_aten.clone.default, _aten._to_copy.default, _aten.new_empty.default, _aten.new_zeros.default),
        *(_aten.empty_like.default, _aten.sum.dim_IntList, _aten.slice_backward.default, _aten.masked_fill.Scalar),
        *(_aten.silu_backward.default, _aten.gelu.default, _aten.gelu_backward.default, _aten.addmm.default),
        *(_aten.native_layer_norm.default, _aten.native_layer_norm_backward.default),
    )
)
_remembered = Remembered((FakeTensor,))


def find_fake(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns in `mode`; None where the mode has to find out."""
    kernel, ruled = _DIRECT.get(func), has_rule(func)
    if kernel is None and not ruled and func not in _REMEMBERED:
        return None
    if kernel is not None and kwargs:
        return None
    device = None
    for value in args:
        if isinstance(value, torch.Tensor):
            # of one with a known number the mode knows the result's; a real one may be of another device
            if not isinstance(value, FakeTensor) or value.constant is not None or value.layout is not torch.strided:
                return None
            if device is not None and value.fake_device != device:
                return None
            device = value.fake_device
    if kwargs.get("device") not in (None, device):
        return None
    key = None
    with in_kernel_invocation_manager(mode):  # inside, fakes are what they are made of: tensors on the meta device
        if kernel is not None:
            found = kernel(*args)
        else:
            found = find_result(func, args, kwargs) if ruled else None
            if found is None:
                key = _remembered.key(func, args, kwargs, device)
                found = _remembered.recall(key) if key is not None else None
    if found is args[0]:  # changed in place
        return found
    if found is not None:
        several = type(found) is tuple
        return tuple(FakeTensor(mode, one, device) for one in found) if several else FakeTensor(mode, found, device)
    if key is None:
        return None
    with mode:
        found = func(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        _remembered.note(key, found)
    return found
