"""The largest magnitudes that the factors of linears in 8 bits had in the last steps: what delayed scaling goes by.

    seen      [linears, 3]             of the running step: the largest so far, over all microbatches
    history   [linears, 3, steps]      of steps before, the newest first; 0 where there was none

The three are activations, weights and gradients of outputs. `seen` moves to `history` when the optimizer has stepped,
as the largest over all ranks that compute with these linears. Within a step scales do not change, and a tensor that is
computed a second time (activation checkpointing) adds nothing to a maximum. Zero tells nothing about the size of what
comes: steps in which a factor was all zeros are no part of its history, and before the first other one it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FACTORS = 3
_GRADIENT = 2


class AmaxHistory:
    """
    names   of the linears, each with a number by its place
    group   of the ranks that compute with them
    replicas   over which gradients are averaged: what one of them sees is as many times what one process sees, which
               is what is saved, for runs that go on with more of them or fewer
    """

    def __init__(
        self,
        names: Sequence[str],
        steps: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        replicas: int = 1,
    ) -> None:
        self.names, self.group, self.replicas = list(names), group, replicas
        self.seen = torch.zeros(len(self.names), _FACTORS, device=device)
        self.history = torch.zeros(len(self.names), _FACTORS, steps, device=device)
        self._largest = torch.zeros_like(self.seen)
        # of `_largest`, which are more than 0: for the host, which decides whether ranks must agree
        self._known = [[False] * _FACTORS for _ in self.names]

    def note(self, linear: int, factor: int, amax: Tensor) -> None:
        """Of one tensor of this step. What is not finite is left out: such a step is not taken, or nothing helps."""
        place = self.seen[linear, factor]
        torch.maximum(place, torch.where(amax < torch.inf, amax, 0), out=place)

    def amax(self, linear: int, factor: int) -> Tensor | None:
        return self._largest[linear, factor] if self._known[linear][factor] else None

    @torch.no_grad()
    def roll(self, *_: Any) -> None:
        """The step has been taken."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(self.seen, dist.ReduceOp.MAX, group=self.group)
        moved = torch.cat([self.seen.unsqueeze(-1), self.history[..., :-1]], -1)
        self.history = torch.where(self.seen.unsqueeze(-1) > 0, moved, self.history)
        self._largest = self.history.amax(-1)
        self.seen = torch.zeros_like(self.seen)
        if not all(map(all, self._known)):  # what is known stays so: later steps need not wait for the device
            self._known = (self._largest > 0).tolist()

    def state_dict(self) -> dict[str, list[list[float]]]:
        """By name: numbers as JSON keeps them, exactly. Without linears that nothing is known of, as are those of
        other stages of a pipeline, whose ranks tell.
        """
        history = self.history.double()  # in which a third of a gradient comes back as what it was
        history[:, _GRADIENT] /= self.replicas
        return {name: saved for name, saved in zip(self.names, history.tolist(), strict=True) if any(map(any, saved))}

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Linears that `state` does not know begin anew."""
        history = torch.zeros_like(self.history, device="cpu")
        steps = history.shape[-1]
        for number, name in enumerate(self.names):
            saved = torch.tensor(state.get(name, [[]] * _FACTORS), dtype=torch.float64)[..., :steps]
            saved[_GRADIENT] *= self.replicas
            history[number, :, : saved.shape[-1]] = saved
        self.history = history.to(self.history.device)
        self._largest = self.history.amax(-1)
        self._known = (self._largest > 0).tolist()
        self.seen.zero_()
