"""What is told of operators on fakes without asking torch's mode is what the mode says, and what real tensors give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwright.planner.fake_kernels import find_fake
from shardwright.utils.tensors import map_tensors

aten = torch.ops.aten
MATRIX, CUBE = torch.randn(4, 6), torch.randn(2, 4, 6)
WIDE = torch.randn(4, 12)[:, ::2]  # strided
HALF = torch.randn(4, 6, dtype=torch.bfloat16)

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.view.default, (MATRIX, [2, 12]), {}),
    (aten.view.default, (MATRIX, [-1]), {}),
    (aten._unsafe_view.default, (CUBE, [8, 6]), {}),
    (aten.slice.Tensor, (CUBE, 1, 1, 3), {}),
    (aten.slice.Tensor, (MATRIX,), {}),
    (aten.select.int, (CUBE, 0, 1), {}),
    (aten.t.default, (MATRIX,), {}),
    (aten.transpose.int, (CUBE, 1, 2), {}),
    (aten.permute.default, (CUBE, [2, 0, 1]), {}),
    (aten.expand.default, (MATRIX, [3, 4, 6]), {}),
    (aten.unsqueeze.default, (MATRIX, 1), {}),
    (aten.detach.default, (WIDE,), {}),
    (aten.mm.default, (MATRIX, CUBE[0].t()), {}),
    (aten.mm.default, (WIDE.t(), MATRIX), {}),
    (aten.mul.Tensor, (MATRIX, MATRIX), {}),
    (aten.mul.Tensor, (WIDE, MATRIX), {}),
    (aten.mul.Tensor, (MATRIX.t(), WIDE.t()), {}),
    (aten.mul.Tensor, (MATRIX, HALF), {}),
    (aten.mul.Tensor, (CUBE, MATRIX[:1]), {}),
    (aten.mul.Tensor, (HALF, 0.5), {}),
    (aten.add.Tensor, (MATRIX, WIDE), {"alpha": 2}),
    (aten.neg.default, (WIDE,), {}),
    (aten.pow.Tensor_Scalar, (MATRIX, 2), {}),
    (aten.mean.dim, (HALF, [-1], True), {}),
    (aten.mean.dim, (WIDE, [0]), {"dtype": torch.float64}),
    (aten.sum.dim_IntList, (CUBE, [0, 1], True), {}),
    (aten.clone.default, (MATRIX.t(),), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (MATRIX.t(),), {}),
    (aten._to_copy.default, (WIDE,), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (WIDE,), {"dtype": torch.bfloat16, "layout": torch.strided, "device": torch.device("cpu")}),
    (aten.new_empty.default, (HALF, [3, 2]), {"pin_memory": False}),
    (aten.new_empty.default, (HALF, [3, 2]), {"dtype": torch.float32}),
    (aten.slice_backward.default, (MATRIX, [4, 12], 1, 0, 6, 1), {}),
    (aten.silu_backward.default, (MATRIX, WIDE), {}),
    (aten.gelu_backward.default, (MATRIX, WIDE), {"approximate": "tanh"}),
    (aten.addmm.default, (MATRIX[0], MATRIX[:, :4], WIDE), {}),
    (aten.empty_like.default, (WIDE,), {}),
    (aten.new_zeros.default, (HALF, [2]), {"pin_memory": False}),
    (aten.masked_fill.Scalar, (MATRIX, MATRIX > 0, -1.0), {}),
]


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def faked(mode: FakeTensorMode, values: Any) -> Any:
    """With the memory that views share."""
    return map_tensors(mode.from_tensor, values)


def described(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)])
def test_results(mode: FakeTensorMode, case: Any) -> None:
    func, args, kwargs = case
    fakes = faked(mode, args)
    for _ in range(2):  # the second time out of memory
        found = find_fake(mode, func, fakes, kwargs)
        with mode:
            expected = func(*fakes, **kwargs)
        assert type(found) is FakeTensor
        assert described(found) == described(expected) == described(func(*args, **kwargs))
    shared = found.untyped_storage()._cdata == fakes[0].untyped_storage()._cdata
    assert shared is (expected.untyped_storage()._cdata == fakes[0].untyped_storage()._cdata)


@pytest.mark.parametrize("rows", [MATRIX, HALF], ids=["fp32", "bf16"])  # on a CPU bf16 has other statistics
def test_layer_norm(mode: FakeTensorMode, rows: torch.Tensor) -> None:
    args = (rows, [6], rows[0].clone(), None, 1e-5)
    real = aten.native_layer_norm.default(*args)
    fakes = faked(mode, args)
    for _ in range(2):
        found = find_fake(mode, aten.native_layer_norm.default, fakes, {})
        assert list(map(described, found)) == list(map(described, real))
    behind = (rows, rows, [6], *real[1:], rows[0].clone(), rows[1].clone())
    for mask in ([True, True, True], [True, False, False]):
        expected = aten.native_layer_norm_backward.default(*behind, mask)
        for _ in range(2):
            found = find_fake(mode, aten.native_layer_norm_backward.default, (*faked(mode, behind), mask), {})
            for one, other in zip(found, expected, strict=True):
                assert one is other is None or described(one) == described(other)


def test_changes_in_place(mode: FakeTensorMode) -> None:
    target, source = faked(mode, (MATRIX.clone(), HALF[:1].clone()))
    assert find_fake(mode, aten.copy_.default, (target, source), {}) is target
    assert find_fake(mode, aten.fill_.Scalar, (target, 2.0), {}) is target
    assert find_fake(mode, aten.div_.Scalar, (target, 2.0), {}) is target
    assert find_fake(mode, aten.bernoulli_.float, (target, 0.5), {}) is target
    assert target._version == 4
    with pytest.raises(RuntimeError):
        find_fake(mode, aten.copy_.default, (source, target), {})


def test_results_that_are_several(mode: FakeTensorMode) -> None:
    logs, targets = faked(mode, (torch.randn(5, 7), torch.randint(0, 7, (5,))))
    found = find_fake(mode, aten.nll_loss_forward.default, (logs, targets, None, 1, -100), {})
    assert [described(one)[0] for one in found] == [(), ()]
    assert all(type(one) is FakeTensor and one.device.type == "cpu" for one in found)


def test_what_is_left_to_the_mode(mode: FakeTensorMode) -> None:
    fake, cuda = mode.from_tensor(MATRIX), FakeTensor(mode, torch.empty(4, 6, device="meta"), torch.device("cuda", 0))
    for args in ((fake, MATRIX), (fake, cuda), (MATRIX, 2)):
        assert find_fake(mode, aten.mul.Tensor, args, {}) is None
    assert find_fake(mode, aten._to_copy.default, (fake,), {"device": torch.device("cuda", 0)}) is None
    assert find_fake(mode, aten.add_.Tensor, (fake, fake), {}) is None
    found = find_fake(mode, aten.mul.Tensor, (cuda, cuda), {})
    assert found.device == torch.device("cuda", 0)


def test_errors_are_the_kernels(mode: FakeTensorMode) -> None:
    fake = mode.from_tensor(MATRIX)
    for func, args in ((aten.view.default, (fake, [5])), (aten.mm.default, (fake, fake))):
        with pytest.raises(RuntimeError):
            find_fake(mode, func, args, {})
