"""What is known of operators without asking torch is what torch says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shardwright.models import meta_results
from shardwright.models.meta_results import compute, find_result
from shardwright.utils.tensors import map_tensors

aten = torch.ops.aten
SHAPES = [(), (3,), (1, 3), (4, 1), (2, 4, 3), (2, 1, 3)]


def tensors() -> list[torch.Tensor]:
    made = [torch.randn(shape, dtype=dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    return [*made, torch.randn(3, 4, 2).permute(2, 1, 0), torch.ones(2, 4, 3, dtype=torch.long), torch.randn(0, 3)]


def described(found: Any) -> Any:
    return [
        (tensor.shape, tensor.dtype, tensor.stride()) for tensor in (found if isinstance(found, tuple) else [found])
    ]


def compare(func: Any, *args: Any) -> bool:
    """Whether something was known. It must be what real tensors give."""
    on_meta = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)
    found = find_result(func, on_meta, {})
    if found is None:
        return False
    assert described(found) == described(func(*args)), (func, args)
    assert all(tensor.is_meta for tensor in (found if isinstance(found, tuple) else [found]))
    return True


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor])
def test_pairs(func: Any) -> None:
    known = sum(compare(func, *pair) for pair in itertools.product(tensors(), repeat=2) if fits(*pair))
    assert known > 30
    assert not any(compare(func, *pair) for pair in itertools.product(tensors(), repeat=2) if not fits(*pair))
    assert sum(compare(func, tensor, 2) + compare(func, tensor, 0.5) for tensor in tensors()) > 12


def fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


def test_single_tensors() -> None:
    for func in (aten.neg, aten.rsqrt, aten.silu, aten.tanh, aten.sigmoid, aten.exp, aten.cos, aten.sin, aten.relu):
        assert sum(compare(func.default, tensor) for tensor in tensors() if tensor.is_floating_point()) > 8
    assert sum(compare(aten.pow.Tensor_Scalar, tensor, 2) for tensor in tensors()) > 8
    for func in (aten.add.Scalar, aten.mul.Scalar, aten.sub.Scalar, aten.div.Scalar):
        assert sum(compare(func, tensor, 2) for tensor in tensors()) > 8
    assert not compare(aten.mul.Scalar, torch.ones(3), 1j)


def test_along_a_dim() -> None:
    for tensor in tensors():
        if tensor.dim() and tensor.is_floating_point() and tensor.dtype is torch.float32:
            known = [compare(func, tensor, -1, False) for func in (aten._softmax.default, aten._log_softmax.default)]
            assert all(known) is tensor.is_contiguous()
            assert compare(aten._safe_softmax.default, tensor, -1) is tensor.is_contiguous()
            assert compare(aten.mean.dim, tensor, [-1], True) is tensor.is_contiguous()
            assert not compare(aten.mean.dim, tensor, [0], False)
            assert not compare(aten.mean.dim, tensor, None, True)
            assert not compare(aten._softmax.default, tensor.to(torch.bfloat16), -1, True)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_negative_log_likelihood(reduction: int) -> None:
    logs, targets = torch.randn(5, 7), torch.randint(0, 7, (5,))
    assert compare(aten.nll_loss_forward.default, logs, targets, None, reduction, -100)
    meta = logs.to("meta"), targets.to("meta")
    for given in ((meta[0], meta[1][1:]), (meta[0], meta[1].int()), (meta[0][0], meta[1])):
        assert find_result(aten.nll_loss_forward.default, (*given, None, reduction, -100), {}) is None


class Asked:
    """How often torch itself was asked for the result of an operator."""

    def __init__(self, func: Any) -> None:
        self.namespace, self._schema, self.tags = func.namespace, func._schema, func.tags
        self._func, self.times = func, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self._func(*args, **kwargs)


def remembered(func: Any, *args: Any, **kwargs: Any) -> int:
    """How often torch was asked in three calls. All must be what real tensors give."""
    asked = Asked(func)
    on_meta = map_tensors(lambda tensor: tensor.to("meta"), args)
    for _ in range(3):
        found = compute(asked, on_meta, kwargs)
        real = func(*args, **kwargs)
        assert type(found) is type(real)
        assert described(found) == described(real), (func, args, kwargs)
    return asked.times


def test_torch_is_asked_once_per_form() -> None:
    matrix = torch.randn(4, 3)
    for tensor in tensors():
        for args in ((aten.add.Tensor, tensor, 1), (aten.mul.Tensor, tensor, tensor), (aten.sum.default, tensor)):
            assert remembered(*args) == 1
    assert remembered(aten.mm.default, matrix, matrix.t()) == 1
    assert remembered(aten.mm.default, matrix.t(), matrix.double().float()) == 1
    assert remembered(aten.cat.default, [matrix, matrix[:2]], 0) == 1
    assert remembered(aten.native_layer_norm.default, matrix, [3], None, None, 1e-5) == 1
    assert remembered(aten.clone.default, matrix.t(), memory_format=torch.contiguous_format) == 1
    assert remembered(aten._to_copy.default, matrix.t(), dtype=torch.bfloat16) == 1


def test_equal_numbers_of_other_types_are_other_forms() -> None:
    ints = torch.arange(4).to("meta")
    assert compute(aten.mul.Tensor, (ints, 2), {}).dtype is torch.long
    assert compute(aten.mul.Tensor, (ints, 2.0), {}).dtype is torch.float32
    assert compute(aten.add.Tensor, (ints > 0, True), {}).dtype is torch.bool
    assert compute(aten.add.Tensor, (ints > 0, 1), {}).dtype is torch.long
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert compute(aten.mul.Tensor, (ints, 2.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


def test_what_does_more_than_compute_is_not_remembered() -> None:
    matrix = torch.randn(4, 3)
    assert remembered(aten.t.default, matrix) == 3  # a view
    assert remembered(aten.add_.Tensor, matrix, 1) == 3
    assert remembered(aten.bernoulli.default, matrix.sigmoid()) == 3
    meta = matrix.to("meta")
    assert compute(aten.t.default, (meta,), {})._base is meta
    compute(aten.add_.Tensor, (meta, 1), {})
    assert meta._version == 1
    asked = Asked(aten.add.Tensor)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            compute(asked, (meta, torch.empty(2, 7, device="meta")), {})
    assert asked.times == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_MOST_REMEMBERED", 8)
    memory = meta_results.Remembered((torch.Tensor,))
    monkeypatch.setattr(meta_results, "_remembered", memory)
    for size in range(30):
        assert compute(aten.exp.default, (torch.empty(size, device="meta"),), {}).shape == (size,)
        assert len(memory._found) <= 8
