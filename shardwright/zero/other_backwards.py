"""Gradients that arrive in the backward of another optimizer: of a discriminator while its generator learns, of models
with one loss.

Plain torch adds them to `.grad`, and whoever does not want them calls zero_grad before the next backward. So it is
here: while the buffers take gradients they are added as under no_sync, and the step reduces them. In the states in
which buffers are nobody's to touch (see [Note: states of gradients]), and under a loss scale, which is that of the
other optimizer, they spoil what is there until zero_grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .layout import Slot

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


class OtherBackwards:
    """What other optimizers' backwards did to the gradients of `optimizer`.

    spoiled   why the gradients in the buffers cannot be used before zero_grad; "" where they can
    """

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._joined = False  # the backward that is running
        self.spoiled = ""

    def arrived(self, slot: Slot) -> None:
        """A gradient for `slot` came, and this optimizer runs no backward. Raises where none does that boost
        returned.
        """
        if self._joined:
            return
        optimizer = self._optimizer
        if not optimizer.running:
            raise ValueError(
                f"a gradient for {slot.entry.name} from a backward that its optimizer did not start, so that it would "
                "be neither scaled nor reduced as the step needs: write booster.backward(loss, optimizer) instead of "
                "loss.backward(), after optimizer.zero_grad()"
            )
        other = optimizer.running[-1]
        other.guests.enter_context(self._join())
        if optimizer.scaler is not None or other.scaler is not None:
            self._spoil(slot, "under fp16, where each optimizer has a loss scale of its own")
        elif optimizer.takes_gradients:
            optimizer.note_backward()
        else:
            self._spoil(slot, "after those of its own backward had been reduced")

    @contextmanager
    def _join(self) -> Iterator[None]:
        self._joined = True
        try:
            with self._optimizer.plain_parameters():
                yield
        finally:
            self._joined = False

    def _spoil(self, slot: Slot, when: str) -> None:
        self.spoiled = (
            f"{slot.entry.name} got a gradient from the backward of another optimizer's loss, {when}: call zero_grad() "
            "of this optimizer before its next backward, which drops that gradient, or keep it out with "
            "requires_grad_(False) on this model's parameters while the other one learns; models that train on one "
            "loss go into one nn.Module with one optimizer (a param group each)"
        )

    def require_unspoiled(self) -> None:
        if self.spoiled:
            raise ValueError(self.spoiled)

    def forget(self) -> None:
        self.spoiled = ""
