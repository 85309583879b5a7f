"""Which parameters get a gradient in a step. Those that get none on any rank are left alone, as torch leaves parameters
whose `.grad` is None: zeros in its place would have optimizers decay them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .groups import Groups
from .layout import Entry


class Agreement:
    """What all ranks with a copy or a shard of a parameter find of it together, once per step.

    Flags [parameters] are joined over data parallelism, then those of tied copies over the pipeline stages that hold
    them, each of which sees its own uses only (an encoder whose output several stages read, under `torch.no_grad()` or
    with no image in the batch, may get a gradient on none of them). Parameters with partial gradients take part
    whenever one of their ranks does, which all ranks of the other axes do in the same steps.
    """

    def __init__(self, entries: Sequence[Entry], groups: Groups, device: torch.device) -> None:
        self._all = torch.ones(len(entries), dtype=torch.uint8, device=device)
        self._everyone = groups.everyone
        self._tied = _tied_copies(entries, groups, device)
        self._flags = self._all
        self._work: dist.Work | None = None
        self._touched: set[int] = set()
        self._knows_all = False

    @property
    def _is_alone(self) -> bool:
        """No other rank has a copy or a shard: nobody is asked, nor the device."""
        return self._everyone is None and not self._tied

    def start(self, touched: set[int]) -> None:
        """`touched` are the numbers of the parameters that got a gradient here.

        A rank on which all got one knows the outcome without reading it, so that the usual step never waits for the
        device.
        """
        self._touched, self._knows_all = set(touched), len(touched) == len(self._all)
        if self._is_alone:
            return
        if self._knows_all:
            self._flags = self._all  # which stay ones: a maximum with other flags changes none
        else:
            flags = torch.zeros(len(self._all), dtype=torch.uint8)
            flags[sorted(touched)] = 1
            self._flags = flags.to(self._all.device)
        if self._everyone is not None:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._everyone, async_op=True)

    def end(self) -> set[int] | None:
        """The numbers of those that got a gradient on any rank; None: all. Call it when the gradients of tied copies
        are summed: what runs on their groups before that may be in another order on another rank.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        for group, numbers in self._tied:
            flags = self._flags[numbers]
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            self._flags[numbers] = flags
        if self._knows_all:
            return None
        return self._touched if self._is_alone else set(self._flags.nonzero().flatten().tolist())


def _tied_copies(
    entries: Sequence[Entry], groups: Groups, device: torch.device
) -> list[tuple[dist.ProcessGroup, torch.Tensor]]:
    """(group, numbers of the parameters that its ranks hold copies of), both in an order that all ranks share."""
    found: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    group_of = {}
    for entry in entries:
        tied = entry.family.tied
        group = groups.tied.get(tied) if tied is not None else None
        if tied is not None and group is not None and dist.get_world_size(group) > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            group_of[ranks] = group
            found.setdefault(ranks, []).append((tied, entry.index))
    return [
        (group_of[ranks], torch.tensor([index for _, index in sorted(found[ranks])], device=device))
        for ranks in sorted(found)
    ]
