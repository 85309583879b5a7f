"""Loops that scripts have besides forward, backward, step: two models and two losses, penalties on gradients, clipped
weights.

A loop is written once and run by both sides: on boosted models with the samples of one rank, and by plain torch on
those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks

PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    **{f"zero {stage}": partial(LowLevelZeroPlugin, stage=stage, precision="fp32") for stage in (1, 2, 3)},
    "hybrid 0": partial(HybridParallelPlugin, zero_stage=0, precision="fp32"),
}
Loss = Callable[[int], torch.Tensor]


def net(seed: int, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def x(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * number + rank)).double()


class Side:
    """Whoever runs a loop: `ranks` are those whose samples it sees; the mean over all of them is what is trained on."""

    def __init__(self, ranks: list[int], booster: Booster | None = None) -> None:
        self.ranks = ranks
        self.booster = booster

    def boost(self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> tuple[Any, Any]:
        made = optimizer(model.parameters())
        if self.booster is None:
            return model, made
        boosted, wrapped, *_ = self.booster.boost(model, made)
        return boosted, wrapped

    def mean(self, loss: Loss) -> torch.Tensor:
        return sum(map(loss, self.ranks), torch.zeros((), dtype=torch.float64)) / len(self.ranks)

    def backward(self, loss: torch.Tensor, optimizer: Any, retain_graph: bool = False) -> None:
        if self.booster is None:
            loss.backward(retain_graph=retain_graph)
        else:
            optimizer.backward(loss, retain_graph=retain_graph)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Loops. Each returns the models that it has trained.


def two_forwards_before_two_backwards(side: Side) -> list[Any]:
    model, optim = side.boost(net(0))
    for step in range(3):
        optim.zero_grad()
        losses = [
            side.mean(lambda rank, number=number: model(x(number, rank)).pow(2).mean()) for number in (step, step + 9)
        ]
        for loss in losses:
            side.backward(loss, optim)
        optim.step()
    return [model]


def one_graph_twice(side: Side) -> list[Any]:
    model, optim = side.boost(net(0))
    for step in range(3):
        optim.zero_grad()
        loss = side.mean(lambda rank, step=step: model(x(step, rank)).pow(2).mean())
        side.backward(loss, optim, retain_graph=True)
        side.backward(loss, optim)
        optim.step()
    return [model]


def gan(side: Side, *, clear_after: bool = False, freeze: bool = False, clip: bool = False) -> list[Any]:
    """As the tutorials write it: the generator's loss reaches the discriminator, whose next zero_grad drops what it
    brought.
    """
    generator, optim_g = side.boost(net(0, 3))
    critic, optim_c = side.boost(net(1))
    for step in range(3):
        if clip:
            for param in critic.parameters():
                param.data.clamp_(-0.2, 0.2)
        for param in critic.parameters() if freeze else ():
            param.requires_grad_(True)
        critic.zero_grad()
        side.backward(side.mean(lambda rank, step=step: critic(x(step, rank)).pow(2).mean()), optim_c)
        fakes = {rank: generator(x(step + 5, rank)) for rank in side.ranks}
        side.backward(side.mean(lambda rank, fakes=fakes: (critic(fakes[rank].detach()) - 1).pow(2).mean()), optim_c)
        optim_c.step()
        if clear_after:
            optim_c.zero_grad()
        for param in critic.parameters() if freeze else ():
            param.requires_grad_(False)
        generator.zero_grad()
        side.backward(side.mean(lambda rank, fakes=fakes: critic(fakes[rank]).pow(2).mean()), optim_g)
        optim_g.step()
    return [generator, critic]


def one_loss_for_two_optimizers(side: Side) -> list[Any]:
    encoder, optim_e = side.boost(net(0, 3))
    decoder, optim_d = side.boost(net(1))
    for step in range(3):
        optim_e.zero_grad()
        optim_d.zero_grad()
        side.backward(side.mean(lambda rank, step=step: decoder(encoder(x(step, rank))).pow(2).mean()), optim_e)
        if step == 1:
            side.backward(side.mean(lambda rank, step=step: decoder(x(step + 7, rank)).pow(2).mean()), optim_d)
        optim_e.step()
        optim_d.step()
    return [encoder, decoder]


def gradient_penalty(side: Side) -> list[Any]:
    critic, optim = side.boost(net(1))

    def loss(rank: int, step: int) -> torch.Tensor:
        between = x(step, rank).requires_grad_()
        (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(x(step + 4, rank)).mean() + (grad.norm(2, 1) - 1).pow(2).mean()

    for step in range(3):
        optim.zero_grad()
        side.backward(side.mean(partial(loss, step=step)), optim)
        optim.step()
    return [critic]


def hooks_on_gradients(side: Side) -> list[Any]:
    """Some registered before boost, some after, when the reduction's own hooks are there."""

    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    model = net(0)
    model[0].weight.register_hook(lambda grad: 0.5 * grad)
    model[0].bias.register_post_accumulate_grad_hook(halve)
    model, optim = side.boost(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    for step in range(3):
        optim.zero_grad()
        side.backward(side.mean(lambda rank, step=step: model(x(step, rank)).pow(2).mean()), optim)
        optim.step()
    return [model]


def assigned_weights(side: Side) -> list[Any]:
    model, optim = side.boost(net(0))
    for step in range(3):
        for param in model.parameters():
            param.data = param.data * 0.5
        optim.zero_grad()
        side.backward(side.mean(lambda rank, step=step: model(x(step, rank)).pow(2).mean()), optim)
        optim.step()
        for number, param in enumerate(model.parameters()):
            param.data = torch.full(param.shape, 0.1 * number, dtype=torch.float64) + whole(param.data)
    return [model]


def zeroed_in_place(side: Side) -> list[Any]:
    model, optim = side.boost(net(0))
    for step in range(4):
        optim.zero_grad(set_to_none=False)
        if step != 2:  # a step without a backward: zero gradients, which momentum outlives
            side.backward(side.mean(lambda rank, step=step: model(x(step, rank)).pow(2).mean()), optim)
        optim.step()
    return [model]


SHARDED = ("zero 1", "zero 2", "zero 3", "hybrid 0")
LOOPS: dict[str, tuple[Callable[[Side], list[Any]], tuple[str, ...]]] = {
    "two forwards before two backwards": (two_forwards_before_two_backwards, ("ddp", "fsdp", "zero 1", "zero 2")),
    "one graph twice": (one_graph_twice, ("ddp", "fsdp", "zero 1")),
    "gan": (gan, ("ddp", *SHARDED)),
    "gan that clears gradients after its steps": (partial(gan, clear_after=True), ("zero 1", "zero 2")),
    "gan that freezes": (partial(gan, freeze=True), ("zero 2",)),
    "gan with clipped weights": (partial(gan, clip=True), ("fsdp", "zero 3")),
    "one loss for two optimizers": (one_loss_for_two_optimizers, SHARDED),
    "gradient penalty": (gradient_penalty, ("ddp", "fsdp", "zero 2")),
    "hooks on gradients": (hooks_on_gradients, ("ddp", "zero 1", "zero 2", "hybrid 0")),
    "assigned weights": (assigned_weights, ("fsdp", "zero 1", "zero 3")),
    "gradients zeroed in place": (zeroed_in_place, SHARDED),
}


def compare(models: list[Any], wanted: list[Any], what: str) -> None:
    for model, plain in zip(models, wanted, strict=True):
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = whole(param.detach())
            torch.testing.assert_close(
                got, other.detach(), rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{what}: {name}: {text}"
            )


def loops(rank: int, world: int) -> None:
    for name, (loop, plugins) in LOOPS.items():
        wanted = loop(Side(list(range(world))))
        for plugin in plugins:
            compare(loop(Side([rank], Booster(plugin=PLUGINS[plugin]()))), wanted, f"{name}, {plugin}")
            dist.barrier()


@pytest.mark.timeout(240)
def test_loops_train_as_in_one_process() -> None:
    run_ranks(loops, 2, timeout=200, debug="INFO")  # DistributedDataParallel
