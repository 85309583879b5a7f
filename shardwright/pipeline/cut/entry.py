"""What the first layer receives: where the model can be cut in front of all layers, so that embeddings are a stage of
their own.

It has no module whose output it is, so it is met as an argument: the first of the first layer's that depends on
parameters, the hidden states. Everything else that this layer gets (masks, positions) the stages behind the cut compute
from the batch, as behind every other cut.

In the chain of units the entry stands before the first one, at place `ENTRY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .survey import Part
    from .template import Template

ENTRY = -1


@dataclass(frozen=True)
class Entry:
    """The hidden states as an argument of the first layer.

    layer     that receives them
    place     number of the positional argument, or name of the keyword argument
    template  their structure, one tensor
    before    what makes them
    behind    what the first unit reads besides them
    """

    layer: str
    place: int | str
    template: Template
    before: Part
    behind: Part

    def joined_by(self, other: Entry | None) -> Entry | None:
        """What makes it, and what is read besides it, in either of two runs; None where they differ otherwise."""
        if other is None or (self.layer, self.place) != (other.layer, other.place):
            return None
        return replace(self, before=self.before | other.before, behind=self.behind | other.behind)

    def taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The hidden states among the arguments of a call."""
        value = (
            kwargs.get(self.place)
            if isinstance(self.place, str)
            else args[self.place]
            if self.place < len(args)
            else None
        )
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{self.layer} was called without hidden states at {self._where}, where they were in the dry run from "
                "which the pipeline stages were cut; pass a batch like this one as example_inputs= to the plugin, or "
                "give the first stage a layer"
            )
        return value

    def put(self, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other hidden states."""
        self.taken(args, kwargs)
        if isinstance(self.place, str):
            return tuple(args), {**kwargs, self.place: value}
        return (*args[: self.place], value, *args[self.place + 1 :]), dict(kwargs)

    @property
    def _where(self) -> str:
        return f"{self.place}=" if isinstance(self.place, str) else f"its argument number {self.place + 1}"


def find_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Of the first argument that depends on parameters, in a forward with all parameters requiring gradients."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            return place
    return None
