"""Resuming at the same layout is bitwise: dropout, shuffled data, loss scale, schedule and masters go on as if
nothing had happened.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from shardwright import Booster
from shardwright.booster import checkpoints
from shardwright.checkpoint.preemption import SaveOnSignal
from shardwright.files import disk
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.testing import RankError, run_ranks, zoo
from shardwright.utils.tensors import local_tensor

NAME = "gpt2-causal-lm"
BEFORE, AFTER = 3, 4
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
# A scale that overflows at first, so that its counters matter.
FP16 = {"precision": "fp16", "initial_scale": 2.0**24, "growth_interval": 2}
PLUGINS: dict[str, tuple[int, Any, dict[str, Any], str | None]] = {
    "no plugin, fp16": (1, None, {}, "fp16"),
    "ddp, bf16": (2, TorchDDPPlugin, {}, "bf16"),
    "fsdp": (2, TorchFSDPPlugin, {}, None),
    "zero 1, fp16": (2, LowLevelZeroPlugin, {"stage": 1, **FP16}, None),
    "zero 2, bf16": (2, LowLevelZeroPlugin, {"stage": 2, "precision": "bf16", "overlap_allgather": True}, None),
    "zero 3, bf16": (2, LowLevelZeroPlugin, {"stage": 3, "precision": "bf16"}, None),
    "tp, bf16": (2, HybridParallelPlugin, {"tp_size": 2, "precision": "bf16"}, None),
    "tp, pp, fp8 by delayed scales": (
        4,
        HybridParallelPlugin,
        {
            "tp_size": 2,
            "pp_size": 2,
            "num_microbatches": 2,
            "precision": "fp8",
            "fp8_options": {"scaling": "delayed", "amax_history": 2, "emulate": True},
        },
        None,
    ),
    "pp, zero 1, fp16": (4, HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1, **FP16}, None),
}


class Texts(Dataset):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 101, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Job:
    """Everything that a run consists of, seeded by `seed`."""

    def __init__(self, kind: str, seed: int) -> None:
        _, plugin, settings, mixed = PLUGINS[kind]
        self.booster = Booster(plugin=plugin(**settings) if plugin is not None else None, mixed_precision=mixed)
        model = zoo.build(NAME, dtype=torch.float32, seed=seed, **DROPOUT).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.lrs: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer, lr_scheduler=self.lrs)
        if self.booster.plugin is not None:
            self.data: Any = self.booster.plugin.prepare_dataloader(Texts(), batch_size=2, shuffle=True, seed=5)
        else:
            self.data = build_dataloader(Texts(), 2, num_replicas=1, rank=0, shuffle=True, seed=5)
        self.batches = self.forever()
        rank = int(os.environ.get("RANK", 0))
        for seed_it in (random.seed, numpy.random.seed, torch.manual_seed):
            # ranks of a tensor-parallel group share theirs
            seed_it(1000 * seed + rank // (2 if kind.startswith("tp") else 1))

    def forever(self) -> Any:
        while True:
            yield from self.data

    def train(self, steps: int) -> list[Any]:
        seen: list[Any] = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = next(self.batches)
            if isinstance(self.booster.plugin, HybridParallelPlugin):
                result = self.booster.execute_pipeline(
                    iter([batch]), self.model, lambda out, _: out.loss, self.optimizer
                )
                loss = result["loss"]
            else:
                loss = self.model(**batch).loss
                self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.lrs.step()
            scaler = getattr(self.optimizer, "scaler", None)
            scale = None if scaler is None else float(scaler.scale)
            seen.append(
                (
                    None if loss is None else float(loss),
                    self.lrs.get_last_lr(),
                    scale,
                    random.random(),
                    numpy.random.rand(),
                )
            )
        return seen

    def everything(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lrs,
            "dataloader": self.data,
        }

    def weights(self) -> list[torch.Tensor]:
        return [local_tensor(tensor).detach().clone() for tensor in self.model.unwrap().state_dict().values()]


def bitwise(rank: int, world: int, kind: str, path: Path, use_async: bool) -> None:
    job = Job(kind, seed=1)
    job.train(BEFORE)
    job.booster.save(path / "last", **job.everything(), step=BEFORE, use_async=use_async)
    expected = job.train(AFTER)
    job.booster.wait()
    resumed = Job(kind, seed=2)
    resumed.train(1)  # whatever it did before is forgotten
    resumed = Job(kind, seed=3)
    assert resumed.booster.load(path, **resumed.everything())["step"] == BEFORE
    assert resumed.train(AFTER) == expected
    for mine, theirs in zip(resumed.weights(), job.weights(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", list(PLUGINS))
def test_the_same_layout_goes_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    use_async = kind in ("zero 1, fp16", "pp, zero 1, fp16", "fsdp")
    run_ranks(
        bitwise, PLUGINS[kind][0], kind, tmp_path, use_async, debug="INFO" if kind.startswith("ddp") else "DETAIL"
    )


def parts(rank: int, world: int, path: Path) -> None:
    """The separate methods do what `save` does in one."""
    job = Job("zero 1, fp16", seed=1)
    job.train(BEFORE)
    job.booster.save_model(job.model, path / "model", shard=True, size_per_shard=0.05)
    job.booster.save_optimizer(job.optimizer, path / "optimizer", shard=True, size_per_shard=0.05)
    job.booster.save_lr_scheduler(job.lrs, path / "lrs")
    masters = {shard.name: shard.master.clone() for shard in job.optimizer.shards()}
    other = Job("zero 1, fp16", seed=2)
    other.booster.load_model(other.model, path / "model")
    for shard in other.optimizer.shards():  # from half-precision weights: that is all the directory has
        assert torch.equal(shard.master, masters[shard.name].half().float())
    other.booster.load_optimizer(other.optimizer, path / "optimizer")
    other.booster.load_lr_scheduler(other.lrs, path / "lrs")
    assert other.lrs.state_dict() == job.lrs.state_dict()
    for shard in other.optimizer.shards():
        assert torch.equal(shard.master, masters[shard.name])
    for mine, theirs in zip(other.weights(), job.weights(), strict=True):
        assert torch.equal(mine, theirs)
    assert len(list((path / "optimizer").glob("rank-00000-*.safetensors"))) > 1


def test_the_parts_one_by_one(tmp_path: Path) -> None:
    run_ranks(parts, 2, tmp_path)


def dies(rank: int, world: int, path: Path) -> None:
    job = Job("zero 1, fp16", seed=1)
    job.booster.save(path / "step-0", model=job.model, optimizer=job.optimizer, step=0)
    job.train(1)

    def probe(operation: str, file: Path) -> None:
        if rank == 1 and operation == "fsync":
            os.kill(os.getpid(), signal.SIGKILL)

    disk.set_probe(probe)
    job.booster.save(path / "step-1", model=job.model, optimizer=job.optimizer, step=1)


def resumes(rank: int, world: int, path: Path) -> dict[str, Any]:
    job = Job("zero 1, fp16", seed=2)
    return job.booster.load(path, model=job.model, optimizer=job.optimizer)


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_rank_that_dies_in_the_middle_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(dies, 2, tmp_path)
    for state in run_ranks(resumes, 2, tmp_path):
        assert state["step"] == 0


def fails(rank: int, world: int, path: Path) -> str:
    job = Job("zero 1, fp16", seed=1)

    def probe(operation: str, file: Path) -> None:
        if rank == 1 and operation == "half-way write":
            raise OSError(28, "No space left on device")

    disk.set_probe(probe)
    try:
        job.booster.save(path / "step-1", model=job.model, optimizer=job.optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_all_ranks_hear_of_one_rank_s_full_disk(tmp_path: Path) -> None:
    first, second = run_ranks(fails, 2, tmp_path)
    assert first.startswith("CheckpointError: saving")
    assert "failed on rank 1: OSError" in first
    assert second == "OSError: [Errno 28] No space left on device"
    assert list(tmp_path.glob("*step*")) == []


def shares(rank: int, world: int, path: Path, before: int | None) -> list[int]:
    """The samples that a rank sees after resuming; `before`: batches to take and save first."""
    data = build_dataloader(list(range(26)), 2, num_replicas=world, rank=rank, shuffle=True, seed=3)
    booster = Booster(plugin=TorchDDPPlugin())
    model = booster.boost(torch.nn.Linear(1, 1))[0]
    if before is not None:
        seen = [next_batch.tolist() for _, next_batch in zip(range(before), data, strict=False)]
        booster.save(path, model=model, dataloader=data)
        return [sample for taken in seen for sample in taken]
    booster.load(path, model=model, dataloader=data)
    return [sample for taken in data for sample in taken.tolist()]


def test_data_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    before = run_ranks(shares, 2, tmp_path / "run", 4, debug="INFO")
    after = run_ranks(shares, 4, tmp_path / "run", None, debug="INFO")
    first, second = [s for rank in before for s in rank], [s for rank in after for s in rank]
    assert len(first) == 16
    assert set(first) | set(second) == set(range(26))
    assert len(set(first) & set(second)) <= 2  # 26 samples are filled up to whole rounds of 4 ranks


def own_shares(rank: int, world: int, path: Path, before: int | None) -> list[list[int]]:
    """As `shares`, of a loader written for one process: batches of 6 / world samples, so that a step of all ranks
    takes 6.
    """
    loader = torch.utils.data.DataLoader(list(range(36)), batch_size=6 // world, shuffle=True)  # type: ignore[arg-type]
    booster = Booster(plugin=TorchDDPPlugin())
    torch.manual_seed(rank)  # the ranks agree on an order all the same
    model, _, _, data, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
    if before is not None:
        batches = iter(data)  # type: ignore[call-overload]
        seen = [next(batches).tolist() for _ in range(before)]
        booster.save(path, model=model, dataloader=data)
        return seen + [batch.tolist() for batch in batches]
    booster.load(path, model=model, dataloader=data)
    assert len(data) == 4  # type: ignore[arg-type]
    return [batch.tolist() for batch in data]  # type: ignore[union-attr]


def test_a_loader_of_the_user_s_own_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = run_ranks(own_shares, 2, tmp_path / "run", 2, debug="INFO")
    for ranks in (3, 1):
        rest = run_ranks(own_shares, ranks, tmp_path / "run", None, debug="INFO")
        for step in range(4):
            expected = [sample for part in whole for sample in part[2 + step]]
            assert [sample for part in rest for sample in part[step]] == expected


def preempted(rank: int, world: int) -> list[bool]:
    answers = []
    with SaveOnSignal() as signalled:
        for step in range(4):
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            answers.append(signalled.anywhere())
    assert signal.getsignal(signal.SIGTERM) != signalled._note
    return answers


def test_a_signal_on_one_rank_reaches_all_at_the_same_step() -> None:
    assert run_ranks(preempted, 2) == [[False, False, True, True]] * 2


def save_amid_a_step(rank: int, world: int, settings: dict[str, Any], path: Path) -> list[str]:
    """What this rank says of four saves: before and behind a step, and twice between two calls of the next."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **settings))
    model = zoo.build(NAME, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    first, told = 2 * booster.plugin.data_parallel[1], list[str]()  # type: ignore[union-attr]
    ids = torch.stack([Texts()[first + row]["input_ids"] for row in range(2)])

    def call() -> None:
        batch = {"input_ids": ids, "labels": ids}
        booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)

    def save(step: int) -> None:
        booster.save(path / f"step-{step}", model=model, optimizer=optimizer, step=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(checkpoints.get_dist_logger()), "warning", lambda _, words, *rest, **more: told.append(words)
        )
        save(0)
        call()
        optimizer.step()
        save(1)  # gradients are there, and were used
        optimizer.zero_grad()
        save(2)
        assert not told
        for step in (3, 4):
            with booster.no_sync(model, optimizer):
                call()
            save(step)
    return told


@pytest.mark.parametrize(
    ("settings", "speaks"), [({"zero_stage": 2}, 0), ({"pp_size": 2, "num_microbatches": 2}, 1)], ids=["zero2", "pp2"]
)
def test_a_save_between_calls_of_a_step_is_warned_of(settings: dict[str, Any], speaks: int, tmp_path: Path) -> None:
    told = run_ranks(save_amid_a_step, 2, settings, tmp_path)
    assert not told[1 - speaks]
    (words,) = told[speaks]
    assert "step-3 in the middle of a step" in words
    assert "Save behind optimizer.step()" in words
