"""Parts of sequences for whole ones, and back, for modules that have to see a whole sequence.

    gather      [B, S/n, ...] -> [B, S, ...]     every rank has the whole, in order
    part        [B, S, ...] -> [B, S/n, ...]     and keeps its part of what it makes of it

What a rank computes between the two counts for its own part of the result alone: gradients of parameters are those of
that part, and gradients of what was gathered are summed over the ranks on their way back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.collective import gather_for_shards
from ..ops.compiled import name_of
from ..ops.compiled_sequence import gather_for_parts
from .zigzag import Share


class Exchange:
    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self.share, self.group = share, group
        self._name, self._of_queries = name_of(group), share.shared_by(1, 0)
        self.multiple = share.multiple
        self._holders = [share.of_holder(number) for number in range(share.ranks * share.among)]
        self._gathered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # whole -> (part, dim, their versions)

    @property
    def ranks(self) -> int:
        return self.share.ranks * self.share.among

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        return self.share.part(whole, dim).contiguous()

    def part_of_states(self, whole: Tensor) -> Tensor:
        """That of what the first layer of a stack is given."""
        return self.part(whole)

    def note_keys(self, module: nn.Module, lengths: Iterable[int]) -> None:
        """Of what is cut for an attention besides hidden states, of the keys of another sequence for one."""

    def true_length(self) -> int | None:
        """Of the sequences that the running layers have parts of, where these are padded."""
        return None

    def true_keys(self, module: nn.Module) -> int | None:
        """Likewise of the keys of an attention that runs."""
        return None

    def whole_length(self, held: int) -> int:
        """Of the sequence of which a rank holds so many tokens."""
        return held * self.ranks

    def spans(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the queries of this rank's attention, of a sequence of `length` tokens: what those have that
        share its place in a ring.
        """
        return self._of_queries.spans(length)

    def known_part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The same to be read only: of what was gathered that from which it was, whose gradient needs no way back."""
        if whole in self._gathered:
            known: Tensor
            known, gathered_dim, versions = self._gathered[whole]
            written = (whole._version, known._version) != versions
            if not written and gathered_dim == dim and whole.requires_grad == known.requires_grad:
                return known
        return self.part(whole, dim)

    def gather_padded(self, x: Tensor, dim: int = 1) -> Tensor:
        """All that the ranks hold together."""
        return self.gather(x, dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        x = x.contiguous()
        compiling = torch.compiler.is_compiling()
        if compiling:
            whole = gather_for_parts(x, self._name, dim, x.shape[dim] * self.ranks)
        else:
            whole = gather_for_shards(x, self.group, dim)
        if self.share.zigzag:
            length = whole.shape[dim]
            held = [share.positions(length, x.device) for share in self._holders]
            whole = whole.index_select(dim, torch.cat(held).argsort())
        if compiling:
            return whole
        if not whole.is_inference() and not x.is_inference():
            self._gathered[whole] = x, dim, (whole._version, x._version)
        return whole


class Shapes(Exchange):
    """Stands for the ranks where a copy without data is asked for shapes.

    is_whole    a part is as long as the whole, as in one process
    """

    def __init__(self, share: Share) -> None:
        self.share, self.multiple = share, share.multiple
        self.is_whole = False

    @property
    def ranks(self) -> int:
        return 1 if self.is_whole else super().ranks

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        return whole.narrow(dim, 0, whole.shape[dim] // self.ranks).contiguous()

    def spans(self, length: int) -> list[tuple[int, int]]:
        return [(0, length // (1 if self.is_whole else self.share.ranks))]

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return torch.cat([x] * self.ranks, dim)


class Trial(Exchange):
    """Stands for the ranks in one process.

    halves  whether it is the first of two ranks, of which the other is given the same: then numbers mean nothing, and
            lengths are those of two ranks. Else it is one that holds whole sequences, in another order
    """

    def __init__(self, multiple: int = 1) -> None:
        self.share = self._of_queries = Share(0, 1)
        self.multiple, self.halves = multiple, False

    @property
    def ranks(self) -> int:
        return 2 if self.halves else 1

    def order(self, length: int) -> Tensor:
        return torch.randperm(length, generator=torch.Generator().manual_seed(length))

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        length = whole.shape[dim]
        return (
            whole.narrow(dim, 0, length // 2).contiguous()
            if self.halves
            else whole.index_select(dim, self.order(length))
        )

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return torch.cat([x, x], dim) if self.halves else x.index_select(dim, self.order(x.shape[dim]).argsort())
