"""Tensors that travel round a ring of ranks: everyone sends to the next one and receives from the one before."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .handle import Handle, Messages


class Ring(NamedTuple):
    """A rank's place in a ring.

    before, behind  ranks of `group`, which tensors come from and go to
    size            number of ranks in the ring
    """

    group: dist.ProcessGroup
    before: int
    behind: int
    size: int

    def pass_on(self, tensor: Tensor, tag: int = 0) -> Handle[Tensor]:
        """Send `tensor` on; `wait()` returns what has come. All ranks have tensors of one shape. Tensors that are in
        flight at the same time arrive in the order in which they were sent, those of one `tag` at least.
        """
        sent = tensor.contiguous()
        received = sent.new_empty(sent.shape)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.behind, tag=tag),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.before, tag=tag),
            ]
        )
        return Messages("ring", works, lambda: received, keep=sent)


def rings_of(group: dist.ProcessGroup, inner: int | None = None, apart: int = 1) -> list[Ring]:
    """The ring of all ranks of `group`; with `inner`, rings of that many neighbours, and around them the ring that
    joins ranks of the same place in these: outermost first.

    apart   neighbours in a ring are so many ranks apart, and as many rings lie side by side
    """
    assert group.size() % apart == 0, f"{apart} does not divide {group.size()}"
    (rank, lane), ranks = divmod(group.rank(), apart), group.size() // apart

    def ring(before: int, behind: int, size: int) -> Ring:
        return Ring(group, before * apart + lane, behind * apart + lane, size)

    if inner in (None, 1, ranks):
        return [ring((rank - 1) % ranks, (rank + 1) % ranks, ranks)]
    assert inner is not None
    assert ranks % inner == 0, f"{inner} does not divide {ranks}"
    first = rank - rank % inner
    return [
        ring((rank - inner) % ranks, (rank + inner) % ranks, ranks // inner),
        ring(first + (rank - 1) % inner, first + (rank + 1) % inner, inner),
    ]
