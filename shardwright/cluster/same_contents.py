"""Ranks that compute one sample together must be given the same numbers, not only the same shapes (`same_batch`).
That is looked at now and then, without waiting for a device or another rank.

In every `EVERY`-th call a rank makes a checksum of the whole numbers that it was given: token ids, masks, labels. It
tells it to the job in that call, or in the next one where a device made it, and compares it with that of the next rank
of its replica in the call after: what is not there by then is looked for again in the one behind. If all ranks have
what the next one has, all have the same. Floats are left out, which ranks may have computed in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.generators import accelerator_module
from .job import Job

EVERY = 50
_FACTOR, _SHIFT = 0x5851F42D4C957F2D, 29


class _Pending(NamedTuple):
    """A checksum on its way: of which call, and what tells that it has arrived on the host."""

    call: int
    sums: list[Tensor]
    arrived: Any


class SameContents:
    """
    ranks   global ranks that must get the same batch
    name    of this check in the job
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self._ranks, self._name = list(ranks), name
        self._pending: _Pending | None = None
        self._told: tuple[int, str] | None = None

    def forget(self) -> None:
        self._pending = self._told = None

    def check(self, job: Job, call: int, entries: Iterable[tuple[Any, Any]]) -> None:
        """ValueError if the next rank was given other numbers in the call that was looked at last."""
        if self._told is not None:
            self._compare(job, *self._told)
        if call % EVERY == 1:  # the first one is compared for what it holds before it runs
            self._pending = _pending(call, entries)
        if self._pending is not None and (self._pending.arrived is None or call > self._pending.call):
            self._tell(job, self._pending)

    def _tell(self, job: Job, pending: _Pending) -> None:
        if pending.arrived is not None:
            pending.arrived.synchronize()  # a call ago
        self._pending = None
        self._told = pending.call, str(sum(map(int, pending.sums)))
        job.tell(f"{self._name}/{job.rank}", f"{pending.call} {self._told[1]}")

    def _compare(self, job: Job, call: int, mine: str) -> None:
        following = self._ranks[(self._ranks.index(job.rank) + 1) % len(self._ranks)]
        found = job.ask(f"{self._name}/{following}")
        if found is None or int(found.split()[0]) < call:
            return
        self._told = None
        if found == f"{call} {mine}" or int(found.split()[0]) > call:
            return
        error = ValueError(
            f"rank {job.rank} and rank {following} compute every sample together (tensor, sequence or pipeline "
            f"parallel) and must be given the same batch, but in step {call + 1} they were given other numbers in "
            "tensors of equal shapes. Build the data loader with plugin.prepare_dataloader, or with a "
            "DistributedSampler over plugin.data_parallel instead of over all ranks, and draw what is random in it "
            "(masked tokens, crops) from equal seeds"
        )
        if not job.all_raise(f"{self._name}/{call}"):
            job.fail(error, f"call {call + 1} of the model")
        raise error


def _pending(call: int, entries: Iterable[tuple[Any, Any]]) -> _Pending | None:
    sums: dict[torch.device, Tensor] = {}
    for number, (_, value) in enumerate(entries):
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.is_meta:
            continue
        flat = value.detach().reshape(-1).long()
        places = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)
        mixed = (flat + number + 1) * places * _FACTOR
        mixed = (mixed ^ (mixed >> _SHIFT)).sum()
        sums[flat.device] = sums[flat.device] + mixed if flat.device in sums else mixed
    if not sums:
        return None
    on_host = [each.to("cpu", non_blocking=True) for each in sums.values()]
    accelerator, arrived = accelerator_module(), None
    if accelerator is not None and any(device.type != "cpu" for device in sums):
        arrived = accelerator.Event()
        arrived.record()
    return _Pending(call, on_host, arrived)
