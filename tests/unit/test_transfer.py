"""Batches that a step takes from a loader are sent off before it asks; order, position and random numbers of the
loader stay as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.plugins.data.input_guard import CheckedBatches
from shardwright.utils import transfer


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Samples that draw random numbers when they are made."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "noise": torch.rand(2)}


def epochs(workers: int, sends: bool, stop: int | None = None) -> tuple[list[Any], list[str]]:
    """Two passes as `execute_pipeline` takes them: what was given, with the loader's state then, what was sent; after
    `stop` steps by another loader, from the state of the first one.
    """
    log: list[str] = []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        log.append(f"sent {tensor.flatten().tolist()}" if tensor.dtype == torch.int64 else "sent noise")
        return tensor.clone()

    def make() -> Any:
        return build_dataloader(Noisy(), 2, num_replicas=1, rank=0, shuffle=True, num_workers=workers)

    torch.manual_seed(3)
    seen: list[Any] = []
    loader = make()
    with transfer.pretended(moved) if sends else torch.no_grad():
        while len(seen) < 8:
            batches = CheckedBatches(iter(loader), None, training=True)
            for _ in range(len(loader)):
                batch = next(batches)
                log.append(f"step {batch['input_ids'].flatten().tolist()}")
                if sends:
                    before = len(log)
                    on_device = {name: transfer.to_device(value, torch.device("cpu")) for name, value in batch.items()}
                    assert len(log) == before, "all had been sent"
                    assert all(on_device[name] is not batch[name] for name in batch)
                    assert all(torch.equal(on_device[name], batch[name]) for name in batch)
                state = loader.state_dict()
                seen.append(({name: value.tolist() for name, value in batch.items()}, state, len(loader)))
                if len(seen) == stop:
                    numbers = torch.get_rng_state()
                    loader = make()
                    loader.load_state_dict(state)
                    torch.set_rng_state(numbers)
                    break
    return seen, log


@pytest.mark.parametrize("workers", [0, 1])
def test_sending_changes_nothing_of_the_loader(workers: int) -> None:
    plain, _ = epochs(workers, sends=False)
    sent, log = epochs(workers, sends=True)
    assert sent == plain
    orders = [place for place, line in enumerate(log) if line.startswith("step")]
    assert orders[:2] == ([4, 7] if workers else [2, 5]), "with workers the next batch is on its way in every step"
    resumed, _ = epochs(workers, sends=True, stop=2)
    if workers == 0:
        assert [each[0] for each in resumed] == [each[0] for each in plain]
    assert [each[0]["input_ids"] for each in resumed] == [each[0]["input_ids"] for each in plain]


def test_a_script_that_keeps_a_batch_may_change_it() -> None:
    """What was sent off for a step that never asked is not found for what has come since."""
    loader = build_dataloader(Noisy(), 2, num_replicas=1, rank=0, num_workers=0)
    with transfer.pretended(torch.clone):
        batches = iter(loader)
        batch = next(batches)
        batch["input_ids"].numpy()[:] = 99
        assert transfer.to_device(batch["input_ids"], torch.device("cpu")).tolist() == [[99], [99]]


class Broken(Noisy):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 3:
            raise KeyError("the fourth sample")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_made_ends_its_own_step() -> None:
    loader = build_dataloader(Broken(), 2, num_replicas=1, rank=0, num_workers=1)
    with transfer.pretended(torch.clone):
        batches = CheckedBatches(iter(loader), None, training=True)
        assert next(batches)["input_ids"].flatten().tolist() == [0, 1]
        with pytest.raises(KeyError, match="the fourth sample"):
            next(batches)
        assert next(batches)["input_ids"].flatten().tolist() == [4, 5], "as a DataLoader goes on"
