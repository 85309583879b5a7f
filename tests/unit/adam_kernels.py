"""Kernels of Adam's step against torch's own optimizers, stepping side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.kernels.adam import Kernel, Piece, Rule

LENGTHS = (1, 255, 2048, 5003)
GROUPS: list[dict[str, Any]] = [
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"lr": 3e-3, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.05, "maximize": True},
    {"lr": 1e-3, "betas": (0.0, 0.9), "eps": 1e-8, "weight_decay": 0.0},
    {
        "lr": torch.tensor(2e-3),
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "decoupled_weight_decay": True,
        "weight_decay": 0.01,
    },
]


def step_beside_torch(
    kernel: Kernel,
    grad_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    skipped: Sequence[int] = (),
    device: str = "cpu",
    steps: int = 6,
    rounds: bool = True,
) -> None:
    """Losses of rounding apart, weights and moments are those of torch's optimizers after some steps, at a rate that
    moves, of which the `skipped` ones are not taken. Weights are those rounded as torch does; not `rounds`: or the ones
    beside.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    values = [[draw(length) for length in LENGTHS] for _ in GROUPS]
    plain = [[nn.Parameter(value.clone()) for value in group] for group in values]
    optim = torch.optim.Adam([{**group, "params": params} for group, params in zip(GROUPS, plain, strict=True)])
    pieces = [[_piece(value, weight_dtype, grad_dtype, device) for value in group] for group in values]
    for number in range(steps):
        factor, skips = 0.37 / (1 + number), number in skipped
        for (params, mine), group in zip(zip(plain, pieces, strict=True), optim.param_groups, strict=True):
            for param, piece in zip(params, mine, strict=True):
                grad = draw(param.numel()).to(grad_dtype)
                param.grad = grad.double() * torch.tensor(factor).double()
                piece.grad.copy_(grad)
                if skips:
                    piece.grad[-1] = float("inf")
            group["lr"] = group["lr"] * 0.9 if isinstance(group["lr"], float) else group["lr"] + 1e-4
        for place, (mine, group) in enumerate(zip(pieces, optim.param_groups, strict=True)):
            skip = torch.tensor(float(skips), device=device) if skipped else None
            with torch.no_grad():
                kernel(place, mine, Rule.of(group), torch.tensor(factor, device=device), skip)
        if not skips:
            optim.step()
    for param, piece in zip(itertools.chain(*plain), itertools.chain(*pieces), strict=True):
        state = optim.state[param]
        assert float(piece.step) == float(state["step"]) == steps - len(skipped)
        found, expected = [piece.master, piece.exp_avg, piece.exp_avg_sq], [param.detach(), *list(state.values())[1:]]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=2e-6, atol=2e-7)
        if piece.weight is not None:
            expected_weight, close = piece.master.to(piece.weight.dtype), 0.0 if rounds else 2**-7
            torch.testing.assert_close(piece.weight, expected_weight, rtol=close, atol=0.0)


def _piece(value: Tensor, weight: torch.dtype | None, grad: torch.dtype, device: str) -> Piece:
    # somewhere within a larger buffer, as segments are
    room = torch.zeros(4, 256 + len(value), dtype=torch.float32, device=device)
    master, exp_avg, exp_avg_sq = (room[row, 256:] for row in range(3))
    master.copy_(value)
    step = torch.zeros((), dtype=torch.float32, device=device)
    written = None if weight is None else master.to(weight)
    return Piece(master, torch.zeros(len(value), dtype=grad, device=device), exp_avg, exp_avg_sq, step, written)
