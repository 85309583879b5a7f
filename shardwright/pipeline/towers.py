"""Stages of models with several lists of layers, where a batch does not reach all of them, or a stage not all of what
they return.

    a batch without images     the layers of the vision tower do not run: a stage that ends among them sends tensors of
                               no elements in place of their outputs, and nobody reads those
    a stage behind a tower     the model calls the tower's layers again, but nothing of what they returned has arrived,
                               as nothing here reads it: each returns NaN in the shape of what it was given, which is
                               the right one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .cut.survey import Survey
from .cut.template import Template
from .loss.router_logits import collecting_hooks
from .stubs import absent_like


class Towers:
    def __init__(self, survey: Survey) -> None:
        self._lists = survey.lists
        self._survey = survey

    @property
    def are_several(self) -> bool:
        return len(set(self._lists)) > 1

    def is_passed_over(self, reached: int, unit: int, high: int) -> bool:
        """Whether a layer behind the end of a stage, `high`, runs because the batch does not reach those before it:
        all of one or more lists. `reached` is the last layer that ran.
        """
        if unit < max(high, 1):  # nothing stands before the first one
            return False
        lists = self._lists
        return lists[unit] != lists[unit - 1] and (reached < 0 or lists[reached] != lists[reached + 1])

    def check_again(self, name: str, unit: int, reached: int) -> None:
        """ValueError for a layer that runs a second time."""
        if unit <= reached and self.are_several:
            raise ValueError(
                f"{name} runs more often on this batch than in the dry run from which the pipeline stages were cut "
                "(images and videos in one batch, perhaps); pass a batch like this one as example_inputs= to the plugin"
            )

    def knows(self, unit: int, received: Mapping[int, Any]) -> bool:
        """Whether something of the unit's list has arrived that can stand for what it returns."""
        return any(known >= unit and self._lists[known] == self._lists[unit] for known in received if known >= 0)

    def unchanged(self, unit: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """In the structure of what the unit returns, tensors of the shape of what it was given."""
        template = self._survey.templates[unit]
        given = next(leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        absent = template.build([absent_like(given)] * template.num_tensors, [0] * template.num_numbers)
        return template.apart(absent)

    @staticmethod
    def collect(module: nn.Module, args: Sequence[Any], output: Any) -> None:
        """What a layer returned on another stage goes where transformers collects hidden states: LLaVA reads those of
        its tower there, and scripts ask for all of them.
        """
        for hook in collecting_hooks(module):
            hook(module, args, output)

    def are_read(self, units: range) -> bool:
        """Whether a stage of these units has layers of a list other than the last one, or reads what they return."""
        last = self._lists[-1]
        places = {*units} | {place for part in self._survey.parts[units.start : units.stop] for place in part.reads}
        if units.stop == len(self._lists):
            places |= self._survey.parts[-1].reads
        return any(place < 0 or self._lists[place] != last for place in places)


def nothing_of(template: Template, like: torch.Tensor) -> list[torch.Tensor]:
    """In place of the tensors of an output that there is none of."""
    return [torch.zeros(0, dtype=like.dtype, device=like.device)] * template.num_tensors


def is_nothing(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and all(tensor.dim() == 1 and not tensor.numel() for tensor in tensors)
