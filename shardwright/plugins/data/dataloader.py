"""Dataloaders that deal samples to data-parallel ranks, reshuffle every epoch and remember where they are."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...utils.argument_types import check_arguments
from ...utils.arguments import check_call
from ...utils.device import get_current_device
from ...utils.errors import counted
from ...utils.transfer import Parcel, Transfers, transfers_to
from .dealing import DataParallelSampler, Dealer, DealtStream, SamplerDealer, Share, check_stream, is_stream


class ShardedDataLoader(DataLoader):
    """A DataLoader with a position: `state_dict()` after any batch, `load_state_dict()` to go on with the one after it.

    `len()` counts the batches of the running pass, or of the next one when none is running: after `load_state_dict` in
    the middle of an epoch it is what is left of that epoch, until that pass has been used up, then the whole epoch
    again.
    """

    _pending: int | None = None  # item that the next pass begins at, after load_state_dict
    _is_seeded = False  # whether that pass had drawn the seed of its workers before it was saved
    _progress: _Progress | None = None  # of the pass begun last

    def __init__(self, *args: Any, dealer: Dealer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dealer = dealer

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        is_seeded = self._pending is not None and self._is_seeded
        self._progress = _Progress(self._pending or 0)
        self._pending = None
        to_discard = self.dealer.begin(self._progress.start)
        with self._draws_no_seed() if is_seeded else nullcontext():
            batches = super().__iter__()
        transfers = transfers_to(get_current_device())
        # Without workers this process makes the next batch, with its random numbers: not before it is asked for.
        return Batches(batches, self._progress, to_discard, self.dealer, transfers, self.num_workers > 0)

    @contextmanager
    def _draws_no_seed(self) -> Iterator[None]:
        """What torch draws at the beginning of a pass, for its workers, comes from elsewhere: the run that was saved
        had drawn it. What a sampler draws meanwhile, for workers that begin at once, is drawn as ever.
        """
        given, self.generator = self.generator, torch.Generator()
        self.generator.set_state(torch.get_rng_state() if given is None else given.get_state())
        try:
            yield
        finally:
            self.generator = given

    def __len__(self) -> int:
        return self.dealer.batches(self._begins_at())

    def _begins_at(self) -> int:
        """Item at which the running pass began, or the next one will."""
        if self._pending is not None:
            return self._pending
        return 0 if self._progress is None or self._progress.over else self._progress.start

    def state_dict(self) -> dict[str, Any]:
        """The same on every data-parallel rank."""
        if self._pending is not None:
            return {**self.dealer.state(self._pending, running=False), "seeded": self._is_seeded}
        progress = self._progress
        if progress is None or progress.over or progress.is_last(self.dealer):
            # Workers that stay have their seed for the passes to come, too.
            stay = self.num_workers > 0 and self.persistent_workers and progress is not None
            return {**self.dealer.state(0, running=False), "seeded": stay}
        return {**self.dealer.state(progress.item(self.dealer), running=True), "seeded": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with another batch size or number of ranks: samples are dealt in one
        global order.
        """
        _require_position(state)
        self._pending = self.dealer.load(state)
        self._is_seeded = state.get("seeded", True)
        self._progress = None


_NUMBERS = ("epoch", "batches", "samples_per_batch", "items", "round", "workers")
_MOST = 2**48  # of any of them: what generators are seeded with is a sum
_SEEDS = 2**63


def _require_position(state: Any) -> None:
    """ValueError for what no loader's `state_dict` gives: a file may have been changed."""
    order = state.get("order", {}) if isinstance(state, dict) else None
    if not isinstance(order, dict):
        raise ValueError(f"{state!r:.200} is no position in data: a loader's state_dict() gives a table")
    wrong = [name for name in _NUMBERS if not _is_count(state.get(name, 0))]
    if state.get("samples_per_batch", 1) == 0:
        wrong.append("samples_per_batch")
    if type(state.get("seeded", True)) is not bool:
        wrong.append("seeded")
    fits = {name: _is_count(value, _SEEDS) if name == "seed" else _is_state(value) for name, value in order.items()}
    wrong += [f"order.{name}" for name, well in fits.items() if not well]
    if wrong:
        raise ValueError(f"the position in the data is not what a loader's state_dict() gives: look at {wrong[0]}")


def _is_count(value: Any, limit: int = _MOST) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_state(value: Any) -> bool:
    """Of a generator, in hexadecimal digits: one of the CPU's, or of a device's, which are short."""
    sizes = (2 * torch.Generator().get_state().numel(), 32)
    return isinstance(value, str) and len(value) in sizes and not value.strip("0123456789abcdef")


class _Progress:
    """How far one pass is: `taken` batches from item `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.taken = 0
        self.over = False

    def item(self, dealer: Dealer) -> int:
        return self.start + self.taken * dealer.round

    def is_last(self, dealer: Dealer) -> bool:
        """Whether the batch taken last was the last of its pass, as far as anybody knows before asking for another."""
        try:
            return self.taken > 0 and self.taken >= dealer.batches(self.start)
        except TypeError:
            return False


class Batches:
    """The iterator over one pass of a `ShardedDataLoader`."""

    def __init__(
        self,
        batches: Iterator[Any],
        progress: _Progress,
        to_discard: int,
        dealer: Dealer,
        transfers: Transfers | None = None,
        looks_ahead: bool = False,
    ) -> None:
        self._batches = batches
        self._progress = progress
        self._to_discard = to_discard
        self._dealer = dealer
        self._transfers = transfers
        self._looks_ahead = looks_ahead
        self._next: list[tuple[Any, Parcel | None]] = []  # at most one batch, which nobody has asked for yet
        self._failed: Exception | None = None  # what making that one raised
        self._parcel: Parcel | None = None  # copies of the batch given last

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        try:
            batch, self._parcel = self._next.pop() if self._next else (self._drawn(), None)
        except StopIteration:
            self._progress.over = True
            raise
        self._progress.taken += 1
        return batch

    def _drawn(self) -> Any:
        while self._to_discard:
            self._to_discard -= 1
            next(self._batches)
        return next(self._batches)

    def __len__(self) -> int:
        """Batches of the whole pass; where nobody can know, those taken so far."""
        try:
            return self._dealer.batches(self._progress.start)
        except TypeError:
            return self._progress.taken

    def batch_is_used(self, batch: Any) -> None:
        """The caller keeps no batch: the pass is over when the last one has been taken, and nobody needs to ask for
        one more. And nobody changes `batch` before the step moves it: it is sent off, and so is the next one, while
        this one is computed.
        """
        self._progress.over = self._progress.is_last(self._dealer)
        if self._transfers is None:
            return
        self.send(batch)
        if self._looks_ahead:
            self.look_ahead()

    def send(self, batch: Any) -> None:
        """Let `batch`, which was given last, travel to the device. What is changed of it in place is sent again."""
        if self._transfers is not None:
            (self._parcel or self._transfers.send(batch)).hand_over()
            self._parcel = None

    def look_ahead(self) -> None:
        """Make the next batch and send it off, while the device computes this one. It is not taken by that: positions
        stay what they are. Without workers this process makes it, with its random numbers.
        """
        if self._next or self._failed is not None or self._progress.over or self._progress.is_last(self._dealer):
            return
        try:
            following = self._drawn()
            parcel = None if self._transfers is None else self._transfers.send(following)
            self._next.append((following, parcel))
        except StopIteration:  # which comes again when the batch is asked for
            pass
        except Exception as error:  # of the next step, not of this one
            self._failed = error


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

    A stream (an IterableDataset, a streaming dataset of `datasets`) is read by every rank, which keeps its share; it
    has no length. `kwargs` go to `torch.utils.data.DataLoader` (collate_fn, prefetch_factor, ...). Workers are seeded
    by (seed, rank, worker).
    """
    check_call("prepare_dataloader", _ARGUMENTS, (), kwargs)
    check_arguments(
        build_dataloader, {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    )
    for name in ("sampler", "batch_sampler"):
        if name in kwargs:
            raise ValueError(
                f"prepare_dataloader({name}=...): the plugin makes the sampler, because it must deal samples to "
                "data-parallel ranks; pass distributed_sampler_cls=YourSampler instead, or give boost a DataLoader of "
                "your own with that sampler"
            )
    if batch_size < 1:
        raise ValueError(
            f"batch_size={batch_size} must be at least 1; it is the number of samples per data-parallel rank"
        )
    kwargs.setdefault("worker_init_fn", _WorkerSeed(seed, rank))
    kwargs.setdefault("generator", torch.Generator().manual_seed(seed))
    kwargs |= {"batch_size": batch_size, "drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers}
    if is_stream(dataset):
        _check_stream_options(dataset, shuffle, distributed_sampler_cls)
        stream = DealtStream(dataset, Share(num_replicas, rank, batch_size, drop_last), num_workers)
        return ShardedDataLoader(stream, dealer=stream, **kwargs)
    samples = len(dataset)  # type: ignore[arg-type]
    if samples == 0:
        raise ValueError(f"dataset={type(dataset).__name__} has no samples: there is nothing to make batches of")
    if drop_last and samples < num_replicas * batch_size:
        raise ValueError(
            f"the dataset has {counted(samples, 'sample')} and drop_last=True drops all of them: {num_replicas} "
            f"data-parallel ranks x batch_size={batch_size} need at least {num_replicas * batch_size}; use a smaller "
            "batch_size or "
            "drop_last=False"
        )
    sampler_class: Callable[..., Sampler] = distributed_sampler_cls or DataParallelSampler
    sampler = sampler_class(
        dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    return ShardedDataLoader(dataset, sampler=sampler, dealer=SamplerDealer(sampler, batch_size, drop_last), **kwargs)


# What `prepare_dataloader` takes: its own arguments, and those that it passes on.
_ARGUMENTS = inspect.Signature(
    [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in {
            **inspect.signature(DataLoader).parameters,
            **inspect.signature(build_dataloader).parameters,
        }.items()
        if name not in ("num_replicas", "rank", "kwargs")
    ]
)


def _check_stream_options(dataset: Any, shuffle: bool, distributed_sampler_cls: Any) -> None:
    check_stream(dataset, "dataset")
    if getattr(dataset, "_distributed", None) is not None:  # what `datasets.distributed.split_dataset_by_node` leaves
        raise ValueError(
            f"dataset={type(dataset).__name__} has been split by split_dataset_by_node already, and would be dealt out "
            "twice: pass it undivided"
        )
    if shuffle:
        raise ValueError(
            f"shuffle=True with a stream ({type(dataset).__name__}): nobody can draw from samples that are not there "
            "yet. Shuffle the stream itself (a dataset of `datasets`: dataset.shuffle(seed=..., buffer_size=...)) and "
            "leave shuffle out"
        )
    if distributed_sampler_cls is not None:
        raise ValueError(
            f"distributed_sampler_cls={distributed_sampler_cls.__name__} with a stream ({type(dataset).__name__}), "
            "which has no indices to draw: leave it out"
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
