"""Parts of sequences of any length: what does not divide is padded where it is cut, and what was padded is left away
where it is gathered.

The last token is repeated, so that padding is nothing that a layer does not know. Nobody sees it: attention leaves out
its keys, and gathered sequences end before it. How long sequences are is a fact of the running forward
(`utils.carried`), left by the first layer of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..utils.carried import facts
from .exchange import Exchange, Trial

_LENGTH = "length of sequences that ranks hold parts of"


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """[..., S, ...] -> [..., length, ...], the last one again."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    sizes = list(x.shape)
    sizes[dim] = missing
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand(sizes)], dim)


class TrueLengths:
    """Of sequences that are padded to a multiple."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def note(self, length: int) -> None:
        """That of what the layers which run next hold parts of."""
        facts()[_LENGTH] = length

    def note_keys(self, module: nn.Module, length: int) -> None:
        """That of what an attention, which runs next, makes keys of."""
        facts()[_LENGTH, id(module)] = length

    def noted(self) -> int:
        length: int = facts()[_LENGTH]
        return length

    def of_states(self, padded_length: int) -> int:
        return self._checked(self.noted(), padded_length)

    def of_attention(self, module: nn.Module, queries: int, keys: int) -> tuple[int, int]:
        """(queries, keys), of padded ones."""
        return self.of_states(queries), self._checked(facts()[_LENGTH, id(module)], keys)

    def _checked(self, length: int, padded_length: int) -> int:
        assert padded_length == length + -length % self.multiple, f"{length} tokens, padded to {padded_length}"
        return length


class _Padding(Exchange):
    """What becomes of an exchange; its `multiple` is known."""

    @property
    def lengths(self) -> TrueLengths:
        return TrueLengths(self.multiple)

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        length = whole.shape[dim]
        return super().part(padded(whole, dim, length + -length % self.multiple), dim)

    def part_of_states(self, whole: Tensor) -> Tensor:
        self.lengths.note(whole.shape[1])
        return self.part(whole)

    def gather_padded(self, x: Tensor, dim: int = 1) -> Tensor:
        return super().gather(x, dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        whole = super().gather(x, dim)
        return whole.narrow(dim, 0, self.lengths.of_states(whole.shape[dim]))

    def whole_length(self, held: int) -> int:
        return self.lengths.of_states(super().whole_length(held))

    def note_keys(self, module: nn.Module, lengths: Iterable[int]) -> None:
        own = self.lengths.noted()
        self.lengths.note_keys(module, next((length for length in lengths if length != own), own))


class PaddedExchange(_Padding):
    """Of ranks that share sequences."""


class PaddedTrial(_Padding, Trial):
    """In one process."""
