"""DDP and FSDP2 through the booster against one process: loss, every gradient, every updated weight."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.plugins import TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import keep_float64, run_ranks, zoo
from shardwright.utils.tensors import local_tensor

STEPS, ACCUMULATE, PER_RANK = 3, 2, 2


def batches(step: int, micro: int, world_size: int) -> dict[str, torch.Tensor]:
    """The whole batch of one micro step; rank r takes rows [r * PER_RANK, (r + 1) * PER_RANK)."""
    return zoo.inputs("llama-causal-lm", batch_size=PER_RANK * world_size, seed=100 * step + micro)


def rows(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: tensor[rank * PER_RANK : (rank + 1) * PER_RANK] for name, tensor in batch.items()}


def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zoo.build("llama-causal-lm", dtype=dtype).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


@cache
@keep_float64()
def reference(
    dtype: torch.dtype, world_size: int, max_norm: float
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain torch in one process: the mean over ranks of each rank's loss is what data parallelism optimises."""
    model, optimizer = build(dtype)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATE):
            whole = batches(step, micro, world_size)
            loss = sum(model(**rows(whole, rank)).loss for rank in range(world_size)) / world_size
            (loss / ACCUMULATE).backward()
            losses.append(float(loss.detach()))
        gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return losses, gradients, {name: param.detach().clone() for name, param in model.named_parameters()}


@keep_float64()
def train(
    rank: int, world_size: int, plugin_name: str, settings: dict[str, Any], dtype: torch.dtype, max_norm: float
) -> Any:
    plugin = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}[plugin_name](**settings)
    booster = Booster(plugin=plugin)
    model, optimizer = build(dtype)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATE):
            last = micro == ACCUMULATE - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                loss = model(**rows(batches(step, micro, world_size), rank)).loss
                booster.backward(loss / ACCUMULATE, optimizer)
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(float(mean) / world_size)
        gradients = {name: _full(param.grad).clone() for name, param in model.unwrap().named_parameters()}
        optimizer.clip_grad_by_norm(max_norm)
        optimizer.step()
        schedule.step()
    return losses, gradients, {name: _full(param).detach().clone() for name, param in model.unwrap().named_parameters()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


PLUGINS = [
    ("ddp", {}),
    ("ddp", {"gradient_as_bucket_view": True, "static_graph": False, "bucket_cap_mb": 1}),
    ("fsdp", {}),
    ("fsdp", {"reshard_after_forward": False, "activation_checkpointing": True}),
    ("fsdp", {"cpu_offload": True}),
]


CASES = [(plugin, world_size, torch.float64, 1e-10) for plugin in PLUGINS for world_size in (2, 4)]
CASES += [(plugin, 2, torch.float32, 1e-5) for plugin in (PLUGINS[0], PLUGINS[2])]


@pytest.mark.parametrize(
    ("plugin", "world_size", "dtype", "tolerance"),
    CASES,
    ids=[f"{p[0]}-{'-'.join(p[1]) or 'default'}-{w}-{d}" for p, w, d, _ in CASES],
)
def test_matches_one_process(
    plugin: tuple[str, dict[str, Any]], world_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    name, settings = plugin
    losses, gradients, weights = reference(dtype, world_size, max_norm=0.5)
    for result in run_ranks(train, world_size, name, settings, dtype, 0.5):
        torch.testing.assert_close(result[0], losses, rtol=tolerance, atol=tolerance)
        for mine, expected in ((result[1], gradients), (result[2], weights)):
            assert mine.keys() == expected.keys()
            for key in expected:
                torch.testing.assert_close(
                    mine[key], expected[key], rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
                )


def test_hybrid_sharding_matches_one_process() -> None:
    losses, _, weights = reference(torch.float64, 4, max_norm=0.5)
    for result in run_ranks(train, 4, "fsdp", {"shard_size": 2}, torch.float64, 0.5):
        torch.testing.assert_close(result[0], losses, rtol=1e-10, atol=1e-10)
        for key in weights:
            torch.testing.assert_close(result[2][key], weights[key], rtol=1e-10, atol=1e-10)


def given_up(rank: int, world_size: int, plugin_name: str, precision: str | None, clears: str) -> list[torch.Tensor]:
    """Gradients of a step whose first call, under `no_sync`, made nan and was cleared."""
    settings = {} if precision is None else {"mixed_precision": precision}
    booster = Booster(plugin={"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}[plugin_name](**settings))
    model, optimizer, *_ = booster.boost(*build(torch.float32))
    if clears:
        with booster.no_sync(model, optimizer):
            booster.backward(model(**rows(batches(0, 0, world_size), rank)).loss * float("nan"), optimizer)
        {"model": model, "optimizer": optimizer}[clears].zero_grad()
    booster.backward(model(**rows(batches(0, 1, world_size), rank)).loss, optimizer)
    return [_full(param.grad).clone() for param in model.unwrap().parameters()]


@pytest.mark.parametrize(
    ("plugin", "precision", "clears"),
    [("ddp", None, "optimizer"), ("fsdp", None, "optimizer"), ("fsdp", "bf16", "optimizer"), ("fsdp", None, "model")],
)
def test_a_step_that_is_given_up_leaves_nothing(plugin: str, precision: str | None, clears: str) -> None:
    """FSDP2 keeps gradients that are not reduced yet out of the optimizer's sight, in bf16 in another place."""
    cleared, never = (run_ranks(given_up, 2, plugin, precision, how, debug="INFO")[0] for how in (clears, ""))
    assert all(torch.equal(found, expected) for found, expected in zip(cleared, never, strict=True))


def mixed(rank: int, world_size: int, plugin_name: str, precision: str, poison: bool) -> dict[str, Any]:
    plugin = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin, "none": lambda: None}[plugin_name]()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    model, optimizer = build(torch.float32)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**rows(batches(step, 0, world_size), rank)).loss
        booster.backward(loss, optimizer)
        if poison and step == 1 and rank == 1:
            grad = local_tensor(next(param.grad for param in model.parameters() if local_tensor(param.grad).numel()))
            grad.view(-1)[0] = float("inf")
        before = [local_tensor(param).detach().clone() for param in model.parameters()]
        optimizer.step()
        moved = any(
            not torch.equal(old, local_tensor(param)) for old, param in zip(before, model.parameters(), strict=True)
        )
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append((float(mean) / world_size, moved))
    return {"losses": losses, "scale": float(optimizer.scaler.scale) if precision == "fp16" else None}


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_tracks_fp32(plugin: str, precision: str) -> None:
    model, optimizer = build(torch.float32)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = batches(step, 0, 2)
        loss = sum(model(**rows(whole, rank)).loss for rank in range(2)) / 2
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for result in run_ranks(mixed, 2, plugin, precision, False):
        assert all(moved for _, moved in result["losses"])
        for (loss, _), wanted in zip(result["losses"], expected, strict=True):
            assert abs(loss - wanted) < 0.02 * abs(wanted), (loss, wanted)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(plugin: str) -> None:
    for result in run_ranks(mixed, 2, plugin, "fp16", True):
        assert [moved for _, moved in result["losses"]] == [True, False, True]
        assert result["scale"] == 2.0**15


def _hsdp_in_two_jobs(rank: int, world_size: int, store: str) -> list[torch.Tensor]:
    """The weights after a step of each job."""
    weights = []
    for job in range(2):
        if job:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        boosted, optimizer, *_ = Booster(plugin=TorchFSDPPlugin(shard_size=2)).boost(
            model, torch.optim.AdamW(model.parameters())
        )
        optimizer.backward(boosted(torch.ones(2, 4)).sum())
        optimizer.step()
        weights.append(boosted.unwrap().weight.full_tensor())
    return weights


def test_hsdp_in_a_second_job_of_the_same_processes(tmp_path: Path) -> None:
    for first, second in run_ranks(_hsdp_in_two_jobs, 4, str(tmp_path / "store"), debug="OFF"):
        assert torch.equal(first, second)
