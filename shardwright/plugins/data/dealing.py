"""Who gets which samples: the rule by which one order of samples is dealt to data-parallel ranks, and what can be asked
about it.

With n ranks and batches of B samples the order is cut into rounds of n x B samples, each round into n batches, and rank
r takes batch r:

    order        s0 s1 s2 s3 s4 s5 s6 s7 s8 ...        n = 2, B = 2
    rank 0       s0 s1       s4 s5       s8 ...
    rank 1             s2 s3       s6 s7    ...

A round holds the samples that one process with batches of n x B would take, so every global batch is the same at any n.
At the end of the order an incomplete round is filled up with samples from its beginning, or dropped with `drop_last`:
all ranks get equally many batches, and know where the end is without asking each other. This is the rule of
Accelerate's `prepare`.

A *dealer* says where the order can be entered: loaders count `items` of the order (samples, or batches of a custom
batch sampler), over all ranks, so that a position means the same at another number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler, get_worker_info

from .sample_order import SampleOrder

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `ranks` takes `size` of every `ranks * size` items."""

    ranks: int
    rank: int
    size: int
    drop_last: bool

    @property
    def round(self) -> int:
        return self.ranks * self.size

    def rounds(self, items: int) -> int:
        """Rounds that `items` items come to, with the end filled up or dropped."""
        return items // self.round if self.drop_last else -(-items // self.round)

    def deal(
        self,
        items: Iterable[T],
        skip: int = 0,
        note: Callable[[list[T]], None] | None = None,
        one_ahead: bool = False,
    ) -> Iterator[list[T]]:
        """This rank's part of every round, from item `skip` on; `note` is told the first round of the order.
        `one_ahead`: each when the one behind it was asked for.

        One rank gets an incomplete last round as it is, like a plain loader's last batch.
        """
        stream = iter(items)
        first = list(itertools.islice(stream, self.round))
        if note is not None:
            note(first)
        rest = itertools.islice(itertools.chain(first, stream), skip, None)
        rounds = iter(lambda: list(itertools.islice(rest, self.round)), [])
        for taken in _one_ahead(rounds) if one_ahead else rounds:
            if len(taken) < self.round and self.ranks > 1:
                if self.drop_last:
                    return
                taken += itertools.islice(itertools.cycle(first), self.round - len(taken))
            yield taken[self.rank * self.size : (self.rank + 1) * self.size]


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    held = next(items, None)
    for following in items:
        assert held is not None
        yield held
        held = following
    if held is not None:
        yield held


class Dealer(ABC):
    """What a loader asks about the order of its samples. Items are counted over all ranks."""

    @property
    @abstractmethod
    def round(self) -> int:
        """Items of one batch of every rank."""

    @abstractmethod
    def begin(self, item: int) -> int:
        """The next pass begins at `item`; returns how many batches the loader must throw away to get there."""

    @abstractmethod
    def batches(self, item: int) -> int:
        """Batches from `item` to the end of the pass; TypeError where nobody knows."""

    @abstractmethod
    def state(self, item: int, running: bool) -> dict[str, Any]:
        """The position: `item` of the running pass or of the one to come, the same on every rank."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> int:
        """Let the next pass be the one of `state`; returns the item to begin at."""

    # of the first round of the running pass, for a look at whether all ranks deal the same order
    order_digest: bytes | None = None

    def _note(self, first: list[Any]) -> None:
        if all(isinstance(item, int | list | tuple) for item in first[:1]):
            self.order_digest = hashlib.blake2b(repr(first).encode(), digest_size=16).digest()


class DataParallelSampler(DistributedSampler):
    """`DistributedSampler` that takes the next epoch's order by itself at every pass.

    The order is a function of (seed, epoch): another seed gives another order, and the same seed gives the same order
    on every run. `set_epoch` still works and decides the next pass. Without `drop_last` the last samples are repeated
    so that all ranks get equally many: a rank with one batch less would leave the others waiting in their collectives.
    """

    _start = 0

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        self.epoch += 1
        start, self._start = self._start, 0
        return itertools.islice(indices, start, None)

    def start_at(self, sample: int) -> None:
        """Begin the next pass at this rank's `sample`-th sample."""
        self._start = sample


class SamplerDealer(Dealer):
    """For loaders over a distributed sampler, ours or one of the user's, which deals the samples itself."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._running = 0  # epoch of the running pass

    @property
    def round(self) -> int:
        return self._batch_size * int(getattr(self._sampler, "num_replicas", 1))

    @property
    def _next(self) -> int:
        return int(getattr(self._sampler, "epoch", 0))

    def begin(self, item: int) -> int:
        self._running = self._next
        batches = item // self.round
        if isinstance(self._sampler, DataParallelSampler):
            self._sampler.start_at(batches * self._batch_size)
            return 0
        return batches  # a foreign sampler cannot start in the middle

    def batches(self, item: int) -> int:
        samples = len(self._sampler) - item // self.round * self._batch_size
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def state(self, item: int, running: bool) -> dict[str, Any]:
        return {
            "epoch": self._running if running else self._next,
            "batches": item // self.round,
            "samples_per_batch": self.round,
        }

    def load(self, state: dict[str, Any]) -> int:
        """Also with another batch size or number of ranks: samples are dealt in one global order."""
        if "batches" not in state or "order" in state:
            raise ValueError(_OTHER_LOADER.format(saved="a DataLoader given to boost", now="plugin.prepare_dataloader"))
        set_epoch: Callable[[int], None] | None = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(state["epoch"])
        samples = state["batches"] * state.get("samples_per_batch", self.round)
        again = samples % self.round
        if again:
            warnings.warn(
                f"{samples} samples of epoch {state['epoch']} had been seen, which is no whole number of batches of "
                f"{self.round} (batch size x data-parallel ranks): {again} of them will be seen again",
                stacklevel=2,
            )
        return samples - again


class _OrderedDealer(Dealer):
    """Deals an order that the user's sampler makes."""

    def __init__(self, source: Any, share: Share, order: SampleOrder) -> None:
        self._source = source
        self._share = share
        self._order = order
        self._skip = 0

    @property
    def sampler(self) -> Any:
        """The user's own, which makes the order."""
        return self._source

    @property
    def round(self) -> int:
        return self._share.round

    def begin(self, item: int) -> int:
        self._skip = item
        self._order.announce()
        return 0

    def batches(self, item: int) -> int:
        size = length_of(self._source)
        if size is None:
            raise TypeError(
                f"{type(self._source).__name__} has no length: iterate the loader, or count the steps yourself"
            )
        return self._share.rounds(size - item)

    def state(self, item: int, running: bool) -> dict[str, Any]:
        return {"items": item, **self._order.state(running)}

    def load(self, state: dict[str, Any]) -> int:
        if "order" not in state:
            raise ValueError(_OTHER_LOADER.format(saved="plugin.prepare_dataloader", now="a DataLoader given to boost"))
        self._order.load(state, middle=state["items"] > 0)
        return int(state["items"])

    def _deal(self) -> Iterator[list[Any]]:
        skip, self._skip = self._skip, 0
        self._order.draw()
        # A sampler may draw once more at its end (RandomSampler does), which comes before the next pass's order: when
        # the last batch is given it has, so that a position taken then is behind it.
        yield from self._share.deal(self._source, skip, self._note, one_ahead=self._order.has_generator)


class DealtSampler(_OrderedDealer, Sampler):
    """This rank's samples of the order that another sampler makes, in batches of the loader's batch size."""

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._deal())

    def __len__(self) -> int:
        if self._share.ranks == 1:
            return len(self._source)
        return self._share.rounds(len(self._source)) * self._share.size


class DealtBatches(_OrderedDealer, Sampler):
    """This rank's batches of those that a batch sampler makes; of its samples where the loader does not batch
    (`batch_size=None`).
    """

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._deal())

    def __len__(self) -> int:
        return self._share.rounds(len(self._source))


class DealtStream(Dealer, IterableDataset):
    """This rank's samples of a dataset that can only be read from its beginning.

    Every rank reads all of it and keeps its own: the ranks agree on the end without a word, and the order is that of
    one process. With workers, each worker reads what the dataset gives to it (all of it, where the dataset does not ask
    for its worker).
    """

    def __init__(self, dataset: Any, share: Share, num_workers: int = 0) -> None:
        self.dataset = dataset
        self._share = share
        self._num_workers = num_workers
        self._skip = 0
        self._running = 0
        self.epoch = 0  # of the next pass
        # Workers have copies of this object, which persistent ones keep from pass to pass: they read here which it is.
        self._workers_pass = torch.zeros(1, dtype=torch.int64).share_memory_() if num_workers else None

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Decides the next pass; the dataset is told when it begins, if it wants to know (`set_epoch`)."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        skip = self._skip
        if get_worker_info() is not None:
            assert self._workers_pass is not None
            skip = 0
            self._tell(int(self._workers_pass))
        return itertools.chain.from_iterable(self._share.deal(self.dataset, skip))

    @property
    def round(self) -> int:
        return self._share.round

    def begin(self, item: int) -> int:
        self._running, self.epoch = self.epoch, self.epoch + 1
        if self._workers_pass is not None:
            self._workers_pass.fill_(self._running)
        self._tell(self._running)
        self._skip = item
        return item // self.round if self._num_workers else 0

    def _tell(self, epoch: int) -> None:
        tell = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def batches(self, item: int) -> int:
        size = length_of(self.dataset)
        if size is None:
            raise TypeError(
                f"a loader over a stream ({type(self.dataset).__name__}) has no length: write `for batch in "
                "dataloader`, or count the steps yourself: `for step in range(number_of_steps)`"
            )
        return self._share.rounds(size - item)

    def state(self, item: int, running: bool) -> dict[str, Any]:
        epoch = self._running if running else self.epoch
        return {"epoch": epoch, "items": item, "round": self.round, "workers": self._num_workers}

    def load(self, state: dict[str, Any]) -> int:
        if "workers" not in state:
            raise ValueError(
                _OTHER_LOADER.format(saved="a loader over a dataset with a length", now="a loader over a stream")
            )
        changed = state["round"] != self.round or state["workers"] != self._num_workers
        if state["items"] and changed and (state["workers"] or self._num_workers):
            raise ValueError(
                f"the position in this stream was saved with num_workers={state['workers']} and {state['round']} "
                f"samples per step of all ranks, and cannot be found with num_workers={self._num_workers} and "
                f"{self.round}: workers read ahead by steps. Use the same num_workers, batch size and number of "
                "data-parallel ranks, or num_workers=0 when saving and loading"
            )
        self.epoch = state["epoch"]
        return int(state["items"])


_OTHER_LOADER = (
    "the position was saved by {saved}, and this loader comes from {now}: their orders differ; resume with the same "
    "kind of loader"
)


def length_of(dataset: Any) -> int | None:
    """None where nobody knows: a class may have the method and not the answer (a ChainDataset of streams)."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had by iterating."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def check_stream(dataset: Any, field: str) -> None:
    """Refuse what cannot be read a second time, or nothing at all."""
    if not hasattr(dataset, "__iter__"):
        raise ValueError(
            f"{field}={type(dataset).__name__} is no dataset: it has neither __getitem__ and __len__ nor __iter__"
        )
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"{field}={type(dataset).__name__} can be read only once, so a second epoch would be empty: pass an object "
            "whose __iter__ starts anew, a torch IterableDataset for example"
        )
