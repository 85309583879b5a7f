"""Column, row and plain linears against torch's on one process: values, every gradient, collectives, postponed
weight gradients.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import CountCollectives
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.ops import linear as linear_ops
from shardwright.ops.collective import gather_from_group, reduce_from_group, split_to_group
from shardwright.ops.cross_entropy import vocab_cross_entropy
from shardwright.ops.linear import column_linear, linear, row_linear
from shardwright.ops.shared_grads import sum_in_backward
from shardwright.ops.vocab_shard import VocabShard
from shardwright.ops.weight_grad import WeightGradStore
from shardwright.spec import ParamSpec, set_spec
from shardwright.testing import run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Reference(nn.Module):
    """An attention-like block: three projections of one input, one output projection."""

    def __init__(self, hidden: int, inner: int, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        for name, (i, o) in {
            "q": (hidden, inner),
            "k": (hidden, inner),
            "v": (hidden, inner),
            "o": (inner, hidden),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn((i, o) if transposed else (o, i)) / 3))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(o)))

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        return F.linear(x, weight.t() if self.transposed else weight, getattr(self, f"{name}_bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.project(name, x) for name in "qkv")
        return x + self.project("o", torch.tanh(q) * torch.sigmoid(k) + v)


class Sharded(Reference):
    """The same from a rank's shards."""

    def __init__(self, full: Reference, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.transposed, self.group = full.transposed, group
        for name, param in full.named_parameters():
            dim = 0 if name.endswith("bias") else int(full.transposed)
            if name == "o":
                dim = 1 - dim
            local = param.detach() if name == "o_bias" else param.detach().chunk(group.size(), dim)[group.rank()]
            self.register_parameter(name, nn.Parameter(local.clone()))

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
        if name == "o":
            return row_linear(x, weight, bias, self.group, transposed=self.transposed)
        # the third is named by nobody
        named = {"q": (self.k,), "k": (self.q,)}.get(name, ())
        return column_linear(x, weight, bias, self.group, transposed=self.transposed, siblings=named)


def _local_grad(name: str, full: Reference, group: dist.ProcessGroup) -> torch.Tensor:
    grad = getattr(full, name).grad
    if name == "o_bias":
        return grad
    dim = 0 if name.endswith("bias") else int(full.transposed)
    return grad.chunk(group.size(), 1 - dim if name == "o" else dim)[group.rank()]


def _blocks(rank: int, world: int, transposed: bool) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    full = Reference(6, 8, transposed)
    sharded = Sharded(full, group)
    base = torch.randn(3, 5, 6)
    dy = torch.randn(3, 5, 6)

    x = base.clone().requires_grad_()
    y = full(full(x.exp()))
    y.backward(dy)
    want_dx = x.grad

    def run(wrap: Any = lambda fn, x: fn(x)) -> None:
        x = base.clone().requires_grad_()
        y_local = wrap(sharded, wrap(sharded, x.exp()))
        torch.testing.assert_close(y_local, y, **CLOSE)
        y_local.backward(dy)
        torch.testing.assert_close(x.grad, want_dx, **CLOSE)

    def check(times: int = 1) -> None:
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(
                param.grad,
                times * _local_grad(name, full, group),
                **CLOSE,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        sharded.zero_grad()

    with CountCollectives() as counted:
        run()
    # per block one forward (o), one backward (q, k, v together)
    assert counted.calls == {"allreduce_": 4}, counted.calls
    check()
    run()
    run()
    check(2)
    immediate_grads = {}
    run()
    for name, param in sharded.named_parameters():
        immediate_grads[name] = param.grad.clone()
    check()

    for reentrant in (False, True):
        run(lambda fn, x: checkpoint(fn, x, use_reentrant=reentrant))  # noqa: B023
        check()

    def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, save_matmuls)
    run(lambda fn, x: checkpoint(fn, x, use_reentrant=False, context_fn=contexts))
    check()

    # Accumulation hooks see every gradient, the one computed during the all-reduce included.
    seen: Counter[str] = Counter()
    hooks = [
        param.register_post_accumulate_grad_hook(lambda p, n=name: seen.update([n]))
        for name, param in sharded.named_parameters()
    ]
    run()
    assert seen == {name: 1 for name, _ in sharded.named_parameters()}
    for hook in hooks:
        hook.remove()
    check()

    # Only some of the projections reach the loss, on an input used by two calls.
    x = base.clone().requires_grad_()
    h = x.exp()
    parts = [full.project(name, h) for name in "qkv"]
    want = torch.autograd.grad(parts[2].sum() + parts[1].square().sum(), [x, full.k, full.v])
    h = x.exp()
    parts = [sharded.project(name, h) for name in "qkv"]
    local = parts[2].sum() + parts[1].square().sum()
    got = torch.autograd.grad(local, [x, sharded.k, sharded.v])
    torch.testing.assert_close(got[0], want[0], **CLOSE)
    for got_grad, want_grad in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(got_grad, want_grad.chunk(world, int(transposed))[rank], **CLOSE)

    # An input modified in place between two projections is another input (torch allows that where no weight needs it).
    x = base.clone().requires_grad_()
    h = x * 1.0
    sharded.requires_grad_(False)
    q = sharded.project("q", h)
    h = h.mul_(2)
    k = sharded.project("k", h)
    sharded.requires_grad_(True)
    (dx,) = torch.autograd.grad(q.sum() * 3 + k.sum(), x)
    w = full.transposed
    want_x = (3 * full.q.sum(int(w)) + 2 * full.k.sum(int(w))).detach()
    torch.testing.assert_close(dx, want_x.expand_as(dx), **CLOSE)

    # Frozen weights (adapters): the input gradient is still reduced.
    frozen = Sharded(full, group).requires_grad_(False)
    x = base.clone().requires_grad_()
    frozen(frozen(x.exp())).backward(dy)
    torch.testing.assert_close(x.grad, want_dx, **CLOSE)

    # Postponed: the same dx, no gradient before run(), then bitwise the immediate one.
    store = WeightGradStore()
    plans = [lambda fn, x: fn(x)] + [lambda fn, x, r=r: checkpoint(fn, x, use_reentrant=r) for r in (False, True)]
    for wrap in plans:
        with store.deferring(("chunk", 0)):
            run(wrap)
        assert all(param.grad is None for name, param in sharded.named_parameters() if name != "o_bias")
        assert store.pending(("chunk", 0)) == len(store) > 0
        with CountCollectives() as counted:
            store.run(("chunk", 0))
        assert len(store) == 0
        assert not counted.calls
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(param.grad, immediate_grads[name], rtol=1e-14, atol=1e-14)
        check()


@pytest.mark.parametrize(("world", "transposed"), [(2, False), (2, True), (4, False)])
def test_blocks_match_one_process(world: int, transposed: bool) -> None:
    run_ranks(_blocks, world, transposed)


def _scattered(rank: int, world: int) -> None:
    """Row linear with a reduce-scattered output, bias on this rank's tokens only."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 8), (6,), (2, 5, 8))
    )
    y = F.linear(x, weight, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    sizes = [5 // world + (r < 5 % world) for r in range(world)]
    local_weight = nn.Parameter(weight.detach().chunk(world, 1)[rank].clone())
    local_bias = nn.Parameter(bias.detach().clone())
    local_x = x.detach().chunk(world, 2)[rank].clone().requires_grad_()
    local_y = row_linear(local_x, local_weight, local_bias, group, scatter_dim=1)
    torch.testing.assert_close(local_y, y.split(sizes, 1)[rank], **CLOSE)
    local_y.backward(dy.split(sizes, 1)[rank])
    torch.testing.assert_close(local_weight.grad, weight.grad.chunk(world, 1)[rank], **CLOSE)
    torch.testing.assert_close(local_x.grad, x.grad.chunk(world, 2)[rank], **CLOSE)
    dist.all_reduce(local_bias.grad)
    torch.testing.assert_close(local_bias.grad, bias.grad, **CLOSE)

    # Autocast: the linear runs in bf16, parameters and gradients stay fp32, and siblings still share a reduction.
    layer = [nn.Parameter(torch.randn(4, 8) / 3) for _ in range(2)]
    x = torch.randn(3, 8, requires_grad=True)
    with CountCollectives() as counted, torch.autocast("cpu", torch.bfloat16):
        a, b = (column_linear(x, weight, None, group) for weight in layer)
        assert a.dtype == torch.bfloat16
        (a.float().sum() + b.float().square().sum()).backward()
    assert counted.calls == {"allreduce_": 1}
    assert x.grad.dtype == layer[0].grad.dtype == torch.float32
    reference = [weight.detach().clone().requires_grad_() for weight in layer]
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (F.linear(x, weight) for weight in reference)
        (a.float().sum() + b.float().square().sum()).backward()
    for weight, want in zip(layer, reference, strict=True):
        torch.testing.assert_close(weight.grad, want.grad, rtol=2e-2, atol=2e-2)


def _hidden(rank: int, world: int) -> None:
    """While the all-reduce of an input gradient travels, the oldest weight gradient of another microbatch is
    computed.
    """
    group = dist.group.WORLD
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 8, dtype=torch.float64)) for _ in range(2)]
    xs = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = [sum(x.detach().sum(0) for x in xs) for _ in weights]
    store = WeightGradStore()
    order: list[str] = []
    all_reduce, take = dist.all_reduce, store._take

    def noted_take(*args: Any) -> Any:
        order.append("dW")
        return take(*args)

    def noted_reduce(*args: Any, **kwargs: Any) -> Any:
        order.append("start")
        work = all_reduce(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (order.append("wait"), work.wait()))

    store._take = noted_take  # type: ignore[method-assign]
    dist.all_reduce = noted_reduce
    try:
        for number, x in enumerate(xs):
            with store.deferring(number):
                sum(column_linear(x, weight, None, group).sum() for weight in weights).backward()  # type: ignore[union-attr]
    finally:
        dist.all_reduce = all_reduce
    assert order == ["start", "wait", "start", "dW", "wait", "start", "dW", "wait"]
    assert [store.pending(number) for number in range(3)] == [0, 2, 2]
    for number in range(3):
        store.run(number)
    for weight, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, want.expand(4, 8), rtol=1e-12, atol=1e-12)


def test_a_waiting_weight_gradient_hides_the_reduction() -> None:
    run_ranks(_hidden, 2)


def _overlapped(rank: int, world: int) -> None:
    """Between the start of the all-reduce and the end of its flight: the weight gradients of all that share x, and of
    nothing else.
    """
    group = dist.group.WORLD
    torch.manual_seed(0)
    q, k, v = (nn.Parameter(torch.randn(4, 8, dtype=torch.float64)) for _ in range(3))
    frozen = torch.randn(4, 8, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    other = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    order: list[str] = []
    all_reduce, weight_grad = dist.all_reduce, linear_ops._weight_grad

    def noted_reduce(*args: Any, **kwargs: Any) -> Any:
        order.append("start")
        work = all_reduce(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (order.append("wait"), work.wait()))

    def noted_grad(*args: Any) -> torch.Tensor:
        order.append("dW")
        return weight_grad(*args)

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        siblings = [each for each in (q, k, v, frozen) if each is not weight]
        return column_linear(x, weight, None, group, siblings=siblings).square().sum()

    def grads(*losses: torch.Tensor) -> list[torch.Tensor | None]:
        x.grad = other.grad = q.grad = k.grad = v.grad = None
        sum(losses).backward()  # type: ignore[union-attr]
        return [each.grad for each in (q, k, v)]

    def expected(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor | None]:
        return grads(*(F.linear(x, weight).square().sum() for x, weight in pairs))

    dist.all_reduce, linear_ops._weight_grad = noted_reduce, noted_grad  # type: ignore[assignment]
    try:
        for pairs, want in (
            (((x, q), (x, k), (x, v)), ["start", *["dW"] * 3, "wait"]),
            (((x, v), (x, frozen)), ["start", "dW", "wait"]),
            # cross-attention: who is named comes with another input
            (((x, q), (other, k), (other, v)), ["start", *["dW"] * 2, "wait", "start", "dW", "wait"]),
            # one weight twice: the second time at once
            (((x, q), (x, q), (x, k)), ["dW", "start", *["dW"] * 2, "wait"]),
        ):
            order.clear()
            x, other = x.detach().requires_grad_(), other.detach().requires_grad_()
            renewed = [(x if each.shape[0] == 3 else other, weight) for each, weight in pairs]
            found = grads(*(project(*pair) for pair in renewed))
            assert order == want, (order, want)
            torch.testing.assert_close(found, expected(*renewed), rtol=1e-12, atol=1e-12)
    finally:
        dist.all_reduce, linear_ops._weight_grad = all_reduce, weight_grad


def test_weight_gradients_of_all_siblings_hide_the_reduction() -> None:
    run_ranks(_overlapped, 2)


def test_scattered_output_and_autocast() -> None:
    run_ranks(_scattered, 2)


@pytest.mark.parametrize("transposed", [False, True])
def test_plain_linear_defers_into_flat_fp32_views(transposed: bool) -> None:
    """bf16 weights, fp32 gradients in views of one flat buffer: postponed accumulation is bitwise autograd's."""
    torch.manual_seed(0)
    shapes = [(8, 6) if transposed else (6, 8), (6,)]
    data = [torch.randn(shape).bfloat16() for shape in shapes]
    batches = [torch.randn(4, 3, 8).bfloat16() for _ in range(3)]

    def prepared() -> tuple[list[nn.Parameter], torch.Tensor]:
        params = [nn.Parameter(tensor.clone()) for tensor in data]
        flat = torch.zeros(sum(param.numel() for param in params))
        offset = 0
        for param in params:
            param.grad_dtype = torch.float32
            param.grad = flat[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
        return params, flat

    params, flat = prepared()
    store = WeightGradStore()
    for number, batch in enumerate(batches):
        with store.deferring(number):
            linear(batch, *params, transposed=transposed).square().sum().backward()
    assert not flat.any()
    for number in range(3):
        store.run(number)
    reference, reference_flat = prepared()
    for batch in batches:
        F.linear(batch, reference[0].t() if transposed else reference[0], reference[1]).square().sum().backward()
    assert torch.equal(flat, reference_flat)
    assert flat.any()
    assert params[0].grad.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)], ids=str)
def test_what_a_linear_returns_may_be_changed_in_place(shape: tuple[int, ...], has_bias: bool) -> None:
    """By nn.ReLU(inplace=True), say. A deferring linear is a function of its own, as those of tensor parallelism."""
    torch.manual_seed(0)
    data = [torch.randn(size, dtype=torch.float64) for size in (shape, (6, 8), (6,))]
    found = []
    for ours in (True, False):
        x, weight, bias = (one.clone().requires_grad_() for one in data)
        store = WeightGradStore()
        with store.deferring(0):
            y = (linear if ours else F.linear)(x, weight, bias if has_bias else None)
            y.mul_(2).relu_().square().sum().backward()
        store.run(0)
        found.append([y.detach(), x.grad, weight.grad, *([bias.grad] if has_bias else [])])
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_deferring_nests_and_can_be_suspended() -> None:
    outer, inner = WeightGradStore(), WeightGradStore()
    weight, x = nn.Parameter(torch.randn(3, 2)), torch.randn(4, 2)
    with outer.deferring("a"):
        with inner.deferring():
            linear(x, weight).sum().backward()
        with outer.deferring("b"):
            linear(x, weight).sum().backward()
        linear(x, weight).sum().backward()
        assert weight.grad is None
    assert (outer.pending("a"), outer.pending("b"), inner.pending()) == (1, 1, 1)
    outer.run("a")
    outer.run("b")
    inner.run()
    torch.testing.assert_close(weight.grad, 3 * x.sum(0).expand(3, 2))
    outer.deferring("c")
    with outer.deferring("c"):
        linear(x, weight).sum().backward()
    outer.discard()
    assert len(outer) == 0


def _penalty(rank: int, world: int) -> None:
    """Gradients of a gradient penalty: two columns on one input, a scale that is applied to shards, a row, gathered
    and split outputs.
    """
    group = dist.group.WORLD
    torch.manual_seed(0)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((8, 6), (8, 6), (1,), (6, 8), (8, 6))]
    x = torch.randn(3, 6, dtype=torch.float64)
    results = []
    for sharded in (False, True):
        own = 8 // world
        low = rank * own

        def part(index: int, dim: int, sharded: bool = sharded, low: int = low, own: int = own) -> torch.Tensor:
            return (weights[index].narrow(dim, low, own) if sharded else weights[index]).clone().requires_grad_()

        a, b, scale, c, d = part(0, 0), part(1, 0), weights[2].clone().requires_grad_(), part(3, 1), part(4, 0)
        z = x.clone().requires_grad_()
        if sharded:
            set_spec(scale, ParamSpec("scale", (1,), partial=("tp",)))
            sum_in_backward([scale], group)
            h = torch.tanh(column_linear(z, a, None, group)) * column_linear(z, b, None, group) * scale
            y = row_linear(h, c, None, group)
            g = gather_from_group(column_linear(y.sin(), d, None, group), group)
            y = y.sum() + gather_from_group(split_to_group(g.square(), group), group).sum()
        else:
            y = F.linear(torch.tanh(F.linear(z, a)) * F.linear(z, b) * scale, c)
            y = y.sum() + F.linear(y.sin(), d).square().sum()
        (slope,) = torch.autograd.grad(y, z, create_graph=True)
        penalty = slope.square().sum() + y
        penalty.backward()
        results.append((penalty, slope, z.grad, scale.grad, [(a, 0), (b, 0), (c, 1), (d, 0)]))
    (*whole, full), (*local, shards) = results
    torch.testing.assert_close(local, whole, **CLOSE)
    for (param, dim), (shard, _) in zip(full, shards, strict=True):
        torch.testing.assert_close(shard.grad, param.grad.narrow(dim, low, own), **CLOSE)

    torch.manual_seed(1)
    full, target = torch.randn(3, 7, dtype=torch.float64), torch.tensor([6, -100, 3])
    shard = VocabShard.even(7, group)
    leaves = [
        full.clone().requires_grad_(),
        F.pad(full, (0, 1))[:, shard.start : shard.start + shard.local].clone().requires_grad_(),
    ]
    penalties = []
    for leaf, entropy in zip(leaves, (F.cross_entropy, partial(vocab_cross_entropy, shard=shard)), strict=True):
        (slope,) = torch.autograd.grad(entropy(leaf, target, label_smoothing=0.1), leaf, create_graph=True)
        penalty = slope.pow(3).sum()
        penalty.backward()
        penalties.append(penalty if leaf is leaves[0] else reduce_from_group(penalty, group))
    torch.testing.assert_close(penalties[1], penalties[0], **CLOSE)
    own = slice(shard.start, shard.start + shard.length)
    torch.testing.assert_close(leaves[1].grad[:, : shard.length], leaves[0].grad[:, own], **CLOSE)


def test_gradients_of_gradients() -> None:
    run_ranks(_penalty, 2)
