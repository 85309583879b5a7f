"""A toy model cut into pipeline stages: what travels is nested, ragged and partly without gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.ops.linear import linear

HIDDEN = 5
NUM_LAYERS = 12


def layers_of(stage: int, num_stages: int) -> range:
    """Layers of a stage; 8 stages get 1 or 2 each."""
    return range(stage * NUM_LAYERS // num_stages, (stage + 1) * NUM_LAYERS // num_stages)


class Layer(nn.Module):
    """x + tanh(W2 silu(W1 x)) * scale: weights whose gradients can be postponed, and a scale whose gradient cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 7, dtype=torch.float64)
        self.down = nn.Linear(7, HIDDEN, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        inner = torch.nn.functional.silu(linear(x, self.up.weight, self.up.bias))
        return x + torch.tanh(linear(inner, self.down.weight)) * self.scale * mask[..., None]


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, HIDDEN, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN, 3, dtype=torch.float64)


def make_batch(num_microbatches: int, seed: int = 0) -> list[Tensor]:
    """Token ids of every microbatch [rows, length]; rows and lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (1 + (i + seed) % 3, 2 + i % 4), generator=generator) for i in range(num_microbatches)]


class ToyStage:
    """Stage `stage` of `num_stages` of the model (a `StageProgram`)."""

    def __init__(
        self, model: ToyModel, stage: int, num_stages: int, microbatches: list[Tensor], checkpointing: bool = False
    ) -> None:
        self.model, self.stage, self.num_stages, self.microbatches = model, stage, num_stages, microbatches
        self.checkpointing = checkpointing
        self.tokens = sum(tokens.numel() for tokens in microbatches)
        self.layers = [model.layers[i] for i in layers_of(stage, num_stages)]

    def forward(self, received: Any, microbatch: int) -> Any:
        tokens = self.microbatches[microbatch]
        if self.stage == 0:
            x = self.model.embed(tokens)
            skip, mask = x.mean(-1), (tokens % 4 != 0).double()
        else:
            assert received["none"] is None
            assert received["name"] == f"into stage {self.stage}"
            x, (skip, mask, _) = received["x"], received["others"]
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.checkpointing else layer(x, mask)
        if self.stage == self.num_stages - 1:
            return (self.model.head(x) * skip[..., None]).square().sum() / self.tokens
        # `skip` passes through untouched; the transposed tensor is not contiguous, and nobody uses it, so it gets no
        # gradient.
        others = (skip, mask, x.transpose(0, 1))
        return {"x": x, "others": others, "none": None, "name": f"into stage {self.stage + 1}"}


def reference(microbatches: list[Tensor], num_stages: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and every gradient from one process that runs the microbatches one after the other, all stages at once."""
    model = ToyModel()
    total = 0.0
    for microbatch in range(len(microbatches)):
        received = None
        for stage in range(num_stages):
            received = ToyStage(model, stage, num_stages, microbatches).forward(received, microbatch)
        received.backward()
        total += received.item()
    return total, {name: param.grad for name, param in model.named_parameters()}
