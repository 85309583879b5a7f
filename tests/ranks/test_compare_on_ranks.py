"""The comparison on real ranks: DDP, FSDP2, and shards cut by hand, each against one process; and errors that it
must find.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwright.spec import ParamSpec, even_pieces, set_spec
from shardwright.testing import (
    RankError,
    adamw,
    check_complete,
    compare_models,
    keep_float64,
    loss_of,
    run_ranks,
    train_steps,
    zoo,
)

STEPS = 3


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    return [zoo.inputs(name, batch_size=4, seed=seed) for seed in range(STEPS)]


def my_share(batch: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(world_size)[rank] for key, value in batch.items()}


def data_parallel_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the tokens of all ranks, scaled for gradients that are averaged over ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counted = (batch["labels"][:, 1:] != -100).sum()
    share = my_share(batch, rank, world_size)
    mine = (share["labels"][:, 1:] != -100).sum()
    return loss_of(model(**share)) * mine / counted * world_size


def train_data_parallel(
    rank: int, world_size: int, kind: str, dtype: torch.dtype, forget_weights: bool = False
) -> set[str]:
    name = "llama-tied-causal-lm"
    reference, model = zoo.build(name, dtype=dtype), zoo.build(name, dtype=dtype)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loss_fn: Any = data_parallel_loss
    if forget_weights:
        loss_fn = lambda model, batch: loss_of(model(**my_share(batch, rank, world_size)))  # noqa: E731
    with keep_float64():
        expected = train_steps(reference, adamw(reference), batches(name))
        losses = train_steps(model, adamw(model), batches(name), loss_fn=loss_fn)
    dist.all_reduce(losses)
    return compare_models(reference, model, losses=(expected, losses / world_size)).held


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_data_parallel_training_agrees(kind: str, dtype: torch.dtype) -> None:
    held = run_ranks(train_data_parallel, 2, kind, dtype, debug="INFO" if kind == "ddp" else "DETAIL")
    check_complete(zoo.build("llama-tied-causal-lm"), held)


def test_a_mean_of_means_is_found() -> None:
    """Ranks with different token counts that average their losses: the error that even batches hide."""
    with pytest.raises(RankError, match=r"MismatchError: \d+ of \d+ comparisons differ"):
        run_ranks(train_data_parallel, 2, "ddp", torch.float64, True, debug="INFO")


class SumOverRanks(torch.autograd.Function):
    """y = sum of x over ranks; dx = dy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class SumGradient(torch.autograd.Function):
    """y = x; dx = sum of dy over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class ShardedMlp(nn.Module):
    """A Llama MLP of which this rank holds some columns of gate and up and the same rows of down."""

    def __init__(self, mlp: nn.Module, prefix: str, rank: int, world_size: int, forget_sum: bool) -> None:
        super().__init__()
        self.act_fn, self.forget_sum = mlp.act_fn, forget_sum
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            full = getattr(mlp, name).weight.detach()
            spec = ParamSpec(
                f"{prefix}.{name}.weight", tuple(full.shape), dim, even_pieces(full.shape[dim], world_size)
            )
            weight = nn.Parameter(spec.shard(full, rank))
            set_spec(weight, spec)
            self.register_parameter(name, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.forget_sum else SumGradient.apply(x)
        hidden = self.act_fn(x @ self.gate_proj.T) * (x @ self.up_proj.T)
        return SumOverRanks.apply(hidden @ self.down_proj.T)


def train_sharded(rank: int, world_size: int, forget_sum: bool) -> set[str]:
    name = "llama-causal-lm"
    reference, model = zoo.build(name, intermediate_size=87), zoo.build(name, intermediate_size=87)
    for index, layer in enumerate(model.model.layers):
        layer.mlp = ShardedMlp(layer.mlp, f"model.layers.{index}.mlp", rank, world_size, forget_sum)
    with keep_float64():
        expected = train_steps(reference, adamw(reference), batches(name))
        losses = train_steps(model, adamw(model), batches(name))
    return compare_models(reference, model, coordinate={"tp": rank}, losses=(expected, losses)).held


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_agree_with_one_process(world_size: int) -> None:
    held = run_ranks(train_sharded, world_size, False)
    check_complete(zoo.build("llama-causal-lm", intermediate_size=87), held)


def test_a_forgotten_all_reduce_is_found() -> None:
    with pytest.raises(RankError, match=r"gradient model\.layers\.\d+\.") as info:
        run_ranks(train_sharded, 2, True)
    assert "MismatchError" in str(info.value)
