"""Loaders written for one process: each rank's share is the one that Accelerate gives it, and all shares are one
process's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.plugins.data.own_loader import shard_dataloader


class Counting(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.size, step))


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def batches(loader: Any) -> list[list[int]]:
    return [[int(value) for value in (batch[0] if isinstance(batch, list) else batch)] for batch in loader]


SIZES = [
    (size, batch_size, ranks)
    for size in (1, 2, 5, 7, 12, 13, 16, 24)
    for batch_size in (1, 2, 3)
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize("drop_last", [False, True])
def test_map_style_shares_are_those_of_accelerate(drop_last: bool) -> None:
    for size, batch_size, ranks in SIZES:
        if drop_last and size < batch_size * ranks:
            continue
        for rank in range(ranks):
            theirs = list(
                BatchSamplerShard(BatchSampler(SequentialSampler(range(size)), batch_size, drop_last), ranks, rank)
            )
            loader = DataLoader(numbers(size), batch_size=batch_size, drop_last=drop_last)
            mine = shard_dataloader(loader, ranks, rank)
            assert batches(mine) == theirs, (size, batch_size, ranks, rank)
            assert len(mine) == len(theirs)
            assert mine.batch_size == batch_size


@pytest.mark.parametrize("drop_last", [False, True])
def test_shares_of_streams_are_those_of_accelerate(drop_last: bool) -> None:
    for size, batch_size, ranks in SIZES:
        for rank in range(ranks):
            shard = IterableDatasetShard(Counting(size), batch_size, drop_last, ranks, rank)
            theirs = batches(DataLoader(shard, batch_size=batch_size, drop_last=drop_last))
            loader = DataLoader(Counting(size), batch_size=batch_size, drop_last=drop_last)
            assert batches(shard_dataloader(loader, ranks, rank)) == theirs, (size, batch_size, ranks, rank)
            built = build_dataloader(Counting(size), batch_size, num_replicas=ranks, rank=rank, drop_last=drop_last)
            assert batches(built) == theirs


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "subset", "sampler", "replacement"])
def test_global_batches_are_those_of_one_process(kind: str) -> None:
    """Drawn from a generator of the user's: rank r has the r-th part of the batch that one process takes, epoch
    after epoch.
    """

    def loader(batch_size: int) -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        data = numbers(24)
        samplers: dict[str, Any] = {
            "weighted": WeightedRandomSampler(torch.arange(1, 25).double(), 24, generator=generator),
            "subset": SubsetRandomSampler(range(24), generator=generator),
            "sampler": list(reversed(range(24))),
            "replacement": RandomSampler(data, replacement=True, num_samples=24, generator=generator),
        }
        if kind == "shuffle":
            return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)
        return DataLoader(data, batch_size=batch_size, sampler=samplers[kind])

    alone = loader(6)
    shares = [shard_dataloader(loader(2), 3, rank) for rank in range(3)]
    orders = []
    for _ in range(3):
        expected = batches(alone)
        parts = [batches(share) for share in shares]
        assert [[value for part in parts for value in part[step]] for step in range(4)] == expected
        orders.append(expected)
    if kind != "sampler":
        assert orders[0] != orders[1] != orders[2]


def test_one_process_draws_what_plain_torch_draws() -> None:
    for shuffle in (False, True):
        runs = []
        for prepare in (False, True):
            torch.manual_seed(3)
            loader: Any = DataLoader(numbers(11), batch_size=3, shuffle=shuffle)
            loader = shard_dataloader(loader, 1, 0) if prepare else loader
            runs.append(([batches(loader) for _ in range(3)], torch.rand(1).item(), len(loader)))
        assert runs[0] == runs[1]


class Buckets:
    """A batch sampler of unequal batches."""

    def __init__(self, number: int = 7) -> None:
        self.all = [list(range(10 * i, 10 * i + 1 + i % 3)) for i in range(number)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


def test_batch_samplers_and_loaders_that_do_not_batch() -> None:
    for rank in range(3):
        theirs = list(BatchSamplerShard(Buckets(), 3, rank))
        mine = shard_dataloader(DataLoader(numbers(99), batch_sampler=Buckets()), 3, rank)
        assert batches(mine) == theirs
        assert len(mine) == 3
        single: Any = shard_dataloader(DataLoader(range(8), batch_size=None), 3, rank)
        assert list(single) == [[0, 3, 6], [1, 4, 7], [2, 5, 0]][rank]
    stream: Any = shard_dataloader(DataLoader(Counting(5), batch_size=None), 2, 1)
    assert list(stream) == [1, 3, 0]


def test_what_deals_by_itself_is_left_alone_or_refused() -> None:
    data = numbers(12)
    right = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    assert shard_dataloader(right, 2, 1) is right
    prepared = build_dataloader(data, 2, num_replicas=2, rank=1)
    assert shard_dataloader(prepared, 2, 1) is prepared
    theirs = DataLoader(data, batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(data), 2, False), 2, 1))
    assert shard_dataloader(theirs, 2, 1) is theirs
    for ranks, rank in ((4, 1), (2, 0), (1, 0)):
        with pytest.raises(
            ValueError, match=r"DistributedSampler deals samples to 2 ranks .* number 1 .*plugin.data_parallel"
        ):
            shard_dataloader(right, ranks, rank)
    inner = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, num_replicas=8, rank=3), 2, False))
    with pytest.raises(ValueError, match="deals samples to 8 ranks"):
        shard_dataloader(inner, 2, 1)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Any:
            return iter([1, 2])

    for loader in (Own(numbers(4)), [1, 2, 3]):
        assert shard_dataloader(loader, 1, 0) is loader
        with pytest.raises(ValueError, match=r"cannot be dealt out to 2 .*prepare_dataloader.*do not pass it to boost"):
            shard_dataloader(loader, 2, 0)
    with pytest.raises(ValueError, match="no batch to each of 4 data-parallel ranks"):
        shard_dataloader(DataLoader(numbers(7), batch_size=2, drop_last=True), 4, 0)
    with pytest.raises(ValueError, match="has no samples"):
        shard_dataloader(DataLoader(numbers(0)), 2, 0)


def test_settings_of_the_loader_are_kept() -> None:
    def collate(samples: list[Any]) -> list[int]:
        return [int(value) for (value,) in samples]

    loader: Any = DataLoader(
        numbers(8), batch_size=2, collate_fn=collate, num_workers=1, prefetch_factor=3, persistent_workers=True
    )
    share: Any = shard_dataloader(loader, 2, 1)
    assert [*share] == [[2, 3], [6, 7]] == [*share]
    assert (share.num_workers, share.prefetch_factor, share.persistent_workers) == (1, 3, True)


KINDS = {
    "prepared": lambda ranks, rank, size: build_dataloader(
        numbers(30), size, num_replicas=ranks, rank=rank, shuffle=True, seed=2
    ),
    "own": lambda ranks, rank, size: shard_dataloader(
        DataLoader(numbers(30), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(5)), ranks, rank
    ),
    "stream": lambda ranks, rank, size: build_dataloader(Counting(30), size, num_replicas=ranks, rank=rank),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_going_on_is_the_same_as_never_stopping(kind: str, after: int) -> None:
    """By the loop of the README, in which nobody asks for a batch behind the last one (a stream has no length: a for
    loop).
    """

    def epoch(loader: Any) -> list[list[int]]:
        if kind == "stream":
            return batches(loader)
        running, seen = iter(loader), []
        left = len(loader)
        for step in range(len(loader)):
            assert len(loader) == left
            seen += batches([next(running)])
            running.batch_is_used(None)
            assert len(loader) == (left if step < left - 1 else 5)
        return seen

    for rank in range(2):
        straight: Any = KINDS[kind](2, rank, 3)
        epochs = [epoch(straight) for _ in range(4)]
        stopped: Any = KINDS[kind](2, rank, 3)
        epoch(stopped)
        running = iter(stopped)
        assert batches([next(running) for _ in range(after)]) == epochs[1][:after]
        resumed: Any = KINDS[kind](2, rank, 3)
        resumed.load_state_dict(stopped.state_dict())
        assert resumed.state_dict() == stopped.state_dict()
        expected = [epochs[1][after:], epochs[2], epochs[3]]
        if after == 5 and kind != "stream":  # a stream may go on, for all that anybody knows before asking
            expected = epochs[2:]
        assert [epoch(resumed) for _ in expected] == expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_going_on_at_another_number_of_ranks_and_another_batch_size(kind: str) -> None:
    make = KINDS[kind]
    stopped: list[Any] = [make(2, rank, 3) for rank in range(2)]
    running = [iter(loader) for loader in stopped]
    seen = [value for _ in range(2) for loader in running for batch in batches([next(loader)]) for value in batch]
    states = [loader.state_dict() for loader in stopped]
    assert states[0] == states[1]
    assert sorted(seen) == sorted(set(seen))
    for ranks, size in ((1, 6), (3, 2), (4, 3), (3, 1)):
        resumed: list[Any] = [make(ranks, rank, size) for rank in range(ranks)]
        for loader in resumed:
            loader.load_state_dict(states[0])
        rest = [batches(loader) for loader in resumed]
        assert len({len(part) for part in rest}) == 1
        left = [value for part in rest for batch in part for value in batch]
        assert set(seen) | set(left) == set(range(30))
        filled = -18 % (ranks * size)
        assert len(set(seen) & set(left)) <= filled, "samples were seen twice"


OWN = {
    "global generator": lambda drop_last: DataLoader(numbers(22), batch_size=4, shuffle=True, drop_last=drop_last),
    "generator": lambda drop_last: DataLoader(
        numbers(22), batch_size=4, shuffle=True, drop_last=drop_last, generator=torch.Generator().manual_seed(5)
    ),
    "stream": lambda drop_last: DataLoader(Counting(22), batch_size=4, drop_last=drop_last),
}


def _train(loader: Any, steps: int, asks_for_the_end: bool) -> list[tuple[list[int], float]]:
    """What each of the next steps reads and draws, as dropout would."""
    seen: list[tuple[list[int], float]] = []
    while len(seen) < steps:
        for batch in loader:
            seen.append((batches([batch])[0], float(torch.rand(()))))
            if len(seen) == steps and not asks_for_the_end:
                break
    return seen


@pytest.mark.parametrize("asks_for_the_end", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", list(OWN))
def test_a_run_that_goes_on_draws_the_same_numbers(kind: str, drop_last: bool, asks_for_the_end: bool) -> None:
    """From the states of loader and global generator, as checkpoints hold them: before the first pass, in the middle of
    one, behind its last batch and behind its end. A pass draws a seed for workers, also where it has none, when it
    begins, and a sampler with a generator of its own draws from that at its end.
    """
    of_a_pass = 5 if drop_last else 6
    torch.manual_seed(11)
    straight = _train(shard_dataloader(OWN[kind](drop_last), 1, 0), 3 * of_a_pass, True)
    for steps in (0, 2, of_a_pass, of_a_pass + 3, 2 * of_a_pass):
        if asks_for_the_end and steps % of_a_pass:
            continue
        torch.manual_seed(11)
        stopped: Any = shard_dataloader(OWN[kind](drop_last), 1, 0)
        assert _train(stopped, steps, asks_for_the_end) == straight[:steps]
        state, drawn = stopped.state_dict(), torch.get_rng_state()
        resumed: Any = shard_dataloader(OWN[kind](drop_last), 1, 0)
        resumed.load_state_dict(state)
        torch.set_rng_state(drawn)
        assert _train(resumed, 3 * of_a_pass - steps, True) == straight[steps:], steps


def test_workers_that_stay_have_their_seed() -> None:
    """From the first pass on; the others draw none."""
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True}

    def make() -> Any:
        return shard_dataloader(DataLoader(numbers(8), **settings, generator=torch.Generator().manual_seed(5)), 1, 0)

    straight = _train(make(), 6, False)
    stopped = make()
    _train(stopped, 2, False)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [read for read, _ in _train(resumed, 4, False)] == [read for read, _ in straight[2:]]


def test_a_stream_with_workers() -> None:
    alone = batches(DataLoader(Counting(27), batch_size=4, num_workers=2))
    shares: list[Any] = [
        build_dataloader(Counting(27), 2, num_replicas=2, rank=rank, num_workers=2) for rank in range(2)
    ]
    parts = [batches(share) for share in shares]
    assert len(parts[0]) == len(parts[1]) == 8
    joined = [first + second for first, second in zip(*parts, strict=True)]
    assert joined[:6] == alone[:6]
    assert {value for batch in joined for value in batch} == set(range(27))
    running = iter(shares[0])
    seen = batches([next(running) for _ in range(3)])
    resumed: Any = build_dataloader(Counting(27), 2, num_replicas=2, rank=0, num_workers=2)
    state = shares[0].state_dict()
    resumed.load_state_dict(state)
    assert seen + batches(resumed) == parts[0]
    other: Any = build_dataloader(Counting(27), 2, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"num_workers=2 and 4 samples .*num_workers=0"):
        other.load_state_dict(state)


class ByEpoch(Counting):
    def __iter__(self) -> Iterator[int]:
        return (1000 * (self.epochs or [0])[-1] + number for number in super().__iter__())


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.sweep)])
def test_workers_that_stay_hear_of_a_streams_epochs(start_method: str) -> None:
    def make(workers: int) -> Any:
        staying = {"persistent_workers": True, "multiprocessing_context": start_method} if workers else {}
        return shard_dataloader(DataLoader(ByEpoch(6), batch_size=2, num_workers=workers, **staying), 1, 0)

    alone = make(0)
    passes = [batches(alone) for _ in range(3)]
    assert [seen[0][0] for seen in passes] == [0, 1000, 2000]
    workers = make(1)
    assert [batches(workers) for _ in range(2)] == passes[:2]
    resumed = make(1)
    resumed.load_state_dict(workers.state_dict())
    assert batches(resumed) == passes[2] == batches(workers)


def test_a_stream_hears_of_its_epoch_and_has_no_length() -> None:
    data = Counting(6)
    loader: Any = build_dataloader(data, 2, num_replicas=2, rank=0)
    list(loader), list(loader)
    assert data.epochs == [0, 1]
    with pytest.raises(TypeError, match="has no length: write `for batch in dataloader`"):
        len(loader)
    with pytest.raises(ValueError, match="shuffle=True with a stream"):
        build_dataloader(data, 2, num_replicas=2, rank=0, shuffle=True)
    with pytest.raises(ValueError, match="can be read only once"):
        build_dataloader((number for number in range(3)), 2, num_replicas=2, rank=0)  # type: ignore[arg-type]


def _shards(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": value} for value in range(8 * shard, 8 * shard + 8))


def test_streams_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    import datasets  # late: it takes a second, which other tests need not
    from datasets import distributed

    stream = datasets.IterableDataset.from_generator(_shards, gen_kwargs={"shards": [0, 1, 2]})
    shuffled = stream.shuffle(seed=1, buffer_size=8)

    def values(loader: Any) -> list[list[int]]:
        return [batch["x"].tolist() for batch in loader]

    for data, workers in ((stream, 0), (stream, 2), (shuffled, 0)):
        parts: list[Any] = [
            build_dataloader(data, 2, num_replicas=2, rank=rank, num_workers=workers) for rank in range(2)
        ]
        epochs = [[values(part) for part in parts] for _ in range(2)]
        for shares in epochs:
            assert sorted(value for share in shares for batch in share for value in batch) == list(range(24))
        assert (epochs[0] != epochs[1]) == (data is shuffled)
        running = iter(parts[0])
        third = [next(running)["x"].tolist() for _ in range(2)]
        resumed: Any = build_dataloader(data, 2, num_replicas=2, rank=0, num_workers=workers)
        resumed.load_state_dict(parts[0].state_dict())
        rest = values(resumed)
        assert third + rest == third + values(running)
        assert len(third + rest) == 6
    split = distributed.split_dataset_by_node(stream, rank=1, world_size=2)
    loader = DataLoader(split, batch_size=2)
    assert shard_dataloader(loader, 2, 1) is loader
    with pytest.raises(ValueError, match="deals samples to 2 ranks"):
        shard_dataloader(loader, 4, 1)
    with pytest.raises(ValueError, match="split_dataset_by_node already"):
        build_dataloader(split, 2, num_replicas=2, rank=1)


def test_an_order_that_cannot_be_drawn_again_is_refused() -> None:
    def make() -> Any:
        return shard_dataloader(DataLoader(numbers(8), batch_size=2, sampler=SubsetRandomSampler(range(8))), 1, 0)

    loader = make()
    next(iter(loader))
    with pytest.raises(ValueError, match=r"give the sampler a generator=torch.Generator"):
        make().load_state_dict(loader.state_dict())


def test_positions_of_other_kinds_of_loaders_are_refused() -> None:
    loaders: dict[str, Any] = {kind: make(2, 0, 3) for kind, make in KINDS.items()}
    for kind, loader in loaders.items():
        for other, saved in loaders.items():
            if kind != other:
                with pytest.raises(ValueError, match="resume with the same kind of loader"):
                    loader.load_state_dict(saved.state_dict())
