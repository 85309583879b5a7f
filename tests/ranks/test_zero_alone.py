"""ZeRO on one rank, which has all shards itself: gradients go to their buffer once, in the order of streams."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.testing.device_reads import DeviceReads
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


class _Shared(nn.Module):
    """A weight that is used three times, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.once = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.often(x))
        return self.once(x).float().square().mean()


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
        for _ in range(2):
            optimizer.zero_grad()
            booster.backward(boosted(x), optimizer)
            found = optimizer.gradients()
        assert torch.equal(found["often.weight"], wanted), stage
        assert plain.once.weight.grad is not None
        assert torch.equal(found["once.weight"], plain.once.weight.grad.float()), stage


def test_gradients_of_several_uses_are_summed_in_fp32() -> None:
    run_ranks(_of_uses, 1, debug="OFF")
