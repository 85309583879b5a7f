"""Operators on fakes whose results are told without asking `FakeTensorMode`.

The mode goes a long way to a result: rules in Python, devices that differ, numbers that are known, and before all that
a cache whose keys are dear to make. Nearly every operator of a model stays on one device and is a view, which torch's
kernel makes in microseconds, or one whose result `meta_results` knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from ..models.meta_results import compute, find_result, has_rule

_aten = torch.ops.aten
_VIEWS = {
    func: func
    for func in (
        *(_aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.t.default, _aten.transpose.int),
        *(_aten.permute.default, _aten.expand.default, _aten.unsqueeze.default, _aten.detach.default),
    )
}
_VIEWS[_aten._unsafe_view.default] = _aten.view.default  # which has a kernel of its own, in Python
_REMEMBERED = frozenset(
    (
        *(_aten.clone.default, _aten._to_copy.default, _aten.new_empty.default, _aten.sum.dim_IntList),
        *(_aten.slice_backward.default, _aten.silu_backward.default, _aten.masked_fill.Scalar),
    )
)
_KINDS = frozenset((FakeTensor,))


def find_fake(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns in `mode`; None where the mode has to find out."""
    view = _VIEWS.get(func)
    if view is None and func not in _REMEMBERED and not has_rule(func):
        return None
    if (view is not None and kwargs) or kwargs.get("device") is not None:
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
    with in_kernel_invocation_manager(mode):  # inside, fakes are what they are made of: tensors on the meta device
        if view is not None:
            found = view(*args)
        else:
            found = find_result(func, args, kwargs)
            found = compute(func, args, kwargs, _KINDS) if found is None else found
    return (
        tuple(FakeTensor(mode, one, device) for one in found)
        if type(found) is tuple
        else FakeTensor(mode, found, device)
    )
