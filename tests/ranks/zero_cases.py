"""A model with every trap in it, and its training in one process, for the tests of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SAMPLES = 8  # in the global batch of one microbatch; divides by 2 and 4 ranks


class Model(nn.Module):
    """Odd sizes, a frozen weight, a tied one, one never used, one used on even samples' microbatches only."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(19, 13)
        self.first = nn.Linear(13, 37)
        self.norm = nn.LayerNorm(37)
        self.frozen = nn.Linear(37, 37)
        self.sometimes = nn.Linear(37, 37, bias=False)
        self.never = nn.Linear(5, 3)
        self.second = nn.Linear(37, 13)
        self.head = nn.Linear(13, 19, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, with_sometimes: bool = True) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embed(tokens))))
        hidden = hidden + torch.tanh(self.frozen(hidden))
        if with_sometimes:
            hidden = hidden + self.sometimes(hidden)
        return self.head(torch.tanh(self.second(hidden)) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decay and no-decay groups with different rates; the frozen weight is in one of them, as scripts do it."""
    flat = [param for name, param in model.named_parameters() if param.ndim < 2]
    wide = [param for name, param in model.named_parameters() if param.ndim >= 2]
    return [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(model), lr=1e-1, momentum=0.9, nesterov=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups_of(model), lr=1e-2)


@dataclass(frozen=True)
class Plan:
    """How a run trains."""

    dtype: torch.dtype = torch.float32
    max_norm: float = 0.0
    accumulation: int = 1
    steps: int = 5
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    sometimes: bool = False  # whether `Model.sometimes` is left out of some steps


def batch(step: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 19, (SAMPLES, 6), generator=torch.Generator().manual_seed(1000 * step + micro))


def loss_of(model: nn.Module, tokens: torch.Tensor, with_sometimes: bool = True) -> torch.Tensor:
    logits = model(tokens[:, :-1], with_sometimes)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten()
    )


def uses(plan: Plan, step: int) -> bool:
    return not plan.sometimes or step % 2 == 1


@dataclass
class Trace:
    losses: list[float]
    grads: list[dict[str, torch.Tensor]]
    norms: list[float]
    weights: list[dict[str, torch.Tensor]]


def reference(plan: Plan) -> Trace:
    """One process, the global batch, plain torch; the rate halves after two steps."""
    model = Model(plan.dtype)
    optim = plan.optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    trace = Trace([], [], [], [])
    for step in range(plan.steps):
        optim.zero_grad()
        total = 0.0
        for micro in range(plan.accumulation):
            loss = loss_of(model, batch(step, micro), uses(plan, step)) / plan.accumulation
            loss.backward()
            total += loss.item()
        params = [param for param in model.parameters() if param.grad is not None]
        trace.grads.append(
            {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        )
        norm = nn.utils.get_total_norm([param.grad for param in params])
        trace.norms.append(norm.item())
        if plan.max_norm:
            nn.utils.clip_grad_norm_(params, plan.max_norm)
        optim.step()
        schedule.step()
        trace.losses.append(total)
        trace.weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return trace
