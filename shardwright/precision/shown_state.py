"""`optimizer.state` of a boosted optimizer, as a script sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class ShownState(Mapping[torch.Tensor, dict[str, Any]]):
    """The states of the tensors that are stepped on. A parameter of the model is none of them, and asking for its state
    is refused: a default dict would answer that there is none yet."""

    def __init__(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self._states = states

    def __getitem__(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor not in self._states:
            raise ValueError(
                "optimizer.state[param] after boost: states belong to pieces of parameters, dealt out over the ranks. "
                "optimizer.shards() lists this rank's, each with name, start, stop, master and state"
            )
        return self._states[tensor]

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._states

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
