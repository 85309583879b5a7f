"""A few training steps of a plain model: the reference side of a comparison, and often the parallel side too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..models.example_inputs import loss_of
from .inputs import Batch


def train_steps(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Batch],
    *,
    loss_fn: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
    backward: Callable[[torch.Tensor], None] | None = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """One optimizer step per batch; returns the losses [steps].

    The gradients of the last step stay in place, so that `compare_models` sees them next to the updated weights.
    Gradients are reset to None before each step: a parameter that the last batch does not reach has none.

    loss_fn     computes the loss from model and batch; by default `loss_of(model(**batch))`
    backward    instead of `loss.backward()`, for example `lambda loss: booster.backward(loss, optimizer)`
    max_norm    clips the gradient norm before each step
    """
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, batch) if loss_fn is not None else loss_of(model(**batch))
        if backward is not None:
            backward(loss)
        else:
            loss.backward()
        if max_norm is not None:
            clip_gradients(model, optimizer, max_norm)
        optimizer.step()
        losses.append(loss.detach())
    if not losses:
        raise ValueError("batches is empty: there is nothing to train on")
    return torch.stack(losses)


def clip_gradients(model: nn.Module, optimizer: Any, max_norm: float) -> None:
    """By the optimizer wrapper where there is one: it knows which gradients are shards."""
    if hasattr(optimizer, "clip_grad_by_norm"):
        optimizer.clip_grad_by_norm(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def adamw(trained: nn.Module | Iterable[nn.Parameter], lr: float = 1e-2) -> torch.optim.AdamW:
    """AdamW for comparisons, of a model or of some of its parameters.

    Its epsilon is large on purpose: with the usual 1e-8, a gradient element that is zero but for rounding moves its
    weight by the full learning rate in a random direction, and the comparison fails without an error.
    """
    parameters = trained.parameters() if isinstance(trained, nn.Module) else trained
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-3, weight_decay=0.1)
