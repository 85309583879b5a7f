"""Which samples each rank sees, in which order, and from where it goes on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwright.plugins.data.dataloader import build_dataloader


def loader(size: int = 23, rank: int = 0, ranks: int = 3, batch_size: int = 2, **kwargs: object) -> DataLoader:
    return build_dataloader(TensorDataset(torch.arange(size)), batch_size, num_replicas=ranks, rank=rank, **kwargs)  # type: ignore[arg-type]


def samples(batches: object) -> list[int]:
    return [int(value) for (batch,) in batches for value in batch]  # type: ignore[attr-defined]


def test_the_seed_fixes_the_order_and_another_seed_changes_it() -> None:
    assert samples(loader(shuffle=True, seed=1)) == samples(loader(shuffle=True, seed=1))
    assert samples(loader(shuffle=True, seed=1)) != samples(loader(shuffle=True, seed=999))


def test_every_epoch_has_its_own_order() -> None:
    first = loader(shuffle=True, seed=1)
    passes = [samples(first) for _ in range(3)]
    assert len({tuple(order) for order in passes}) == 3
    again = loader(shuffle=True, seed=1)
    again.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert samples(again) == passes[2]


def test_a_broken_off_pass_does_not_repeat_its_order() -> None:
    data = loader(shuffle=True)
    first = next(iter(data))[0].tolist()
    assert next(iter(data))[0].tolist() != first


@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_get_equally_many_and_together_everything(drop_last: bool) -> None:
    parts = [samples(loader(rank=rank, shuffle=True, drop_last=drop_last)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    seen = [value for part in parts for value in part]
    if drop_last:
        assert len(set(seen)) == len(seen)
    else:
        assert set(seen) == set(range(23))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_at", [1, 3])
def test_going_on_in_the_middle_of_an_epoch(workers: int, stop_at: int) -> None:
    whole = loader(shuffle=True, num_workers=workers)
    epochs = [samples(whole), samples(whole), samples(whole)]
    stopped = loader(shuffle=True, num_workers=workers)
    samples(stopped)
    second = iter(stopped)
    seen = samples([next(second) for _ in range(stop_at)])
    state = stopped.state_dict()  # type: ignore[attr-defined]
    resumed = loader(shuffle=True, num_workers=workers)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    assert seen + samples(resumed) == epochs[1]
    assert samples(resumed) == epochs[2]


def test_a_foreign_sampler_is_used_and_can_go_on() -> None:
    class Reversed(DistributedSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return reversed(list(super().__iter__()))

    data = loader(distributed_sampler_cls=Reversed)
    whole = samples(data)
    assert whole[0] > whole[-1]
    batches = iter(data)
    seen = samples([next(batches)])
    resumed = loader(distributed_sampler_cls=Reversed)
    resumed.load_state_dict(data.state_dict())  # type: ignore[attr-defined]
    assert seen + samples(resumed) == whole


def test_workers_draw_different_numbers() -> None:
    class Noise(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1)

    drawn = [
        float(value)
        for rank in range(2)
        for batch in build_dataloader(Noise(), 1, num_replicas=2, rank=rank, num_workers=2)
        for value in batch
    ]
    assert len(set(drawn)) == len(drawn) == 8
