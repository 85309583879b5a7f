"""Dataloaders that deal samples to data-parallel ranks, reshuffle every epoch and remember where they are."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class DataParallelSampler(DistributedSampler):
    """`DistributedSampler` that takes the next epoch's order by itself at every pass.

    The order is a function of (seed, epoch): another seed gives another order, and the same seed gives the same order on every
    run. `set_epoch` still works and decides the next pass. Without `drop_last` the last samples are repeated so that all ranks
    get equally many: a rank with one batch less would leave the others waiting in their collectives.
    """

    current_epoch = 0  # of the pass begun last; `epoch` is that of the next pass
    _start = 0

    def __iter__(self) -> Iterator[int]:
        self.current_epoch = self.epoch
        indices = super().__iter__()
        self.epoch += 1
        start, self._start = self._start, 0
        return itertools.islice(indices, start, None)

    def start_at(self, sample: int) -> None:
        """Begin the next pass at this rank's `sample`-th sample."""
        self._start = sample


class ShardedDataLoader(DataLoader):
    """A DataLoader with a position: `state_dict()` after any batch, `load_state_dict()` to go on with the one after it."""

    _delivered = 0  # batches of the running pass that the caller has received
    _resume_at = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._delivered, self._resume_at = self._resume_at, 0
        to_discard = 0
        if self._delivered:
            if isinstance(self.sampler, DataParallelSampler):
                assert self.batch_size is not None
                self.sampler.start_at(self._delivered * self.batch_size)
            else:
                to_discard = self._delivered  # a foreign sampler cannot start in the middle
        for batch in super().__iter__():
            if to_discard:
                to_discard -= 1
                continue
            self._delivered += 1
            yield batch
        self._delivered = 0

    @property
    def _step_samples(self) -> int:
        """Samples that all data-parallel ranks together take per batch."""
        return (self.batch_size or 1) * getattr(self.sampler, "num_replicas", 1)

    def state_dict(self) -> dict[str, int]:
        """The same on every data-parallel rank."""
        size = self._step_samples
        if not isinstance(self.sampler, DataParallelSampler):
            return {"epoch": getattr(self.sampler, "epoch", 0), "batches": self._delivered, "samples_per_batch": size}
        if self._delivered in (0, len(self)):
            return {"epoch": self.sampler.epoch, "batches": 0, "samples_per_batch": size}
        return {"epoch": self.sampler.current_epoch, "batches": self._delivered, "samples_per_batch": size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken, also with another batch size or number of ranks: samples are dealt in one global order."""
        set_epoch: Callable[[int], None] | None = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(state["epoch"])
        samples = state["batches"] * state.get("samples_per_batch", self._step_samples)
        self._delivered, self._resume_at = 0, samples // self._step_samples
        if samples % self._step_samples:
            warnings.warn(
                f"{samples} samples of epoch {state['epoch']} had been seen, which is no whole number of batches of {self._step_samples} "
                f"(batch size x data-parallel ranks): {samples % self._step_samples} of them will be seen again",
                stacklevel=2,
            )


def build_dataloader(
    dataset: Dataset,
    batch_size: int,
    *,
    num_replicas: int,
    rank: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: type[Sampler] | None = None,
    **kwargs: Any,
) -> DataLoader:
    """A loader of this rank's share of `dataset`; `batch_size` is per data-parallel rank.

    `kwargs` go to `torch.utils.data.DataLoader` (collate_fn, prefetch_factor, ...). Workers are seeded by (seed, rank, worker).
    """
    for name in ("sampler", "batch_sampler"):
        if name in kwargs:
            raise ValueError(
                f"prepare_dataloader({name}=...): the plugin makes the sampler, because it must deal samples to data-parallel ranks; "
                "pass distributed_sampler_cls=YourSampler instead"
            )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1; it is the number of samples per data-parallel rank")
    if drop_last and hasattr(dataset, "__len__") and len(dataset) < num_replicas * batch_size:
        raise ValueError(
            f"the dataset has {len(dataset)} samples and drop_last=True drops all of them: {num_replicas} data-parallel ranks x "
            f"batch_size={batch_size} need at least {num_replicas * batch_size}; use a smaller batch_size or drop_last=False"
        )
    sampler_class: Callable[..., Sampler] = distributed_sampler_cls or DataParallelSampler
    sampler = sampler_class(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    kwargs.setdefault("worker_init_fn", _WorkerSeed(seed, rank))
    kwargs.setdefault("generator", torch.Generator().manual_seed(seed))
    return ShardedDataLoader(
        dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, pin_memory=pin_memory, num_workers=num_workers, **kwargs
    )


class _WorkerSeed:
    """Seeds python, numpy and torch of a worker; a class because worker functions travel to other processes."""

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank = seed, rank

    def __call__(self, worker: int) -> None:
        seed = (self.seed * 1_000_003 + self.rank * 1_009 + worker) % 2**32
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
