"""Going back to the last checkpoint on several ranks: the weights are those of plain torch in one process without the
batches that were left out, at every layout, also where the run was ended and goes on at another, with the next batch
made ahead and with steps that are run again to name what was wrong.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import elastic
from shardwright.booster import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.trainer import Every, Trainer

SAMPLES, BATCH, STEPS, SAVE = 44, 4, 18, 4  # 11 batches a pass
NAN = float("nan")
SPIKE_FACTOR = 3.0
ONE = {"microbatch_size": 1, "precision": "fp32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, **ONE},
    "pp2": {"pp_size": 2, **ONE},
    "dp2": {"zero_stage": 1, "precision": "fp32"},
    "zero2": {"zero_stage": 2, "precision": "fp32"},
    "zero3": {"zero_stage": 3, "precision": "fp32"},
    "tp2 pp2": {"tp_size": 2, "pp_size": 2, **ONE},
    "pp2 zb dp2": {"pp_size": 2, "pp_style": "zb", "zero_stage": 1, **ONE},
    "tp2 zero2": {"tp_size": 2, "zero_stage": 2, "precision": "fp32"},
}


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ids of which unequally many are labels; `number` says which row it is."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 64, (SAMPLES, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def schedule_of(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def numbers_of(ids: torch.Tensor) -> list[int]:
    """Which rows these are."""
    return [int((Texts().rows == row).all(1).nonzero()) for row in ids]


class Bad(Trainer):
    """`bad`: what losses are multiplied by, by the number of the batch among those this run has been given, of which
    `before` were given to the run that it goes on from.
    """

    bad: dict[int, float] = {}
    before = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), numbers_of(batch["input_ids"])]
        return super().train_step(batch)

    def criterion(self, outputs: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs.loss * self.bad.get(self.before + len(self.seen) - 1, 1.0)
        return loss


class Stops:
    """Ends the run behind a step, as a cluster does."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def started(self, facts: Any) -> None: ...

    evaluated = finished = started


def boosted(layout: str, **options: Any) -> tuple[Any, ...]:
    plugin = HybridParallelPlugin(**LAYOUTS[layout])
    booster, model = Booster(plugin=plugin, on_nan="stop", **options), make_model()
    data = plugin.prepare_dataloader(Texts(), batch_size=BATCH // plugin.data_parallel[0], shuffle=True, seed=7)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    return booster, *booster.boost(model, optimizer, None, data, schedule_of(optimizer))


def whole(model: Any, path: Path, booster: Any) -> dict[str, torch.Tensor]:
    """The weights of all ranks."""
    from safetensors.torch import load_file

    booster.save_model(model, path)
    torch.distributed.barrier()
    return load_file(path)


def train(
    rank: int, world: int, layout: str, folder: Path, bad: dict[int, float], stop: int = 0, before: int = 0
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """What this rank has seen, and the weights. `before`: batches before the checkpoint that it goes on from."""
    booster, model, optimizer, _, data, schedule = boosted(layout, detect_anomaly="name", check_replicas=1)
    trainer = Bad(
        booster,
        model,
        optimizer,
        data,
        schedule,
        total_steps=STEPS,
        directory=folder,
        save=Every(SAVE),
        rollbacks=2,
        spike_factor=SPIKE_FACTOR,
        listeners=[Stops(stop)],
    )
    trainer.bad, trainer.before = bad, before
    assert trainer.resume() == bool(before)
    trainer.train()
    return trainer.seen, whole(model, folder / "final.safetensors", booster)


def batches() -> list[list[int]]:
    """Rows of three passes, as torch's sampler deals them to one process."""
    sampler: Any = torch.utils.data.DistributedSampler(Texts(), 1, 0, shuffle=True, seed=7)
    found: list[list[int]] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        found += [order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]
    return found


def by_hand(left_out: set[int]) -> dict[str, torch.Tensor]:
    model, texts = make_model(), Texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = schedule_of(optimizer)
    taken = [rows for number, rows in enumerate(batches()) if number not in left_out][:STEPS]
    assert len(taken) == STEPS
    for rows in taken:
        ids, labels = (torch.stack([texts[row][name] for row in rows]) for name in ("input_ids", "labels"))
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return dict(model.state_dict())


def compare(found: list[tuple[list[list[int]], dict[str, torch.Tensor]]], left_out: set[int], first: int = 0) -> None:
    """All batches came, in order and each to the ranks of one replica; the weights are those of the others."""
    seen = [ranks for ranks, _ in found]
    count = STEPS + len(left_out) - first
    for number, rows in enumerate(batches()[first : first + count]):
        assert sorted({row for each in seen for row in each[number]}) == sorted(rows), number
    assert {len(each) for each in seen} == {count}
    for name, weight in by_hand(left_out).items():
        for _, weights in found:
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5)


def check_layout(layout: str, world: int, folder: Path) -> None:
    """The nan is in batch 5, behind the save of step 4 (batch 3), so that batches 4 and 5 are left out; the jump in
    batch 17 is in step 16, behind the save of step 12 (batch 13): 14 to 17 are.
    """
    found = run_ranks(train, world, layout, folder, {5: NAN, 17: 10.0}, debug="OFF", timeout=200)
    compare(found, {4, 5, 14, 15, 16, 17})


@pytest.mark.parametrize("layout", ["pp2", "zero2"])
def test_bad_batches_are_left_out_on_two_ranks(layout: str, tmp_path: Path) -> None:
    check_layout(layout, 2, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("pp2", "zero2")])
def test_bad_batches_are_left_out_at_every_layout(layout: str, tmp_path: Path) -> None:
    check_layout(layout, 4 if " " in layout else 2, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "then"), [("pp2", "tp2 zero2"), ("tp2 pp2", "zero2"), ("zero3", "pp2 zb dp2")])
def test_a_run_that_went_back_goes_on_at_another_layout(first: str, then: str, tmp_path: Path) -> None:
    """Ended behind step 10, which is batch 11; in what goes on batch 15 is bad, behind the save of step 12."""
    worlds = [4 if " " in layout else 2 for layout in (first, then)]
    run_ranks(train, worlds[0], first, tmp_path, {5: NAN}, 10, debug="OFF", timeout=200)
    found = run_ranks(train, worlds[1], then, tmp_path, {15: NAN}, 0, 12, debug="OFF", timeout=200)
    compare(found, {4, 5, 14, 15}, first=12)


def train_elastically(
    rank: int, world: int, layout: str, folder: Path, bad: dict[int, float]
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """The same by `elastic.run` and a loop of its own."""
    seen: list[list[int]] = []

    def loop(run: elastic.Run) -> dict[str, torch.Tensor]:
        booster, model, optimizer, _, data, schedule = boosted(layout, detect_anomaly="name", check_replicas=1)
        run.resume(booster, model, optimizer, schedule, data)
        while run.step < STEPS:
            for batch in data:
                seen.append(numbers_of(batch["input_ids"]))
                factor = bad.get(len(seen) - 1, 1.0)
                booster.execute_pipeline(
                    iter([batch]), model, lambda outputs, _, by=factor: outputs.loss * by, optimizer
                )
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.completed()
                if run.step == STEPS:
                    break
        return whole(model, folder / "final.safetensors", booster)

    weights = elastic.run(loop, folder / "checkpoints", save_every=SAVE, rollbacks=2)
    return seen, weights


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["pp2", "tp2", "zero2", "zero3", "pp2 zb dp2"])
def test_elastic_runs_go_back_alike(layout: str, tmp_path: Path) -> None:
    """Batch 13 is step 12, behind the save of step 8 (batch 9), and the third of its pass."""
    world = 4 if " " in layout else 2
    found = run_ranks(train_elastically, world, layout, tmp_path, {5: NAN, 13: NAN}, debug="OFF", timeout=200)
    compare(found, {4, 5, 10, 11, 12, 13})
