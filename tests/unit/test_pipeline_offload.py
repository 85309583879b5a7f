"""Activations in host memory: where actions stand, what leaves, and that copies are waited for as little and as much
as needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.pipeline import offload, schedules
from shardwright.pipeline.cut.balance import ChainCosts, MemoryBound, balance
from shardwright.pipeline.offload import ActivationOffload
from shardwright.pipeline.planning.actions import COMPUTE, MOVES, Action, Kind, validate
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.memory import Offloaded, memory_curves
from shardwright.pipeline.planning.placement import Placement
from shardwright.pipeline.planning.search import search
from shardwright.pipeline.planning.simulate import Costs, simulate

STYLES = [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2)]


def test_copies_run_beside_one_action_and_save_memory_during_others() -> None:
    for (style, v), p, m, gathered, share in product(STYLES, (2, 4), (1, 4, 9), (None, 1), (0.4, 1.0)):
        schedule = schedules.get(style, p, m, v)
        lowered = lower(schedule, gathered=gathered, offloaded=[share] * (p * v))
        plain = lower(schedule, gathered=gathered)
        validate(lowered.actions, schedule.placement, m)
        for rank in range(p):
            actions = lowered.actions[rank]
            assert [action for action in actions if action.kind not in MOVES] == list(plain.actions[rank])
            compute = [action for action in actions if action.kind in COMPUTE]
            waits = dict.fromkeys(schedule.placement.stages_of(rank), 0)
            for kind, stage, microbatch in compute:
                if kind is Kind.F:
                    backward = next(
                        place
                        for place, a in enumerate(compute)
                        if a[1:] == (stage, microbatch) and a.kind in (Kind.B, Kind.I)
                    )
                    waits[stage] += backward - compute.index(Action(Kind.F, stage, microbatch)) > 3
            for stage, count in waits.items():
                assert sum(a.kind is Kind.OFFLOAD and a.stage == stage for a in actions) == int(share * count + 1e-9)
            for place, action in enumerate(actions):
                if action.kind is Kind.OFFLOAD:
                    assert actions[place - 1] == action._replace(kind=Kind.F)
                if action.kind is Kind.RELOAD:
                    behind = [a for a in actions[place:] if a.kind in COMPUTE]
                    assert behind[1] in (action._replace(kind=Kind.B), action._replace(kind=Kind.I)), (
                        "one action to hide the copy behind"
                    )
    assert not any(a.kind in MOVES for a in lower(schedules.get("1f1b", 4, 4, 1, True), offloaded=[1.0] * 4).actions[0])


@pytest.mark.parametrize(("style", "v"), STYLES)
def test_the_memory_curve_is_that_of_the_actions(style: str, v: int) -> None:
    p, m = 4, 9
    kept, leaving, shares = (
        [f(s) for s in range(p * v)] for f in (lambda s: 10.0 + s, lambda s: 7.0 + s, lambda s: [0.5, 1.0][s % 2])
    )
    schedule = schedules.get(style, p, m, v)
    run = simulate(schedule, Costs([1.0 + s / 7 for s in range(p * v)])).run
    curves = memory_curves(run, kept, None, Offloaded(shares, leaving))
    lowered = lower(schedule, offloaded=shares)
    for rank, curve in enumerate(curves):
        held, away, most, most_away = 0.0, 0.0, 0.0, 0.0
        copied: list[list[float]] = []
        for kind, stage, _ in lowered.actions[rank]:
            if kind in COMPUTE or kind is Kind.RELOAD:
                held -= sum(amount for number, amount in copied if number)
                copied = [[number, amount] for number, amount in copied if not number]
            if kind in COMPUTE:
                copied = [[number + 1, amount] for number, amount in copied]
            if kind is Kind.F:
                held += kept[stage]
            elif kind is Kind.OFFLOAD:
                copied.append([0, leaving[stage]])
                away += leaving[stage]
            elif kind is Kind.RELOAD:
                held += leaving[stage]
                away -= leaving[stage]
            most, most_away = max(most, held), max(most_away, away)
            if kind in (Kind.B, Kind.I):
                held -= kept[stage]
        assert curve.peak == pytest.approx(most)
        assert curve.host.max() == pytest.approx(most_away)
        assert curve.kept[-1] == pytest.approx(0)
        assert curve.host[-1] == pytest.approx(0)
        assert (curve.times[1:] >= curve.times[:-1]).all()


def test_a_pair_is_one_action_to_copies() -> None:
    """Nothing stands inside of it, and the copy of a forward in a pair starts behind the pair."""
    for p, m, share in product((2, 4), (3, 12), (0.4, 1.0)):
        schedule = schedules.get("dualpipev", p, m, 2)
        lowered = lower(schedule, offloaded=[share] * (2 * p))
        validate(lowered.actions, schedule.placement, m)
        curves = memory_curves(
            simulate(schedule).run, [1.0] * (2 * p), None, Offloaded([share] * (2 * p), [1.0] * (2 * p))
        )
        for actions, curve in zip(lowered.actions, curves, strict=True):
            together: list[list[Action]] = []  # compute actions, those of a pair in one entry
            for place, action in enumerate(actions):
                if action.kind is Kind.FB:
                    assert actions[place + 1].kind is Kind.B
                    together.append([action])
                elif action.kind in COMPUTE:
                    together = (
                        [*together[:-1], [*together[-1], action]]
                        if place and actions[place - 1].kind is Kind.FB
                        else [*together, [action]]
                    )
            for place, action in enumerate(actions):
                before = [entry for entry in together if actions.index(entry[0]) < place]
                if action.kind is Kind.OFFLOAD:
                    assert any(a.kind in (Kind.F, Kind.FB) and a[1:] == action[1:] for a in before[-1])
                elif action.kind is Kind.RELOAD:
                    next_but_one = together[len(before) + 1]
                    assert any(a.kind in (Kind.B, Kind.I) and a[1:] == action[1:] for a in next_but_one)
            assert curve.kept[-1] == curve.host[-1] == 0
            assert (curve.times[1:] >= curve.times[:-1]).all()
            assert m == 3 or any(action.kind is Kind.OFFLOAD for action in actions)
    plain, away = (
        memory_curves(simulate(schedules.get("dualpipev", 8, 32, 2)).run, [1.0] * 16, None, given)
        for given in (None, Offloaded([1.0] * 16, [1.0] * 16))
    )
    assert max(curve.peak for curve in away) < 0.6 * max(curve.peak for curve in plain)


def test_a_deep_pipeline_holds_two_microbatches() -> None:
    """1F1B's first rank has p microbatches under way; of those that leave, one is computed, one on its way out, one
    back.
    """
    run = simulate(schedules.get("1f1b", 8, 32)).run
    peaks = {
        share: memory_curves(run, [1.0] * 8, None, Offloaded([share] * 8, [1.0] * 8))[0].peak
        for share in (0.0, 0.5, 1.0)
    }
    assert peaks[0.0] == 8
    assert peaks[0.5] == 6
    assert peaks[1.0] == 3, "two, and three where a warm-up ends or a cool-down begins"


def test_a_search_counts_what_leaves_as_not_held() -> None:
    chain = ChainCosts([1.0] * 16 + [0.0])

    def cut(costs: ChainCosts, placement: Placement, bound: MemoryBound | None) -> list[range]:
        return balance(costs, range(1, 17), placement, bound)

    found = {share: search(4, 16, 16, lambda _: chain, cut, offloaded=share) for share in (0.0, 1.0)}
    plain, away = ({(c.pp_style, c.placement): c for c in each.candidates if not c.bounded} for each in found.values())
    assert all(away[key].memory <= candidate.memory for key, candidate in plain.items())
    assert all(away[key].makespan == candidate.makespan for key, candidate in plain.items())
    deep = next(key for key in plain if key[0] == "interleaved" and key[1].num_chunks == 4)
    assert away[deep].memory < 0.4 * plain[deep].memory


@pytest.fixture(params=[None, 1000], ids=["one block", "blocks of 1000 bytes"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors leave; they may lie across blocks."""
    monkeypatch.setattr(offload, "SMALLEST", 64)
    if request.param is not None:
        monkeypatch.setattr(offload, "BLOCK", request.param)


class LateLane:
    """Copies as late as a stream could: when somebody waits for them. What was let go of by then is lost. Or out at
    once, and back late.
    """

    everything: list[LateLane] = []
    out_at_once = False

    def __init__(self, device: torch.device) -> None:
        self.waiting: list[tuple[Any, ...]] = []
        self.done = 0
        LateLane.everything.append(self)
        self.at_once = LateLane.out_at_once and len(LateLane.everything) == 1

    def copy(self, to: Sequence[Tensor], source: Sequence[Tensor], after: Sequence[Any]) -> Any:
        self.waiting.append(
            ([weakref.ref(t.untyped_storage()) for t in (*to, *source)], [_looks(t) for t in (*to, *source)], after)
        )
        if self.at_once:
            self.hold_up_for_all()
        return self, len(self.waiting)

    def hold_up(self, event: Any) -> None:
        lane, number = event
        while lane.done < number:
            storages, looks, after = lane.waiting[lane.done]
            for other in after:
                self.hold_up(other)
            tensors = [look(reference()) for look, reference in zip(looks, storages, strict=True)]
            half = len(tensors) // 2
            for to, source in zip(tensors[:half], tensors[half:], strict=True):
                to.copy_(source)
            lane.done += 1

    def hold_up_for_all(self) -> None:
        self.hold_up((self, len(self.waiting)))


def _looks(tensor: Tensor) -> Any:
    place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def look(storage: torch.UntypedStorage | None) -> Tensor:
        assert storage is not None, "memory was let go of before the copy was over"
        return torch.empty(0, dtype=torch.uint8).set_(storage, *place)

    return look


@pytest.fixture(params=["at once", "late", "late back"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param != "at once":
        monkeypatch.setattr(offload, "_Lane", LateLane)
        monkeypatch.setattr(LateLane, "out_at_once", request.param == "late back")
    yield
    LateLane.everything.clear()


class Block(nn.Module):
    """Views of one product, a buffer, a mask that others hold, an output that its own backward needs, a checkpointed
    part.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(6, 8))
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        found = (q * k).exp() * v.transpose(0, 1).contiguous().transpose(0, 1) * self.scale * mask
        return x + checkpoint(self.inner, found, use_reentrant=False)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(x))


def compute(model: Block, x: Tensor, mask: Tensor) -> Tensor:
    return model(model(x, mask), mask).square().sum()


@pytest.mark.usefixtures("small", "lanes")
def test_gradients_are_those_of_what_stays() -> None:
    """Three microbatches at a time, over three steps, in the order of 1F1B."""
    plain, model = Block(), Block()
    mask = (torch.rand(6, 1) > 0.2).double()
    away = ActivationOffload()
    rooms = []
    losses: dict[int, Tensor] = {}

    def forward(index: int, x: Tensor) -> None:
        away.compute_begins()
        with away.taking(index):
            losses[index] = compute(model, x, mask)
        away.start(index)

    def backward(index: int) -> None:
        away.compute_begins()
        away.wait(index)
        losses.pop(index).backward()

    for step in range(3):
        inputs = [
            torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5 * step + i))
            for i in range(5)
        ]
        wanted = [x.clone().requires_grad_() for x in inputs]
        for x in wanted:
            compute(plain, x, mask).backward()
        leaves = [x.requires_grad_() for x in inputs]
        for index in range(3):
            forward(index, leaves[index])
        for index in range(5):
            away.fetch(index)
            if index < 2:
                forward(3 + index, leaves[3 + index])
            backward(index)
        assert away.is_idle
        for got, x in zip(leaves, wanted, strict=True):
            assert torch.equal(got.grad, x.grad)
        for got, param in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.grad, param.grad)
        rooms.append(sorted(block.room.data_ptr() for block in away._free))
    assert rooms[0] == rooms[1] == rooms[2], "host memory is used again"


def taken(away: ActivationOffload, key: int) -> int:
    """Bytes of `key` in host memory."""
    return sum(part.numel() for reference in away._away[key].memories for part in reference().parts)  # type: ignore[union-attr]


@pytest.mark.usefixtures("small")
def test_what_nobody_else_holds_leaves_once() -> None:
    model = Block()
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(6, 1, dtype=torch.float64).expand(6, 8).contiguous()
    away = ActivationOffload()
    away.compute_begins()
    with away.taking(0):
        loss = compute(model, x, mask)
    away.start(0)
    row = 6 * 8 * 8
    # Of each block: the product with all its views, v in another order, exp, and the input of what is recomputed; then
    # what is between the blocks and behind them. Not: x, the mask, the buffer, weights.
    assert taken(away, 0) == (2 * (3 + 1 + 1 + 1) + 2) * row
    away.fetch(0)
    loss.backward()


@pytest.mark.usefixtures("small", "lanes")
def test_an_activation_at_the_place_of_weights_that_are_not_there_leaves() -> None:
    # as where gathered weights are freed, whose storage stays, and others get their memory
    place = np.full((64, 64), 0.5)
    held, factor = torch.from_numpy(place), torch.from_numpy(place)
    assert held.data_ptr() == factor.data_ptr()
    weight = nn.Parameter(held)
    x, away = torch.randn(64, 64, dtype=torch.float64, requires_grad=True), ActivationOffload()
    away.compute_begins()
    with away.taking(0):
        loss = (x @ weight).sum() + (x * factor).sum()
    del factor
    away.start(0)
    assert taken(away, 0) == place.nbytes
    away.fetch(0)
    away.wait(0)
    loss.backward()
    assert torch.equal(x.grad, torch.full((64, 64), 32.5, dtype=torch.float64))


@pytest.mark.usefixtures("small", "lanes")
@pytest.mark.parametrize("leaves", [False, True], ids=["a weight", "what would leave"])
def test_an_edit_in_place_is_an_error_as_in_torch(leaves: bool) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        y = x.matmul(weight).exp()
        if leaves:
            y.add_(1)
        else:
            with torch.no_grad():
                weight.mul_(2)
        return y.sum()

    def run(take: bool) -> None:
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        away = ActivationOffload()
        with away.taking(0) if take else nullcontext():
            loss = forward(x, weight)
        if take:
            away.start(0)
            away.fetch(0)
            away.wait(0)
        loss.backward()

    for take in (False, True):
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation: .* at version 1; expected version 0"
        ):
            run(take)


@pytest.mark.usefixtures("small", "lanes")
def test_what_comes_back_at_once_is_there() -> None:
    plain, model = Block(), Block()
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    away = ActivationOffload()
    away.compute_begins()
    with away.taking(0):
        loss = compute(model, x, torch.ones(6, 1))
    away.start(0)
    away.fetch(0)
    away.wait(0)
    loss.backward()
    compute(plain, x.detach(), torch.ones(6, 1)).backward()
    for got, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, param.grad)


@pytest.mark.usefixtures("small", "lanes")
def test_a_step_that_failed_leaves_nothing_behind() -> None:
    away = ActivationOffload()
    model = Block()
    losses = []
    for key in range(3):
        away.compute_begins()
        with away.taking(key):
            losses.append(compute(model, torch.randn(6, 8, dtype=torch.float64, requires_grad=True), torch.ones(6, 1)))
        if key < 2:
            away.start(key)
    blocks = {block.room.data_ptr() for entry in away._away.values() for block in entry.blocks}
    memories = [memory for entry in away._away.values() for memory in entry.memories]
    away.fetch(0)
    away.discard()
    assert away.is_idle
    assert all(lane.done == len(lane.waiting) for lane in LateLane.everything), (
        "memory was let go of before copies were over"
    )
    assert {block.room.data_ptr() for block in away._free} == blocks
    losses.clear()
    assert not any(memory() for memory in memories)
