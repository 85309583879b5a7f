"""What stages of a pipeline send each other where layers have parts of sequences: parts.

What the last layer of an encoder returns is gathered, for all layers of the decoder, and what comes before the first
layer is whole. A stage sends its rank's part of both, [B, S/n, H], and the next one gathers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ...attention.exchange import Exchange, Shapes
from ...models.layer_chain import Unit
from ...pipeline.cut.entry import ENTRY
from ...pipeline.handover import Handover
from .layer_plan import LayerPlan

_STATES = 3  # dims of [B, S, H]


class PartsOfStates(Handover):
    """
    shapes      what stands for the ranks in the copy without data; None: there is none
    units       of the whole model
    """

    def __init__(self, exchange: Exchange, shapes: Shapes | None, plan: LayerPlan, units: Sequence[Unit]) -> None:
        self.ranks = exchange.ranks
        self._exchange, self._shapes = exchange, shapes
        last = tuple(f".{stack.layers[-1]}" for stack in plan.stacks if stack.gathers or plan.joined)
        found = [index for index, unit in enumerate(units) if f".{unit.layer}".endswith(last)]  # adapters stand before
        self._gathered = frozenset((ENTRY, *found))

    def sent(self, unit: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._with_states(self._exchange.known_part, unit, tensors)

    def received(self, unit: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._with_states(self._exchange.gather, unit, tensors)

    def _with_states(
        self, change: Callable[[Tensor], Tensor], unit: int, tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if unit not in self._gathered or tensors[0].dim() != _STATES:
            return tensors
        return [change(tensors[0]), *tensors[1:]]

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        if self._shapes is None:
            yield
            return
        self._shapes.is_whole = True
        try:
            yield
        finally:
            self._shapes.is_whole = False
