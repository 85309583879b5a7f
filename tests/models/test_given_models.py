"""`shardwright models --check file.py:function`: a model that nobody has seen, without a policy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.testing.matrix import Subject, pick_axes, run_cells


class Block(nn.Module):
    """Attention whose projections lie side by side in one linear, and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).split(self.width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x2 = self.second(x)
        return x + self.down(F.silu(self.gate(x2)) * self.up(x2))


class Reader(nn.Module):
    """With a table that is also its head, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(96, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return {"logits": logits, "loss": loss}


def reader() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = targets[1, 5:] = -1
    return Reader(), {"ids": ids, "targets": targets}


def test_layouts_are_tried_with_an_inferred_policy() -> None:
    cells = {cell["axis"]: cell for cell in run_cells(Subject.of(reader), pick_axes(["tp2", "pp2", "lazy"]))}
    assert cells["tp2"]["outcome"] == cells["pp2"]["outcome"] == "verified", cells
    assert cells["tp2"]["share"] > 0.9
    assert cells["tp2"]["note"] == "with an inferred policy"
    assert cells["lazy"]["outcome"] == "not applicable"
