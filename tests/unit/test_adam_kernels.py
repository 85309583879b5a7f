"""Steps of Adam in one pass, by inductor's kernel; Triton's is in `triton_kernels`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_kernels import step_beside_torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.kernels.compiled_adam import CompiledAdam

SKIPPED = (1, 4)


class Looking(TorchDispatchMode):
    """A mode that sees every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_see_operators() -> None:
    with Looking():
        step_beside_torch(CompiledAdam(), torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("weight", "skipped"), [(torch.bfloat16, ()), (None, SKIPPED)])
def test_compiled(weight: torch.dtype | None, skipped: tuple[int, ...]) -> None:
    """One graph where weight decay is part of the gradient, one where it is not, for pieces of all lengths and rates
    that move.
    """
    torch._dynamo.reset()
    counters.clear()
    step_beside_torch(CompiledAdam(), torch.float32, weight, skipped)
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
    assert not counters["graph_break"]
