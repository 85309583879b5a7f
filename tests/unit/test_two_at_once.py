"""Two computations that take turns at their collectives: order, results, random numbers, what threads keep, errors."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwright.cluster.failure import main_stack
from shardwright.comm import turns
from shardwright.comm.turns import BACKWARD_THREAD
from shardwright.pipeline.two_at_once import TwoAtOnce


class Launched:
    """Collectives of a group of one that note when they are launched and waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def collective(self, name: str) -> None:
        def launch(tensor: torch.Tensor, async_op: bool = False) -> Any:
            self.events.append(f"{name} launched")
            return _Work(lambda: self.events.append(f"{name} done")) if async_op else None

        turns.run(launch, torch.zeros(1, device="cpu"))

    def several(self, name: str, number: int) -> Callable[[], None]:
        return lambda: [self.collective(f"{name}{index}") for index in range(number)] and None


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == BACKWARD_THREAD]


def wait_for_end_of_threads() -> None:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_the_turn_changes_at_every_collective_until_one_ends() -> None:
    seen = Launched()
    pair = TwoAtOnce()
    pair.run(seen.several("f", 2), seen.several("b", 4))
    order = (
        "f0 launched, b0 launched, f0 done, f1 launched, b0 done, b1 launched, f1 done, b1 done, b2 launched, b2 done, "
        "b3 launched, b3 done"
    )
    assert ", ".join(seen.events) == order
    assert pair.changes == 6  # the last two are the end of either
    seen.events.clear()
    pair.run(seen.several("f", 3), seen.several("b", 1))
    assert ", ".join(seen.events) == (
        "f0 launched, b0 launched, f0 done, f1 launched, b0 done, f1 done, f2 launched, f2 done"
    )
    seen.events.clear()
    for _ in range(20):
        pair.run(seen.several("f", 2), seen.several("b", 2))
    assert len(threads()) == 1, "one thread, whatever the number of pairs"
    assert seen.events[:8] * 20 == seen.events
    seen.collective("alone")
    assert seen.events[-1] == "alone launched", "outside of a pair collectives are those of torch"
    del pair
    gc.collect()
    wait_for_end_of_threads()


def test_what_launches_nothing_runs_in_order_without_a_thread() -> None:
    seen: list[Any] = []
    pair = TwoAtOnce()
    launched = Launched()
    here = threading.get_ident()
    pair.run(lambda: seen.append(("f", threading.get_ident())), lambda: seen.append(("b", threading.get_ident())))
    assert seen == [("f", here), ("b", here)]
    pair.run(lambda: None, launched.several("b", 2))
    assert launched.events == ["b0 launched", "b1 launched"], "nobody to take turns with"
    turns.run(lambda tensor: launched.events.append("meta"), torch.zeros(1, device="meta"))
    assert not threads()
    with turns.taken(lambda: pytest.fail("a meta tensor moves nothing")):
        turns.run(lambda tensor: launched.events.append("meta"), torch.zeros(1, device="meta"))
        turns.wait(_Work(lambda: launched.events.append("waited")), torch.zeros(1, device="meta"))


def _layer(x: torch.Tensor, weight: torch.Tensor, reduce: Callable[[str], None]) -> torch.Tensor:
    """Two dropouts with a collective between them, as in a sharded block."""
    x = torch.dropout(x @ weight, 0.5, True)
    reduce("layer")
    return torch.dropout(x, 0.5, True)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launch: Callable[[str], None]) -> torch.Tensor:
        ctx.launch = launch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.launch("backward")
        return dy, None


def test_dropout_and_recomputation_draw_what_they_draw_one_after_the_other() -> None:
    """Recomputation inside of the backward and the forward beside it each set and use the global generator."""

    def train(pair: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        launched = Launched()
        weights = [torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        losses: list[torch.Tensor] = []

        def forward() -> None:
            x = torch.randn(4, 8, dtype=torch.float64)
            for weight in weights:
                x = checkpoint(_layer, x, weight, launched.collective, use_reentrant=False)
                x = _Reduce.apply(x, launched.collective)  # type: ignore[no-untyped-call]
            losses.append(x.square().sum())

        forward()
        for _ in range(3):
            pair.run(forward, losses.pop(0).backward)
        losses.pop().backward()
        return [*(weight.grad for weight in weights if weight.grad is not None), torch.rand(3)]

    class OneAfterTheOther:
        def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
            forward()
            backward()

    wanted, found = train(OneAfterTheOther()), train(pair := TwoAtOnce())
    assert pair.changes > 20
    assert len(wanted) == 4
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


def test_the_backward_has_what_the_caller_s_thread_keeps() -> None:
    class Counting(TorchFunctionMode):
        seen: ClassVar[set[str]] = set()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.seen.add(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    class Noting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append((threading.current_thread().name, func._schema.name))
            return func(*args, **(kwargs or {}))

    launched = Launched()
    found: dict[str, Any] = {}

    def forward() -> None:
        with Counting():  # the forward's own, which the backward does not get
            launched.collective("f")

    def backward() -> None:
        found.update(
            thread=threading.current_thread().name,
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            device=torch.zeros(1).device.type,
        )

    pair = TwoAtOnce()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        pair.run(forward, backward)
    assert found == {"thread": BACKWARD_THREAD, "grad": False, "autocast": (True, torch.bfloat16), "device": "meta"}
    with Noting() as noting:
        pair.run(forward, backward)
    assert (BACKWARD_THREAD, "aten::zeros") in noting.seen
    seen = len(noting.seen)
    pair.run(forward, backward)
    assert found == {"thread": BACKWARD_THREAD, "grad": True, "autocast": (False, torch.bfloat16), "device": "cpu"}
    assert len(noting.seen) == seen, "it has left the other thread"
    assert Counting.seen == {threading.current_thread().name}, "the forward's own"


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_an_error_ends_both_and_is_the_one_that_is_raised(at: int) -> None:
    launched = Launched()
    pair = TwoAtOnce()
    ended: list[str] = []

    def failing(name: str) -> None:
        try:
            for index in range(6):
                if index == at:
                    raise ValueError(f"{name} failed")
                launched.collective(name)
        except Exception:
            ended.append(f"{name} caught its own")
            raise

    def fine(name: str) -> None:
        try:
            for _ in range(8):
                try:
                    launched.collective(name)
                except Exception:  # as a forward that tries something might
                    ended.append("swallowed")
            ended.append(f"{name} ran to its end")
        finally:
            ended.append(f"{name} left")

    for _ in range(3):
        ended.clear()
        with pytest.raises(ValueError, match="forward failed"):
            pair.run(lambda: failing("forward"), lambda: fine("backward"))
        assert pair.failed_forward
        assert ended == ["forward caught its own", *(["backward left"] if at else [])]
        ended.clear()
        with pytest.raises(ValueError, match="backward failed"):
            pair.run(lambda: fine("forward"), lambda: failing("backward"))
        assert not pair.failed_forward
        assert ended == ["backward caught its own", "forward left"]
    seen = Launched()
    pair.run(seen.several("f", 1), seen.several("b", 1))
    assert seen.events == ["f0 launched", "b0 launched", "f0 done", "b0 done"], "and the next pair runs as ever"
    del pair
    gc.collect()
    wait_for_end_of_threads()


def test_an_interrupt_while_the_backward_computes_ends_both() -> None:
    """As Ctrl-C does: the caller is interrupted where it waits for its turn."""
    launched = Launched()
    pair = TwoAtOnce()

    class Interrupted:
        def __init__(self, real: Any) -> None:
            self.get, self._real = self._first, real

        def _first(self) -> None:
            self.get = self._real.get
            raise KeyboardInterrupt

        def put(self, value: None) -> None:
            self._real.put(value)

    def forward() -> None:
        pair._wakes = (Interrupted(pair._wakes[0]), pair._wakes[1])  # type: ignore[assignment]
        launched.collective("f")

    with pytest.raises(KeyboardInterrupt):
        pair.run(forward, launched.several("b", 50))
    assert "b49 launched" not in launched.events
    seen = Launched()
    pair.run(seen.several("f", 1), seen.several("b", 1))
    assert seen.events == ["f0 launched", "b0 launched", "f0 done", "b0 done"]


def test_a_backward_on_a_thread_of_autograd_takes_the_turns_of_the_backward() -> None:
    """As on CUDA, where a backward runs its functions on another thread and waits for it."""
    launched = Launched()
    pair = TwoAtOnce()

    def on_another(work: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        for error in errors:
            raise error

    def fails() -> None:
        launched.collective("b")
        raise ValueError("there")

    pair.run(launched.several("f", 2), lambda: on_another(launched.several("b", 2)))
    assert ", ".join(launched.events) == (
        "f0 launched, b0 launched, f0 done, f1 launched, b0 done, b1 launched, f1 done, b1 done"
    )
    with pytest.raises(ValueError, match="there"):
        pair.run(launched.several("f", 3), lambda: on_another(fails))
    assert not pair.failed_forward
    with pytest.raises(ZeroDivisionError):
        pair.run(lambda: launched.collective("f") or 1 // 0, lambda: on_another(launched.several("b", 3)))  # type: ignore[func-returns-value]
    assert pair.failed_forward


def test_what_a_rank_is_doing_is_what_the_half_does_whose_turn_it_is() -> None:
    launched = Launched()
    said: list[str] = []

    def where_am_i() -> None:
        said.extend(main_stack()[1])

    TwoAtOnce().run(launched.several("f", 1), where_am_i)
    assert any("where_am_i" in line for line in said), said
