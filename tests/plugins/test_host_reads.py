"""Nothing in a step waits for the device: what transformers' mask code reads is answered by the host, or once for
all microbatches.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import Booster
from shardwright.pipeline.hoisting import reads
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo

_aten = torch.ops.aten
_OPS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default}
_NAMES = {
    "item",
    "tolist",
    "nonzero",
    "masked_select",
    "equal",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
}


class _Seen(Counter[str]):
    """Reads of tensors by the place in shardwright or transformers that they come from."""

    watching = False

    def note(self) -> None:
        if not self.watching:
            return
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/shardwright/" in frame.filename or "/transformers/" in frame.filename
        ]
        self[f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"] += 1


class _Operators(TorchDispatchMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_mask = func is _aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in _OPS or by_mask:
            self.seen.note()
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _NAMES:
            self.seen.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def _host_may_read(seen: _Seen) -> Iterator[None]:
    """Inside, answers that the host finds in its copy of the batch do not count."""
    answer = reads._Read.answer

    def on_host(read: Any, entries: Any) -> Any:
        watching, seen.watching = seen.watching, False
        try:
            return answer(read, entries)
        finally:
            seen.watching = watching

    reads._Read.answer = on_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        reads._Read.answer = answer  # type: ignore[method-assign]


def _reads(rank: int, world: int) -> list[list[str]]:
    """Places that read a tensor in the actions of a third step, without masks, with masks of ones, and in an
    evaluation.
    """
    found = []
    for masked, training in ((False, True), (True, True), (True, False)):
        model = zoo.build("llama-causal-lm", dtype=torch.float32)
        booster = Booster(plugin=HybridParallelPlugin(pp_size=world, num_microbatches=3, precision="fp32"))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
        handlers, seen = model.executor.runtime._handlers, _Seen()

        def watched(handler: Callable[..., None], seen: _Seen = seen) -> Callable[..., None]:
            def run(stage: int, microbatch: int) -> None:
                if not seen.watching:
                    handler(stage, microbatch)
                    return
                with _host_may_read(seen), _Operators(seen), _Functions(seen):
                    handler(stage, microbatch)

            return run

        model.executor.cut.staged.answers_on_cpu = True  # as on a device
        for kind, handler in list(handlers.items()):
            handlers[kind] = watched(handler)
        for step in range(3):
            seen.watching = step != 1
            batch = zoo.inputs("llama-causal-lm", batch_size=6, seq_len=13, seed=step)
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
            if not masked:
                del batch["attention_mask"]
            booster.execute_pipeline(
                iter([batch]), model, lambda outputs, _: outputs.loss, optimizer if training else None
            )
            optimizer.zero_grad()
            if step == 0:
                assert seen, "what the model reads is not known yet, so reads can be seen"
                seen.clear()
        found.append(sorted(seen))
    return found


def test_no_action_reads_a_tensor() -> None:
    assert run_ranks(_reads, 3, timeout=60) == [[[], [], []]] * 3
