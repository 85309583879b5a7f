"""Products with parameters whose weight gradient waits: the gradients are torch's, whatever the way the parameter is
used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.ops.postponed import PostponeWeightGrads
from shardwright.ops.weight_grad import WeightGradStore, told_late

E, T, I, O = 3, 5, 8, 16  # noqa: E741
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
PICKED = torch.tensor([2, 0, 2, -2])
IDS = torch.tensor([[0, 2, 1], [2, 2, 0]])

# name -> shape of the parameter, shape of x, y of both, whether the gradient can wait
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, nn.Parameter], Tensor], bool]] = {
    "linear": ((O, I), (2, T, I), lambda x, w: F.linear(x, w), True),
    "linear of a slice": ((E, O, I), (T, I), lambda x, w: F.linear(x, w[1]) + F.linear(2 * x, w[2]), True),
    "linear of a slice with bias": (
        (E, O, I),
        (T, I),
        lambda x, w: F.linear(x, w[1], torch.ones(O, dtype=x.dtype)),
        True,
    ),
    "linear of a chunk": ((2 * O, I), (T, I), lambda x, w: F.linear(x, w.chunk(2)[1]), True),
    "linear of a transpose": ((I, O), (T, I), lambda x, w: F.linear(x, w.t()), True),
    "linear of unbound": ((E, O, I), (T, I), lambda x, w: F.linear(x, w.unbind(0)[2]), True),
    "linear of a computed weight": ((O, I), (T, I), lambda x, w: F.linear(x, 2 * w), False),
    "linear of a copy": ((O, I), (T, I), lambda x, w: F.linear(x, w.clone()), False),
    "linear of an expanded weight": ((1, I), (T, I), lambda x, w: F.linear(x, w.expand(O, I)), False),
    "linear of a float32 cast": ((O, I), (T, I), lambda x, w: F.linear(x.float(), w.float()).to(x.dtype), False),
    "matmul": ((I, O), (2, T, I), lambda x, w: torch.matmul(x, w), True),
    "at": ((I, O), (2, T, I), lambda x, w: x @ w, True),
    "at, from the left": ((I, O), (T, O), lambda x, w: w @ x.t(), False),
    "mm": ((I, O), (T, I), lambda x, w: x.mm(w), True),
    "matmul with a vector": ((I, O), (I,), lambda x, w: x @ w, False),
    "matmul of stacks": ((E, I, O), (E, T, I), lambda x, w: x @ w, True),
    "matmul over more stacks": ((E, I, O), (2, E, T, I), lambda x, w: x @ w, False),
    "bmm": ((E, I, O), (E, T, I), lambda x, w: torch.bmm(x, w), True),
    "bmm, weight first": ((E, O, I), (E, I, T), lambda x, w: torch.bmm(w, x), True),
    "bmm of a transpose": ((E, O, I), (E, T, I), lambda x, w: x.bmm(w.transpose(1, 2)), True),
    "bmm of rows": ((E, I, O), (4, T, I), lambda x, w: torch.bmm(x, w[PICKED]), True),
    "rows used for something else too": (
        (E, I, O),
        (4, T, I),
        lambda x, w: (r := w[PICKED], torch.bmm(x, r) + r.sum())[1],
        False,
    ),
    "rows changed in place": ((E, I, O), (4, T, I), lambda x, w: torch.bmm(x, w[PICKED].mul_(2)), False),
    "addmm": ((I, O), (T, I), lambda x, w: torch.addmm(torch.ones(O, dtype=x.dtype), x, w), False),
    "embedding": ((E, I), (2, 3, I), lambda x, w: F.embedding(IDS, w) * x, True),
    "embedding with padding": ((E, I), (2, 3, I), lambda x, w: F.embedding(IDS, w, padding_idx=-1) * x, True),
    "embedding by frequency": ((E, I), (2, 3, I), lambda x, w: F.embedding(IDS, w, scale_grad_by_freq=True) * x, True),
    "used twice": ((O, I), (T, I), lambda x, w: F.linear(F.linear(x, w), w.t()), True),
}


def both(
    name: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, nn.Parameter, nn.Parameter, Callable[..., Tensor]]:
    shape, x_shape, function, _ = CASES[name]
    torch.manual_seed(0)
    weight, x = torch.randn(shape, dtype=dtype), torch.randn(x_shape, dtype=dtype)
    param, reference = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    return x, x.clone().requires_grad_(), x.clone().requires_grad_(), param, reference, function


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_torchs(name: str) -> None:
    x, mine, theirs, param, reference, function = both(name, torch.float64)
    store = WeightGradStore()
    for given in (None, torch.full_like(param, 0.5)):  # without a gradient yet, and on top of one
        param.grad, reference.grad, mine.grad, theirs.grad = given, None if given is None else given.clone(), None, None
        fired: list[Tensor] = []
        handle = param.register_post_accumulate_grad_hook(told_late(partial(_note, fired)))
        with PostponeWeightGrads():
            y = function(mine, param)
        expected = function(theirs, reference)
        torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
        dy = torch.randn_like(expected)
        expected.backward(dy)
        with store.deferring("key"):
            y.backward(dy)
        waiting = CASES[name][3]
        assert bool(len(store)) == (waiting or name == "rows used for something else too")
        assert not waiting or param.grad is given, "a gradient that waits reaches nobody before it is computed"
        before = len(fired)
        store.run("key")
        assert len(fired) - before == int(waiting or name == "rows used for something else too"), (
            "told once, when it is complete"
        )
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(param.grad, reference.grad, rtol=1e-13, atol=1e-13)
        handle.remove()
    assert x.shape == mine.shape

    # Without a store, in backward or at all, autograd gets the gradient.
    param.grad, reference.grad = None, None
    with PostponeWeightGrads():
        y = function(mine, param)
    y.backward(dy)
    function(theirs, reference).backward(dy)
    assert len(store) == 0
    torch.testing.assert_close(param.grad, reference.grad, rtol=1e-13, atol=1e-13)


def _note(fired: list[Tensor], param: Tensor) -> None:
    fired.append(param)


def _double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2.0)


@pytest.mark.parametrize("after", [False, True])
def test_the_hooks_of_a_script_see_gradients(after: bool) -> None:
    weight, bias, table = (nn.Parameter(torch.randn(shape)) for shape in ((O, I), (O,), (4, I)))
    params, ids, store = (weight, bias, table), torch.tensor([0, 2, 2]), WeightGradStore()

    def loss() -> Tensor:
        with PostponeWeightGrads():
            return (
                (F.linear(F.embedding(ids, table), weight, bias) + F.linear(table[1:4], weight[:2]).sum()).pow(2).sum()
            )

    expected = torch.autograd.grad(loss(), params)
    for param in params:
        if after:
            param.register_post_accumulate_grad_hook(_double)
        else:
            param.register_hook(lambda grad: 2.0 * grad)
    with store.deferring():
        loss().backward()
    assert len(store) == 0
    store.run()
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, 2.0 * grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn((E, O, I) if transposed else (E, I, O)).to(dtype), torch.randn(8, I).to(dtype)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)  # the second group is empty
    param, reference = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    store = WeightGradStore()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2) if transposed else weight, offs=ends)

    with PostponeWeightGrads():
        y = run(mine, param)
    expected = run(theirs, reference)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with store.deferring():
        y.backward(dy)
    assert param.grad is None
    store.run()
    assert torch.equal(y, expected)
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert torch.equal(param.grad, reference.grad)  # type: ignore[arg-type]


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    store = WeightGradStore()
    for x_needs, w_needs in ((False, True), (True, False)):
        weight, x = nn.Parameter(torch.randn(O, I), requires_grad=w_needs), torch.randn(T, I, requires_grad=x_needs)
        with PostponeWeightGrads():
            y = F.linear(x, weight.view(2, O // 2, I)[1])
        with store.deferring():
            y.sum().backward()
        assert len(store) == int(w_needs)
        store.run()
        assert (weight.grad is not None, x.grad is not None) == (w_needs, x_needs)
    with PostponeWeightGrads(), torch.no_grad():
        assert not F.linear(torch.randn(T, I), nn.Parameter(torch.randn(O, I))).requires_grad


def test_the_limit_counts_shared_memory_once_and_the_oldest_go_first() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    x = torch.randn(2, 4)  # 32 bytes, and every dy as many
    store = WeightGradStore()

    def put(number: int, key: str) -> None:
        with store.deferring(key):
            store.put(weights[number], lambda into: torch.full((4, 4), float(number)), (x, torch.randn(2, 4)))

    put(0, "a")
    put(1, "a")
    assert store.bytes == store.peak == 96
    store.limit = 100
    put(2, "b")
    assert (store.pending("a"), store.pending("b")) == (1, 1)
    assert weights[0].grad is not None
    assert weights[1].grad is None
    assert store.bytes == 96
    fired: list[int] = []
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(told_late(lambda _, number=number: fired.append(number)))
    store.run("a")
    assert fired == [0, 1], "also for what the limit had computed before"
    assert not store.run_one_of_others() or store.pending("b") == 0
    store.run("b")
    assert fired == [0, 1, 2]
    assert store.bytes == len(store) == 0
    store.limit = 0
    put(0, "c")
    assert store.pending("c") == store.bytes == 0


@pytest.mark.parametrize("remedy", ["", "copy", "limit"])
def test_inputs_that_are_edited_while_a_gradient_waits(remedy: str) -> None:
    weight, running = nn.Parameter(torch.ones(2, 3)), torch.ones(4, 3)
    store = WeightGradStore(0 if remedy == "limit" else 1 << 20)
    for _ in range(2):
        with PostponeWeightGrads():
            running.mul_(2.0)
            product = F.linear(running.clone() if remedy == "copy" else running, weight)
        with store.deferring():
            product.sum().backward()
    if remedy:
        store.run()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((2, 3), 4 * (2.0 + 4.0)))
    else:
        with pytest.raises(ValueError, match=r"shape \(2, 3\) waits(.|\n)*edited in place"):
            store.run()
