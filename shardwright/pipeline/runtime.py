"""Executes the action list of this rank."""

from __future__ import annotations

from typing import Any, Protocol


class StageProgram(Protocol):
    """What one stage computes for one microbatch.

    forward  receives what the stage before returned for this microbatch (None on the first stage) and returns what the next
             stage receives: nested dicts, lists and tuples of tensors, None and plain constants (str, int, float, bool).
             Received floating-point tensors require grad where they did on the sending stage, as leaves of this stage's graph.
             The last stage returns the loss of the microbatch, a scalar already weighted so that the loss of the step is the
             sum over microbatches; in a forward-only step it may return None. Outputs that the user wants to see are
             kept by the program itself.

    A program reads the microbatch's own inputs (token ids, masks, labels) by its index; only boundary tensors travel.
    """

    def forward(self, received: Any, microbatch: int) -> Any: ...
