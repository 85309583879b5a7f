"""A loss that is not finite, or that jumps, sends a run back to its last checkpoint, on behind the data that did it."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright
from shardwright import Booster
from shardwright.files import disk
from shardwright.files.errors import CheckpointNotFound
from shardwright.interface import NonFiniteLoss
from shardwright.logging import DistributedLogger
from shardwright.plugins import HybridParallelPlugin
from shardwright.trainer import Trainer
from shardwright.trainer.progress import JsonLines, Log
from shardwright.trainer.spikes import LossSpike, SpikeWatch
from shardwright.trainer.trainer import Every

STEPS = 20


@pytest.fixture(autouse=True)
def alone(no_launcher: None) -> None:
    shardwright.launch_from_torch(seed=1)


class Squares(Trainer):
    """`factors`: what the losses of some batches are multiplied by, by their number."""

    factors: dict[int, float] = {}

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), batch["x"]]
        return super().train_step(batch)

    def criterion(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.square().mean() * self.factors.get(len(self.seen), 1.0)

    def count_tokens(self, batch: Any) -> int:
        return len(batch["x"])


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def trained(
    directory: Path,
    factors: dict[int, float],
    make: Any = Squares,
    lr: float = 1e-3,
    resume: bool | None = False,  # None: there is nothing to go on from
    **options: Any,
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Layer(4, 2)
    plain = Layer(4, 2)
    plain.load_state_dict(model.state_dict())
    samples = [{"x": torch.randn(4) + 1} for _ in range(16)]
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"), on_nan="stop")
    loader = booster.plugin.prepare_dataloader(samples, batch_size=4, shuffle=True, seed=3)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)  # type: ignore[assignment]
    options = {"total_steps": STEPS, "save": Every(steps=5), **options}
    trainer = make(booster, model, optimizer, loader, directory=directory, **options)
    trainer.factors = factors
    assert resume is False or trainer.resume() is bool(resume)
    trainer.train()
    return trainer, plain


def expect(trainer: Any, plain: nn.Module, left_out: set[int]) -> None:
    """The weights are those of plain torch without some batches, counted from 1."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    batches = [batch for number, batch in enumerate(trainer.seen, start=1) if number not in left_out]
    assert len(batches) == STEPS
    for batch in batches:
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
    for one, other in zip(trainer.model.unwrap().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_bad_batches_are_left_out(tmp_path: Path) -> None:
    trainer, plain = trained(tmp_path / "nan", {8: float("nan")}, rollbacks=1)
    assert trainer.progress.step == STEPS
    expect(trainer, plain, {6, 7, 8})  # since the save of step 5
    trainer, plain = trained(tmp_path / "jump", {14: 50.0, 23: 50.0}, rollbacks=2, spike_factor=10.0)
    # 14 is in step 14; of 19 steps since 23 is in step 19, behind the save of step 15
    expect(trainer, plain, {11, 12, 13, 14, 20, 21, 22, 23})
    with pytest.raises(
        LossSpike, match=r"the loss of step 14 is .*, more than spike_factor=10 times the median"
    ) as raised:
        trained(tmp_path / "end", {14: 50.0}, spike_factor=10.0)
    assert "rollbacks" not in str(raised.value)
    with pytest.raises(NonFiniteLoss, match=r"\. rollbacks=1 has been used up$"):
        trained(tmp_path / "again", {8: float("nan"), 9: float("inf")}, rollbacks=1)
    nothing = r"\. rollbacks=5 had no checkpoint to go back to: save earlier$"
    with pytest.raises(NonFiniteLoss, match=nothing):
        trained(tmp_path / "early", {3: float("nan")}, rollbacks=5)
    with pytest.raises(LossSpike, match=nothing):
        trained(tmp_path / "jump early", {14: 50.0}, rollbacks=5, spike_factor=10.0, save=Every(steps=50))


class Scored(Squares):
    """Whose evaluations are best once, at step 7; what the weights were then is in `best_weights`."""

    def evaluate(self) -> float:
        if self.progress.step == 7 and not hasattr(self, "best_weights"):
            self.best_weights = [param.detach().clone() for param in self.model.unwrap().parameters()]
            return 1.0
        return 10.0 + self.progress.step


def test_the_best_of_the_steps_that_were_left_out_stays_the_best(tmp_path: Path) -> None:
    """The checkpoint of step 5 knows of another, which best/ has no more."""
    options: dict[str, Any] = {"evaluation": [], "evaluate": Every(steps=1), "keep_best": True}
    trainer, _ = trained(tmp_path, {9: float("nan")}, make=Scored, rollbacks=1, **options)
    assert (trainer.progress.best_step, trainer.progress.step) == (7, STEPS)
    for one, other in zip(trainer.model.unwrap().parameters(), trainer.best_weights, strict=True):
        assert torch.equal(one, other)


def test_what_a_run_was_given_holds_behind_the_checkpoint_that_it_went_on_from(tmp_path: Path) -> None:
    trained(tmp_path, {}, total_steps=5)
    trainer, _ = trained(tmp_path, {3: float("nan")}, lr=2e-3, resume=True, rollbacks=1, total_steps=8)
    assert (trainer.progress.step, len(trainer.seen)) == (8, 6)
    assert trainer.optimizer.param_groups[0]["lr"] == 2e-3
    with pytest.raises(NonFiniteLoss):  # those checkpoints are another run's
        trained(tmp_path, {3: float("nan")}, rollbacks=1)


def test_a_full_disk_costs_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the one behind it, nor the run; that of the best evaluation is not named when it is not there."""
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda self, message, ranks=None: said.append(message))

    def full(operation: str, path: Path) -> None:
        if operation == "half-way write" and ("step-5" in str(path) or "best" in str(path)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    disk.set_probe(full)
    try:
        options: dict[str, Any] = {"evaluation": [], "evaluate": Every(steps=7), "keep_best": True}
        trainer, plain = trained(tmp_path / "warn", {}, make=Scored, **options)
        expect(trainer, plain, set())
        assert trainer.progress.best_step == 0
        assert sorted(path.name for path in trainer.checkpoints.glob("step-*")) == ["step-10", "step-15", "step-20"]
        assert [line.partition(":")[0] for line in said] == ["step 5", "step 7"]
        with pytest.raises(OSError, match="No space left"):
            trained(tmp_path / "raise", {}, on_save_error="raise")
    finally:
        disk.set_probe(None)


def test_a_run_whose_first_save_was_cut_off_begins_anew(tmp_path: Path) -> None:
    trained(tmp_path / "run", {}, total_steps=5)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-5").rename(checkpoints / ".step-5.new")
    (checkpoints / ".step-5.new" / "COMMITTED").unlink()
    trainer, plain = trained(tmp_path / "run", {}, resume=None)
    expect(trainer, plain, set())
    assert {path.name for path in checkpoints.glob("*step*")} >= {"step-5", "step-20"}
    for path in checkpoints.glob("step-*"):  # what has a name was whole once: that is not begun anew over
        (path / "COMMITTED").unlink()
    with pytest.raises(CheckpointNotFound, match="COMMITTED is missing"):
        trained(tmp_path / "run", {}, resume=True)


def test_what_is_told_of_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda self, message, ranks=None: said.append(message))
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.path.mkdir()  # nothing can be written to it
    lines.step({"step": 1})
    lines.evaluated({"step": 2})
    assert len(said) == 1
    assert said[0].startswith("step 1: its line is missing in ")
    for saved, words in ((True, "a checkpoint is written, which resume=true"), (False, "could not be written")):
        Log().finished({"step": 3, "total_steps": 9, "tokens_seen": 1, "interrupted": True, "saved": saved})
        assert words in capsys.readouterr().out


def test_lines_of_steps_that_were_taken_back_are_taken_out(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.started({"step": 0})
    for step in (1, 2, 3, 2):
        lines.step({"step": step, "loss": 4.0 - step})
        lines.evaluated({"step": step, "eval_loss": 0.5})
    told = [json.loads(line)["step"] for line in lines.path.read_text().splitlines()]
    assert told == [1, 1, 2, 2]


class OneByOne:
    """A loader whose iterator is a generator, which has a `send` of its own."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


def test_every_batch_of_a_loader_of_ones_own_is_trained_on(tmp_path: Path) -> None:
    model: Any = Layer(4, 2)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    own: Any = OneByOne([{"x": torch.full((2, 4), float(number))} for number in range(3)])
    model, optimizer, _, own, _ = booster.boost(model, optimizer, None, own)
    trainer: Any = Squares(booster, model, optimizer, own, total_steps=5, directory=tmp_path)
    trainer.train()
    assert [int(x[0, 0]) for x in trainer.seen] == [0, 1, 2, 0, 1]


def test_what_a_jump_is() -> None:
    watch = SpikeWatch(3.0)
    for step in range(10):
        watch.note(step, 100.0 if step == 4 else 1.0)  # too few are known
    with pytest.raises(LossSpike):
        watch.note(11, 3.1)
    watch.note(12, 2.9)
    SpikeWatch(None).note(1, float("inf"))
    for step in range(30):  # as of steps that on_nan="skip" has left out
        watch.note(step, float("nan" if step % 2 else "inf"))
    with pytest.raises(LossSpike):
        watch.note(31, 3.1)
    negative = SpikeWatch(2.0)
    for step in range(30):
        negative.note(step, 3.0 if step == 20 else -5.0)  # a median below 0 is no measure
    for factor in (1.0, -2.0):
        with pytest.raises(ValueError, match=f"spike_factor={factor} must be more than 1"):
            SpikeWatch(factor)


def test_a_run_that_goes_on_judges_a_jump_by_the_losses_before_it_ended(tmp_path: Path) -> None:
    """As one that never ended would: the third step behind the resumption is too early to know of itself."""
    whole, _ = trained(tmp_path / "whole", {}, total_steps=12, spike_factor=10.0)
    trained(tmp_path / "parts", {}, total_steps=10, spike_factor=10.0)
    with pytest.raises(LossSpike, match=r"the loss of step 13 is .* of the last 12, which is"):
        trained(tmp_path / "parts", {3: 50.0}, resume=True, spike_factor=10.0)
    again, _ = trained(tmp_path / "parts", {}, resume=True, total_steps=12, spike_factor=10.0)
    assert again._spikes.state_dict() == whole._spikes.state_dict()
    for losses in ([1.0, "2"], [1.0, float("nan")], 3.0, [True]):
        with pytest.raises(ValueError, match="the last losses of a checkpoint must be a list of finite numbers"):
            SpikeWatch(2.0).load_state_dict(losses)
