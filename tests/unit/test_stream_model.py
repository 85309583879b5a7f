"""The model of CUDA's streams: every kind of missing order is found, and what is ordered is let pass. Then what moves
between device and host under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.checkpoint.background import snapshot
from shardwright.pipeline import offload
from shardwright.pipeline.offload import ActivationOffload
from shardwright.testing.stream_model import StreamModel, UnorderedAccess
from shardwright.utils.streams import host_memory, streams_of

CPU = torch.device("cpu")


def _found(program: Callable[[StreamModel], Any]) -> list[str]:
    with StreamModel() as model:
        program(model)
    return [hazard.kind for hazard in model.hazards]


def _on_the_side(model: StreamModel, x: Tensor, wait: bool = True) -> tuple[Any, Tensor]:
    side = model.Stream()
    if wait:
        side.wait_stream(model.current_stream())
    with model.stream(side):
        return side, x * 2


def test_streams_must_wait_for_what_they_read() -> None:
    def read(model: StreamModel, before: bool, after: str) -> None:
        x = torch.ones(4)
        side, doubled = _on_the_side(model, x, before)
        if after == "stream":
            model.current_stream().wait_stream(side)
        elif after == "event":
            model.current_stream().wait_event(side.record_event())
        elif after == "host":
            side.synchronize()
        doubled.sum()
        model.synchronize()

    for after in ("stream", "event", "host"):
        assert _found(partial(read, before=True, after=after)) == []
        assert _found(partial(read, before=False, after=after)) == ["read"]
    assert _found(partial(read, before=True, after="")) == ["read"]
    assert streams_of(CPU) is None, "the CPU has its own ways again"


def test_an_event_covers_what_came_before_it_alone() -> None:
    def program(model: StreamModel) -> None:
        x, side = torch.ones(4), model.Stream()
        side.wait_stream(model.current_stream())
        with model.stream(side):
            early = x * 2
            event = side.record_event()
            late = x * 3
        model.current_stream().wait_event(event)
        early.sum()
        late.sum()
        model.synchronize()

    with StreamModel() as model:
        program(model)
    assert [hazard.kind for hazard in model.hazards] == ["read"]
    with pytest.raises(
        UnorderedAccess, match=r"sum at unit/test_stream_model.py:\d+.*mul at unit/test_stream_model.py"
    ):
        model.check()


def test_streams_must_wait_for_what_they_write() -> None:
    def program(model: StreamModel, wait: bool, of: slice) -> None:
        x = torch.ones(8)
        side = model.Stream()
        side.wait_stream(model.current_stream())
        with model.stream(side):
            x[:4].sum()
        if wait:
            model.current_stream().wait_stream(side)
        x[of].mul_(2)
        model.synchronize()

    assert _found(lambda model: program(model, False, slice(0, 8))) == ["write"]
    assert _found(lambda model: program(model, False, slice(3, 5))) == ["write"]
    assert _found(lambda model: program(model, False, slice(4, 8))) == [], "others are read and written at once"
    assert _found(lambda model: program(model, True, slice(0, 8))) == []


@pytest.mark.parametrize("how", ["freed too early", "recorded", "recorded for another", "waited for", "resized"])
def test_memory_must_not_be_let_go_of_too_early(how: str) -> None:
    """What is let go of goes to the next allocation on the stream that made it."""

    def program(model: StreamModel) -> None:
        x = torch.ones(4)
        side, _doubled = _on_the_side(model, x)
        if how.startswith("recorded"):
            x.record_stream(side if how == "recorded" else model.Stream())
        if how == "waited for":
            model.current_stream().wait_stream(side)
        if how == "resized":
            x.untyped_storage().resize_(0)
        del x
        torch.ones(4)
        model.synchronize()

    assert _found(program) == ([] if how in ("recorded", "waited for") else ["free"])


def test_a_stream_that_waits_before_it_takes_memory_again_is_no_hazard() -> None:
    def program(model: StreamModel) -> None:
        x = torch.ones(4)
        side, _ = _on_the_side(model, x)
        del x
        model.current_stream().wait_stream(side)
        torch.ones(4)
        model.synchronize()

    assert _found(program) == []


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_must_wait_for_what_travels_to_it(waits: bool) -> None:
    def program(model: StreamModel) -> None:
        x = torch.arange(4.0)
        room = host_memory((4,), torch.float32, CPU)
        room.copy_(x, non_blocking=not waits)
        room.add_(1)
        x.copy_(room, non_blocking=True)

    assert _found(program) == ([] if waits else ["write"])


def test_a_snapshot_is_there_when_it_is_returned() -> None:
    def take(model: StreamModel) -> None:
        tensors = [torch.arange(5.0), torch.ones(2, 3)]
        side = model.Stream()
        side.wait_stream(model.current_stream())
        with model.stream(side):
            tensors[0].mul_(2)
        model.current_stream().wait_stream(side)
        assert [float(copy.sum()) for copy in snapshot(tensors)] == [20.0, 6.0]  # by the host alone

    assert _found(take) == []

    def without_waiting(model: StreamModel) -> None:
        model.synchronize = lambda device=None: None  # type: ignore[method-assign]
        take(model)

    assert _found(without_waiting) == ["read", "read"]


def _offloaded_step(model: StreamModel, lane: Any = None) -> None:
    """Three microbatches whose activations leave while the next one computes; sums that read them in backward."""
    layer, away = nn.Linear(64, 64), ActivationOffload()
    losses: list[Tensor] = []
    for key in range(3):
        away.compute_begins()
        with away.taking(key):
            losses.append(torch.tanh(layer(torch.randn(32, 64, requires_grad=True).exp())).square().sum())
        away.start(key)
    for key, loss in enumerate(losses):
        away.fetch(key)
        away.compute_begins()
        away.wait(key)
        loss.backward()
    losses.clear()
    torch.ones(1)
    assert away.is_idle


@pytest.mark.parametrize("broken", ["", "wait", "let go", "start"])
def test_activations_travel_in_order(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 16)
    if broken == "wait":
        monkeypatch.setattr(ActivationOffload, "wait", lambda self, key: self._arriving.pop(key, None))
    if broken == "let go":
        monkeypatch.setattr(ActivationOffload, "_let_go", lambda self: self._leaving.clear())
    if broken == "start":
        monkeypatch.setattr("shardwright.testing.stream_model.Stream.wait_stream", lambda self, other: None)
    found = set(_found(_offloaded_step))
    expected = {"": set(), "wait": {"read"}, "let go": {"free"}, "start": {"read"}}[broken]
    assert expected <= found
    assert bool(found) == bool(broken), found


def test_threads_have_current_streams_of_their_own() -> None:
    with StreamModel() as model:
        side, seen = model.Stream(), []
        with model.stream(side):
            thread = threading.Thread(target=lambda: seen.append(model.current_stream()))
            thread.start()
            thread.join()
            assert model.current_stream() is side
        assert seen == [model.default]
        with pytest.raises(AssertionError, match="one model at a time"), StreamModel():
            pass


def test_a_wait_is_that_of_its_thread() -> None:
    """What is copied in it is none of the program's; checkpoints wait on threads of their own meanwhile."""
    model, seen = StreamModel(), []
    work: Any = object()

    def wait(_: Any) -> None:
        def on_thread() -> None:
            seen.append(model.waits_now)
            model._awaited(lambda _: seen.append(model.waits_now))(work)

        thread = threading.Thread(target=on_thread)
        thread.start()
        thread.join()
        seen.append(model.waits_now)

    model._awaited(wait)(work)
    assert seen == [False, True, True]
    assert not model.waits_now
