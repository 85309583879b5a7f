"""ZeRO on one rank, which has all shards itself: gradients go to their buffer once, in the order of streams."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import keep_float64, run_ranks
from shardwright.testing.device_reads import DeviceReads
from shardwright.testing.operators import Operators
from shardwright.testing.stream_model import StreamModel


class _Model(nn.Module):
    """Of which a part is used in every other step, and another never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.last, self.never = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = torch.tanh(self.first(x))
        y = torch.tanh(self.sometimes(y)) if step % 2 else y
        return self.last(y).square().mean()


def _alone(rank: int, world: int) -> None:
    for stage in range(4):
        plain = _Model()
        model = copy.deepcopy(plain)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32", max_norm=0.5))
        with StreamModel() as streams, DeviceReads(model.parameters()) as reads:
            boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            with reads.counting():
                for step in range(4):
                    for part in range(2):
                        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + part))
                        booster.backward(boosted(x, step) / 2, optimizer)
                        (plain(x, step) / 2).backward()
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    for one in (optimizer, reference):
                        one.step()
                        one.zero_grad()
        streams.check()
        assert not [place for place in reads.places if place.startswith("agreement")], reads.places
        assert optimizer.reducer.pool.allocated == 0, "nothing is lent"
        for mine, theirs in zip(boosted.unwrap().parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_rank_alone_writes_gradients_once() -> None:
    run_ranks(_alone, 1, debug="OFF")


def _hooked(rank: int, world: int) -> None:
    """Parameters with a script's hook, one of which sets an upper limit to what is summed so far."""
    for stage in range(2):
        plain = _Model()
        model = copy.deepcopy(plain)
        reference = torch.optim.SGD(plain.parameters(), lr=1e-2)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        seen: dict[nn.Module, list[Tensor]] = {plain: [], model: []}

        def bound(param: Tensor, of: list[Tensor]) -> None:
            assert param.grad is not None
            of.append(param.grad.clamp_(max=0.01).clone())

        for one in (plain, model):
            assert isinstance(one, _Model)
            one.last.weight.register_post_accumulate_grad_hook(partial(bound, of=seen[one]))
        for step in range(2):
            for part in range(3):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3 * step + part))
                with nullcontext() if part == 2 else optimizer.no_sync():
                    booster.backward(boosted(x, step), optimizer)
                plain(x, step).backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        assert len(seen[plain]) == 6
        for expected, found in zip(seen[plain], seen[model], strict=True):
            assert torch.equal(expected, found)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_hooks_of_a_script_see_the_sum_of_microbatches() -> None:
    run_ranks(_hooked, 1, debug="OFF")


class _Noting(torch.autograd.Function):
    """A script's own, which keeps something under the name that torch's leaves have for their tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = [x.shape]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Shared(nn.Module):
    """A weight that is used three times, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.once = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, often: int = 3) -> Tensor:
        for _ in range(often):
            x = torch.tanh(self.often(x))
        return _Noting.apply(self.once(x)).float().square().mean()  # type: ignore[no-any-return, no-untyped-call]


def _of_uses(rank: int, world: int) -> None:
    """In bf16: every use's gradient is rounded, and their sum is not."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = _Shared().bfloat16()
    uses = [copy.deepcopy(plain.often) for _ in range(3)]
    y = x
    for use in uses:
        y = torch.tanh(use(y))
    plain.once(y).float().square().mean().backward()
    wanted = sum(use.weight.grad.float() for use in uses if use.weight.grad is not None)
    assert isinstance(wanted, Tensor)
    assert not torch.equal(wanted, wanted.bfloat16().float()), "the sum must need fp32"
    for stage in range(4):
        model = _Shared()
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="bf16"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        for often in (3, 1, 3) if stage % 2 else (1, 3):  # a layer that runs once may run several times later
            optimizer.zero_grad()
            booster.backward(boosted(x, often), optimizer)
            if often == 3:
                found = optimizer.gradients()
                assert torch.equal(found["often.weight"], wanted), stage
                assert plain.once.weight.grad is not None
                assert torch.equal(found["once.weight"], plain.once.weight.grad.float()), stage


def test_gradients_of_several_uses_are_summed_in_fp32() -> None:
    run_ranks(_of_uses, 1, debug="OFF")


def _nothing_between(rank: int, world: int) -> None:
    """Gradients that are not finite, dropped, leave nothing behind between parameters, where a bucket is aligned."""
    for stage in range(2):
        model = _Model()
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        booster.backward(boosted(torch.full((4, 16), torch.nan), 0), optimizer)
        optimizer.clip_grad_by_value(1.0)
        optimizer.clip_grad_by_norm(1.0)  # multiplies by NaN
        optimizer.zero_grad()
        plain = copy.deepcopy(model)
        x = torch.ones(4, 16)
        booster.backward(boosted(x, 0), optimizer)
        plain(x, 0).backward()
        wanted = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
        torch.testing.assert_close(torch.tensor(optimizer.get_grad_norm()), wanted)


def test_gradients_that_are_not_finite_are_forgotten() -> None:
    run_ranks(_nothing_between, 1, debug="OFF")


def _looked_at(rank: int, world: int) -> None:
    """Hooks that look at gradients of others, as those of modules do, put another in the place, or drop one; a
    gradient that is there before backward.
    """
    for stage in range(2):
        for kind in ("module", "replace", "drop"):
            plain = _Model().double()
            model = copy.deepcopy(plain)
            reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
            booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32"))
            with keep_float64():
                optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
                boosted, optimizer, *_ = booster.boost(model, optim)
            seen: dict[nn.Module, list[Tensor | None]] = {plain: [], model: []}
            for one in (plain, model):
                if kind == "module":
                    one.sometimes.register_full_backward_hook(partial(_look, seen[one], one.last))
                else:
                    hook = partial(_put, drops=kind == "drop", count=[])
                    one.sometimes.weight.register_post_accumulate_grad_hook(hook)
            for step in range(2):
                for part in range(3):
                    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3 * step + part)).double()
                    if part == 0:
                        for one in (plain, model):
                            one.last.weight.grad = torch.full_like(one.last.weight, 0.1)
                    with nullcontext() if part == 2 else optimizer.no_sync():
                        booster.backward(boosted(x, 1), optimizer)
                    plain(x, 1).backward()
                for each in (optimizer, reference):
                    each.step()
                    each.zero_grad()
            assert len(seen[plain]) == (12 if kind == "module" else 0)
            torch.testing.assert_close(seen[model], seen[plain], rtol=1e-10, atol=1e-10)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def _assigned(rank: int, world: int) -> None:
    """Before a backward: in another dtype than gradients come in, the refusal says what does work, and that works."""
    for stage in range(4):
        plain, model = _Model(), _Model()
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="bf16"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        value = torch.full_like(plain.never.weight, 0.25)
        for step in range(2):  # the first loss tells how often parameters are used
            weight = model.never.weight
            with pytest.raises(ValueError, match=r"tensor of torch.float64.*assign tensor.to\(param.grad_dtype\)"):
                weight.grad = value.double()
            assert weight.grad is None
            weight.grad = value.to(weight.grad_dtype)
            plain.never.weight.data.sub_(value)
            booster.backward(boosted(torch.ones(4, 16).bfloat16(), step), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.never.weight, plain.never.weight.bfloat16(), rtol=0, atol=0)


def test_a_gradient_of_another_dtype_is_refused_with_what_to_assign() -> None:
    run_ranks(_assigned, 1, debug="OFF")


def _look(seen: list[Tensor | None], last: nn.Linear, module: nn.Linear, *_: object) -> None:
    seen += [None if grad is None else grad.clone() for grad in (module.weight.grad, last.weight.grad)]


def _put(param: Tensor, drops: bool, count: list[int]) -> None:
    count.append(0)
    assert param.grad is not None
    if not drops:
        param.grad = param.grad * 2
    elif len(count) in (2, 4, 5, 6):  # one in the middle of a step, and all of a step
        param.grad = None


def test_hooks_look_at_gradients_as_in_plain_torch() -> None:
    run_ranks(_looked_at, 1, debug="OFF")


def _left_out(rank: int, world: int) -> None:
    """A parameter whose gradients a hook has dropped, all of a step, is no part of the step: it does not decay."""

    def drop(param: nn.Parameter) -> None:
        if dropped[0]:
            param.grad = None

    dropped = [True]
    for stage in range(4):
        plain = _Model().double()
        model = copy.deepcopy(plain)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32"))
        with keep_float64():
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
            boosted, optimizer, *_ = booster.boost(model, optim)
        for one in (plain, model):
            one.last.weight.register_post_accumulate_grad_hook(drop)
        for dropped[0] in (True, False, True):
            for part in range(2):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(part)).double()
                with nullcontext() if part else optimizer.no_sync():
                    booster.backward(boosted(x, 1), optimizer)
                plain(x, 1).backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_what_a_hook_drops_is_no_part_of_the_step() -> None:
    run_ranks(_left_out, 1, debug="OFF")


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(200, 100))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bth,oh->bto", x, self.weight).square().mean()


def _of_other_strides(rank: int, world: int) -> None:
    x = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(1))
    plain = _Transposed()
    plain(x).backward()
    plain(x).backward()
    model = _Transposed()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in range(2):
        optimizer.zero_grad()
        with Operators() as operators, optimizer.no_sync():
            booster.backward(boosted(x), optimizer)
            booster.backward(boosted(x), optimizer)
        assert operators.counts["clone"] == operators.counts["copy_"] == 0, operators.counts
        assert plain.weight.grad is not None
        torch.testing.assert_close(optimizer.gradients()["weight"], plain.weight.grad)


def test_gradients_of_other_strides_are_not_cloned() -> None:
    run_ranks(_of_other_strides, 1, debug="OFF")


def _zeros(rank: int, world: int) -> None:
    plain = _Model()
    model = copy.deepcopy(plain)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    reference = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for keeps in (True, False, True):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(int(keeps)))
        booster.backward(boosted(x, 1), optimizer)
        plain(x, 1).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad(set_to_none=not keeps)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, torch.zeros_like(mine))


def test_gradients_are_shown_as_zeros_where_they_are_kept() -> None:
    run_ranks(_zeros, 1, debug="OFF")


def _hooks_of_other_kinds(rank: int, world: int) -> None:
    """Hooks that torch does not list (of activations, of nodes), or that run before a gradient is there."""
    for stage, precision in ((0, "fp32"), (1, "fp32"), (0, "bf16")):
        plain = _Model() if precision == "fp32" else _Model().bfloat16()
        model = copy.deepcopy(plain)
        seen: dict[nn.Module, list[Tensor | None]] = {plain: [], model: []}
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision=precision))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        nodes = []
        for one in (plain, model):

            def look(*_: object, of: list[Tensor | None] = seen[one], param: nn.Parameter = one.last.weight) -> None:
                of.append(None if param.grad is None else param.grad.float().clone())

            one.last.weight.register_hook(look)
            if precision == "fp32":
                node = one.last.weight.expand_as(one.last.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_hook(look)  # after it has accumulated
                nodes.append(node)  # torch forgets the hook with it
                one.first.register_forward_hook(lambda *args, look=look: args[-1].register_hook(look) and None)
        for step in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            x = x if precision == "fp32" else x.bfloat16()
            with optimizer.no_sync():
                booster.backward(boosted(x, 1), optimizer)
            booster.backward(boosted(x, 0), optimizer)
            plain(x, 1).backward()
            plain(x, 0).backward()
            plain.zero_grad()
            optimizer.zero_grad()
        assert len(seen[plain]) == (12 if precision == "fp32" else 4)
        for number, (expected, found) in enumerate(zip(seen[plain], seen[model], strict=True)):
            if precision == "bf16" and expected is None:
                expected = torch.zeros(16, 16)  # where .grad shows the sum in fp32, it does from the start
            assert (expected is None) == (found is None), (stage, precision, number)
            assert expected is None or found is None or torch.allclose(expected, found), (stage, precision, number)


def test_hooks_of_other_kinds_see_the_sum_of_microbatches() -> None:
    run_ranks(_hooks_of_other_kinds, 1, debug="OFF")
