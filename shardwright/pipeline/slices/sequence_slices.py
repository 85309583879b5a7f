"""Microbatches cut along the sequence, for contexts so long that one microbatch of one sample is too much, or too few
fill a pipeline.

[Note: what runs on a slice, and what on the whole]
    layers                   slice by slice: attention looks at the keys and values of the slices before (`past_keys`)
    what is before them      slice by slice, on the first stage; the others compute masks and positions of the slice as
                             ever
    what is behind the last  once per microbatch, on all of its sequence: norm, head, loss. So any criterion is right,
                             and none has to be told of slices. The last stage holds a slice's output until then, and
                             has the gradients of all of them after the backward of the last slice, which is the first
                             one to run

Slices take equal time, not equal lengths: with the cost of a token at place x being `linear + per_key * x` (see
`partition`), slice j ends where the cost of all tokens before it is j / c of the whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...utils.tensors import map_tensors
from ..batch.microbatch import GRIDS, PATCHES, Batch, batch_size, items_of
from ..batch.step_inputs import StepInputs
from .past_keys import Past

Payload = tuple[torch.Tensor, ...]
_MASK = "attention_mask"
_POSITIONS = "position_ids"
_IMAGES = (*GRIDS, *PATCHES, "pixel_values", "pixel_values_videos", "input_features")
# Slices say by themselves what came before them; nothing before the end of the layers looks at the others.
_LEFT_OUT = (
    *("cache_position", "past_key_values"),
    *("labels", "shift_labels", "start_positions", "end_positions", "mc_labels", "mc_token_ids", "logits_to_keep"),
)
_FINE = 64  # lengths of long slices are multiples of it, which suits kernels
_LONG = 8 * _FINE


@dataclass(frozen=True)
class SliceRule:
    """How the microbatches of one model are cut.

    count            slices of a microbatch; as many as it has tokens if it has fewer
    names            parameters of the model's forward, in their order
    linear, per_key  cost of a token: of all but attention, and of each place that attention looks at
    joined           of the tensors that the tail gets, whether it reads them; they are [samples, tokens, ...]
    """

    count: int
    names: tuple[str, ...]
    linear: float
    per_key: float
    joined: tuple[bool, ...] = (True,)

    @classmethod
    def of(cls, model: nn.Module, count: int, linear: float, per_key: float) -> SliceRule:
        return cls(count, tuple(inspect.signature(model.forward).parameters), linear, per_key)

    def _entries(self, microbatch: Batch) -> dict[Any, Any]:
        """By name, also those that are given by their place, or alone."""
        found = {}
        for key, value in items_of(microbatch):
            place = 0 if key is None else key
            found[self.names[place] if isinstance(place, int) and place < len(self.names) else key] = value
        return found

    def length(self, microbatch: Batch) -> int:
        """Tokens of a sample; ValueError for a microbatch that cannot be cut."""
        entries = self._entries(microbatch)
        given = [name for name in ("input_ids", "inputs_embeds") if isinstance(entries.get(name), torch.Tensor)]
        if not given or entries[given[0]].dim() != 2 + (given[0] == "inputs_embeds"):
            raise ValueError(
                f"num_sequence_slices={self.count} cuts input_ids [samples, tokens] or inputs_embeds [samples, tokens, "
                "features], and the batch has "
                f"{f'{given[0]} of shape {list(entries[given[0]].shape)}' if given else 'neither'} (its entries: "
                f"{list(entries)}); use num_sequence_slices=1"
            )
        if entries.get("past_key_values") is not None:
            raise ValueError(
                f"num_sequence_slices={self.count} and a batch with past_key_values: slices are told by these what "
                "came before them, so a batch cannot; leave them out, or use num_sequence_slices=1"
            )
        mask = entries.get(_MASK)
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            what = f"of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise ValueError(
                f"num_sequence_slices={self.count} and an attention_mask that is {what}: it may let tokens look ahead, "
                "at slices that come later; give a mask [samples, tokens] of what is no padding, or use "
                "num_sequence_slices=1"
            )
        images = [name for name in _IMAGES if entries.get(name) is not None]
        if images:
            raise ValueError(
                f"num_sequence_slices={self.count} and a batch with {images[0]}: which slice an image belongs to is "
                "not known; use num_sequence_slices=1 for batches with images or sound"
            )
        if entries.get(_POSITIONS) is not None and entries.get(_MASK) is None:
            raise ValueError(
                f"num_sequence_slices={self.count} and a batch with position_ids but no attention_mask: where "
                "positions begin anew, models take them for packed documents and keep these apart, which they do not "
                "once a sequence is cut. Use num_sequence_slices=1 for packed batches; for others give attention_mask "
                "too (ones where nothing is padding)"
            )
        return int(entries[given[0]].shape[1])

    def ends(self, length: int, count: int) -> list[int]:
        """Where slices of equal cost end: sum over x < end of (linear + per_key x) is j / c of that over all."""
        unit = _FINE if length >= count * _LONG else 1
        linear, square = self.linear or 1.0, self.per_key / 2
        total = linear * length + square * length**2
        found: list[int] = []
        for place in range(1, count):
            cost = total * place / count
            end = cost / linear if square == 0 else (math.sqrt(linear**2 + 4 * square * cost) - linear) / (2 * square)
            low, high = (found[-1] if found else 0) + 1, length - (count - place)
            found.append(min(max(round(end / unit) * unit, low), high))
        return [*found, length]

    def cut(self, microbatch: Batch, ends: Sequence[int]) -> list[Batch]:
        """The slices of a microbatch, by name, in its memory."""
        samples, length = batch_size(microbatch), ends[-1]
        entries = {name: value for name, value in self._entries(microbatch).items() if name not in _LEFT_OUT}
        return [
            {name: self._part(name, value, samples, length, low, high) for name, value in entries.items()}
            for low, high in pairwise([0, *ends])
        ]

    def _part(self, name: Any, value: Any, samples: int, length: int, low: int, high: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        shape = tuple(value.shape)
        if name == _MASK and shape[-1] == length:  # a slice looks at all that came before it
            return value[:, :high]
        if name == _POSITIONS and shape[-1] == length:
            return value.narrow(-1, low, high - low)
        if value.dim() >= 2 and shape[1] == length and shape[0] in (1, samples) and name != _MASK:
            return value.narrow(1, low, high - low)
        if value.dim() == 1 and shape[0] == samples:  # of samples, such as what they are classified as
            return value
        raise self._unknown(name, f"of shape {list(shape)}")

    def _unknown(self, name: Any, what: str) -> ValueError:
        return ValueError(
            f"num_sequence_slices={self.count}: entry {name!r} of the batch is {what}, and which part of it belongs to "
            "a slice is not known; entries [samples, tokens, ...] are cut, and those of one dim are given to every "
            "slice. Use num_sequence_slices=1"
        )


class SlicedInputs(StepInputs):
    """The slices of the microbatches of a step: slice j of microbatch i has the number i c + j.

    whole  the microbatches themselves
    """

    def __init__(
        self,
        microbatches: Sequence[Batch],
        rule: SliceRule,
        cast: Callable[[Batch], Batch],
        host: Callable[[], Sequence[Batch]] | None = None,
    ) -> None:
        lengths = [rule.length(microbatch) for microbatch in microbatches]
        self.num_slices = min(rule.count, *lengths)
        self.ends = [rule.ends(length, self.num_slices) for length in lengths]
        self._past = [Past(length) for length in lengths]
        self._rule = rule

        def cut(batches: Sequence[Batch]) -> list[Batch]:
            return [part for batch, ends in zip(batches, self.ends, strict=True) for part in rule.cut(batch, ends)]

        super().__init__(cut(microbatches), cast, None if host is None else lambda: cut(host()))
        self.whole = StepInputs(microbatches, cast, host)
        self._copied: tuple[int, Batch] | None = None  # the last one, by its number

    def batch(self, index: int) -> Batch:
        """A copy, since some models write to their inputs. Only of what a forward of the model is about to get: stages
        that call their layers themselves need none.
        """
        if self._copied is None or self._copied[0] != index:
            self._copied = index, map_tensors(torch.Tensor.clone, super().batch(index))
        return self._copied[1]

    def past(self, index: int) -> Any:
        return self._past[index // self.num_slices].before(self._start(index))

    def frame(self, index: int) -> Any:
        return self._start(index), super().frame(index)

    def _start(self, index: int) -> int:
        number, place = divmod(index, self.num_slices)
        return self.ends[number][place - 1] if place else 0

    def is_last(self, index: int) -> bool:
        """Whether no slice of its microbatch comes behind it."""
        return (index + 1) % self.num_slices == 0

    def by_length(self, index: int) -> Batch:
        """A slice without what reaches over those before it, too."""
        return {name: value for name, value in self.microbatches[index].items() if name != _MASK}


class SliceOutputs:
    """What the last layer has returned for the slices of one microbatch so far, for what comes behind it."""

    def __init__(self) -> None:
        self._parts: list[Payload] = []

    def add(self, payload: Payload) -> Callable[[], list[torch.Tensor]]:
        """Keep what a slice left; what is returned gives, once the loss has gone backward, gradients of those that
        require them.
        """
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in payload)
        self._parts.append(leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return lambda: [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in wanted]

    def all_of(self, last: Payload, samples: int, is_read: Sequence[bool]) -> Payload:
        """Of all slices, with that of the last one, which stays in its graph. What nobody reads (attention weights) is
        that of the last alone. In front of the tensors that `is_read` is about there may be logits of routers."""
        parts, self._parts = [*self._parts, last], []
        of_slices, routers = list(zip(*parts, strict=True)), len(last) - len(is_read)
        rows = [_joined_rows(tensors, samples) for tensors in of_slices[:routers]]
        outputs = [
            torch.cat(list(tensors), 1) if read else tensors[-1]
            for tensors, read in zip(of_slices[routers:], is_read, strict=True)
        ]
        return (*rows, *outputs)


def _joined_rows(tensors: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
    """Of [samples tokens, experts] or [samples, tokens, experts], whichever the router returns."""
    if tensors[0].dim() != 2:
        return torch.cat(list(tensors), 1)
    return torch.cat([tensor.unflatten(0, (samples, -1)) for tensor in tensors], 1).flatten(0, 1)
