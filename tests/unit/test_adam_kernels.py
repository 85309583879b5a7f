"""Steps of Adam in one pass, by inductor's kernel; Triton's is in `triton_kernels`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from adam_kernels import step_beside_torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.kernels import compiled_adam
from shardwright.kernels.adam import Piece, Rule
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


@pytest.mark.parametrize("pieces", [((0, 0), (300, 1)), ((1, 0), (2, 0))])
def test_every_kind_of_pieces_has_graphs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[tuple[int, int], ...]
) -> None:
    """torch gives a function 8 graphs, which is fewer than precisions, loss scales and decays make together."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_adam, "backend", "eager")
    compiled_adam._compiled.cache_clear()
    rules = [Rule(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled, False) for decoupled in (True, False)]
    halves = (torch.float32, torch.bfloat16, torch.float16)
    kinds = list(itertools.product(rules, (None, torch.zeros(())), halves, (torch.bfloat16,)))
    assert len(kinds) > 8
    for length, offset in pieces:
        for rule, skip, grad, weight in kinds:
            master, moment, square, gradient, low = (torch.rand(length + offset)[offset:] for _ in range(5))
            given = gradient.to(grad), moment, square, torch.zeros(()), low.to(weight)
            wanted = [each.clone() for each in (master, *given)]
            CompiledAdam()(0, [Piece(master, *given)], rule, torch.tensor(0.5), skip)
            compiled_adam._pass(
                *(wanted[place] for place in (0, 1, 2, 3, 5)),
                compiled_adam._numbers(rule, torch.ones(()), torch.tensor(0.5)),
                skip,
                not rule.decoupled,
            )
            for made, expected in zip((master, *given), wanted, strict=True):
                assert made.dim() == 0 or torch.equal(made, expected)
    compiled_adam._compiled.cache_clear()
