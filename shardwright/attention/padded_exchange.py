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

from ..ops.compiled_sequence import traced
from ..utils.carried import facts
from .exchange import Exchange, Trial

_LENGTH = "length of sequences that ranks hold parts of"


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """[..., S, ...] -> [..., length, ...], the last one again."""
    if torch.compiler.is_compiling():  # with no branch that a length takes
        return x.index_select(dim, torch.arange(length, device=x.device).clamp(max=x.shape[dim] - 1))
    missing = length - x.shape[dim]
    if not missing:
        return x
    sizes = list(x.shape)
    sizes[dim] = missing
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand(sizes)], dim)


def cropped(x: Tensor, dim: int, length: int) -> Tensor:
    """[..., S, ...] -> [..., length, ...], without what was padded."""
    if torch.compiler.is_compiling():  # a view would ask whether it is all there is, to see how its numbers lie
        return x.index_select(dim, torch.arange(length, device=x.device))
    return x.narrow(dim, 0, length)


class TrueLengths:
    """Of sequences that are padded to a multiple. In a graph they are arguments of it, or read off what it cuts."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def note(self, length: int) -> None:
        """That of what the layers which run next hold parts of."""
        facts()[_LENGTH] = length

    def note_keys(self, module: nn.Module, length: int) -> None:
        """That of what an attention, which runs next, makes keys of."""
        if torch.compiler.is_compiling():
            traced.keys = length
        else:
            facts()[_LENGTH, id(module)] = length

    def noted(self) -> int:
        length: int | None = traced.length if torch.compiler.is_compiling() else facts()[_LENGTH]
        assert length is not None
        return length

    def noted_keys(self, module: nn.Module) -> int:
        length: int | None = traced.keys if torch.compiler.is_compiling() else facts()[_LENGTH, id(module)]
        assert length is not None
        return length

    def of_states(self, padded_length: int) -> int:
        return self._checked(self.noted(), padded_length)

    def of_attention(self, module: nn.Module, queries: int, keys: int) -> tuple[int, int]:
        """(queries, keys), of padded ones."""
        return self.of_states(queries), self._checked(self.noted_keys(module), keys)

    def _checked(self, length: int, padded_length: int) -> int:
        if torch.compiler.is_compiling():
            return length
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

    def true_length(self) -> int:
        return self.lengths.noted()

    def true_keys(self, module: nn.Module) -> int:
        return self.lengths.noted_keys(module)

    def gather_padded(self, x: Tensor, dim: int = 1) -> Tensor:
        return super().gather(x, dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        whole = super().gather(x, dim)
        return cropped(whole, dim, self.lengths.of_states(whole.shape[dim]))

    def whole_length(self, held: int) -> int:
        return self.lengths.of_states(super().whole_length(held))

    def note_keys(self, module: nn.Module, lengths: Iterable[int]) -> None:
        own = self.lengths.noted()
        self.lengths.note_keys(module, next((length for length in lengths if length != own), own))


class PaddedExchange(_Padding):
    """Of ranks that share sequences."""


class PaddedTrial(_Padding, Trial):
    """In one process."""
