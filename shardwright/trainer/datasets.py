"""What loaders read: samples as they are, packed, and streams of either; and how samples become a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

from ..plugins.data.dealing import DataParallelSampler
from .errors import RecipeError, RowError
from .heads import Features, HeadEncoder
from .lines import Row, Rows
from .packing import TokenStore, fill, join
from .questions import Questions, windows_of
from .samples import IGNORED, Encoder, Sample
from .sources import place_of

Item = dict[str, torch.Tensor]


class Samples(Dataset[Item]):
    """One sequence per row, encoded when it is asked for."""

    def __init__(self, rows: Rows, encoder: Encoder | HeadEncoder) -> None:
        self.rows, self.encoder = rows, encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        try:
            return _item(self.encoder.one(self.rows[index]))
        except RecipeError as error:
            raise RowError(placed(error, place_of(self.rows, index))) from None


class Windows(Dataset[Item]):
    """As many sequences per row as it has windows, all encoded at the start."""

    def __init__(self, rows: Rows, encoder: Questions) -> None:
        self.rows, self.encoder = rows, encoder
        self.features: list[Features] = []
        self.row_of: list[int] = []
        for number, row in enumerate(rows):
            try:
                found = encoder.many(row)
            except RecipeError as error:
                raise RecipeError(placed(error, place_of(rows, number))) from None
            self.features += found
            self.row_of += [number] * len(found)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Item:
        return _item(self.features[index])


class Packed(Dataset[Item]):
    """Rows in sequences of one length, all encoded at the start."""

    def __init__(self, rows: Iterable[Row], encoder: Encoder, padding: int) -> None:
        self.length, self.padding = encoder.max_length, padding
        self.store = TokenStore(_pieces(rows, encoder))
        self.groups = list(fill(enumerate(self.store.lengths.tolist()), self.length))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Item:
        return join([self.store[key] for key in self.groups[index]], self.length, self.padding)


class SampleStream(IterableDataset[Item]):
    """One sequence per row of a stream, or packed ones; the same at every pass.

    Of n workers, worker w takes the rows of steps w, w + n, w + 2n, ..., and packs them by itself. A loader asks
    workers in turn, so that without packing the samples come in the order that they have without workers.
    """

    step = 1  # samples of one step of all ranks

    def __init__(self, rows: Iterable[Row], encoder: Any, padding: int, packing: bool) -> None:
        self.rows, self.encoder, self.padding, self.packing = rows, encoder, padding, packing

    def _own_rows(self) -> Iterator[Row]:
        worker = get_worker_info()
        for at, row in enumerate(self.rows):
            if worker is None or at // self.step % worker.num_workers == worker.id:
                yield row

    def __iter__(self) -> Iterator[Item]:
        try:
            yield from self._packed() if self.packing else self._single()
        except RecipeError as error:
            raise RowError(*error.args) from None

    def _single(self) -> Iterator[Item]:
        for row in self._own_rows():
            with _naming(row):
                items = [_item(sample) for sample in windows_of(self.encoder, row)]
            yield from items

    def _packed(self) -> Iterator[Item]:
        waiting: dict[int, Sample] = {}
        for keys in fill(self._lengths(waiting), self.encoder.max_length):
            yield join([waiting.pop(key) for key in keys], self.encoder.max_length, self.padding)

    def _lengths(self, waiting: dict[int, Sample]) -> Iterator[tuple[int, int]]:
        key = 0
        for row in self._own_rows():
            with _naming(row):
                pieces = list(self.encoder.pieces(row))
            for piece in pieces:
                waiting[key] = piece
                yield key, len(piece)
                key += 1


class Evened(Dataset[Item]):
    """A dataset that is filled up to a whole number of batches with samples of which nothing counts."""

    def __init__(self, samples: Any, multiple: int, padding: int) -> None:
        self.samples, self.multiple, self.padding = samples, multiple, padding

    def __len__(self) -> int:
        return -(-len(self.samples) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> Item:
        if index < len(self.samples):
            return self.samples[index]
        if isinstance(self.samples, Packed):
            return join([], self.samples.length, self.padding)
        return _item(self.samples.encoder.nothing(self.padding))


class _SamplesFirst(DistributedSampler[Any]):
    """The order of an `Evened` dataset: that of its samples, and what it is filled up with behind them."""

    def __iter__(self) -> Iterator[int]:
        evened: Any = self.dataset
        own: Any = DistributedSampler(evened.samples, 1, 0, shuffle=self.shuffle, seed=self.seed)
        own.set_epoch(self.epoch)
        order = [*own, *range(len(evened.samples), len(evened))]
        return iter(order[self.rank :: self.num_replicas])


class EvenedSampler(DataParallelSampler, _SamplesFirst):
    """Every sample once in every pass; the last step has as many as are left."""


class Collate:
    """Items of different lengths as one batch: filled up behind their ends, which a mask says; to the longest of them,
    or to `length`.
    """

    def __init__(self, padding: int, length: int = 0) -> None:
        self.padding, self.length = padding, length

    def __call__(self, items: Sequence[Item]) -> Item:
        if "position_ids" in items[0]:
            return {name: torch.stack([item[name] for item in items]) for name in items[0]}
        whole = [{**item, "attention_mask": torch.ones_like(item["input_ids"])} for item in items]
        return {name: self._column(name, [item[name] for item in whole]) for name in whole[0]}

    def _column(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if not values[0].ndim:  # one label of a text
            return torch.stack(list(values))
        filling = {"input_ids": self.padding, "labels": IGNORED}.get(name, 0)
        column = pad_sequence(list(values), batch_first=True, padding_value=filling)
        return nn.functional.pad(column, (0, max(self.length - column.shape[1], 0)), value=filling)


def placed(error: RecipeError, place: str) -> str:
    """What is wrong, with the row in front of it."""
    said = str(error)
    return said if said.startswith(place) else f"{place}: {said}"


@contextmanager
def _naming(row: Row) -> Iterator[None]:
    """A row of a stream is named in what is wrong with it."""
    try:
        yield
    except RecipeError as error:
        place = getattr(row, "place", None)
        raise RecipeError(str(error) if place is None else placed(error, place)) from None


def _pieces(rows: Iterable[Row], encoder: Encoder) -> Iterator[Sample]:
    for number, row in enumerate(rows):
        try:
            yield from encoder.pieces(row)
        except RecipeError as error:
            raise RecipeError(placed(error, place_of(rows, number))) from None


def _item(sample: Sample | Features) -> Item:
    if isinstance(sample, Features):
        return {name: torch.tensor(values) for name, values in sample.values.items()}
    return {"input_ids": torch.tensor(sample.ids), "labels": torch.tensor(sample.labels)}
