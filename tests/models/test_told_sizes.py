"""Layers that return the size of a map beside it, and models that count on it where they read nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, run_ranks
from tests.models.beside_one_process import train_beside

LABELS, SAMPLES = 5, 4


class Merging(nn.Module):
    """[B, H * W, C] -> half the height and width with twice the channels, the map before, and both sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.merge = nn.Linear(width, width), nn.Linear(4 * width, 2 * width)

    def forward(self, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
        (height, width), channels = size, x.shape[-1]
        before = x + F.gelu(self.inner(x))
        parts = before.view(-1, height // 2, 2, width // 2, 2, channels).transpose(2, 3)
        return self.merge(parts.reshape(len(x), -1, 4 * channels)), before, (height, width, height // 2, width // 2)


class Pyramid(nn.Module):
    """Makes a map of what each stage was before it halved it, and reads the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, 4), nn.Linear(32, LABELS)
        self.stages = nn.ModuleList(Merging(4 * 2**number) for number in range(4))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        size = pixel_values.shape[-2], pixel_values.shape[-1]
        x = self.enter(pixel_values.flatten(2).transpose(1, 2))
        maps = []
        for stage in self.stages:
            x, before, sizes = stage(x, size)
            maps.append(before.view(len(x), sizes[0], sizes[1], -1))
            size = sizes[2], sizes[3]
        return {"loss": F.cross_entropy(self.head(maps[-1].mean((1, 2)) + x.mean(1)[:, :32]), labels)}


def batch(seed: int) -> dict[str, Tensor]:
    """Maps of another size for each seed."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(SAMPLES, 3, 16 * seed, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(LABELS, (SAMPLES,), generator=generator)}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Pyramid().double()


def trained(rank: int, world: int) -> None:
    two_chunks: list[dict[str, Any]] = [{"pp_style": style, "num_model_chunks": 2} for style in ("interleaved", "zbv")]
    for style in ({}, *two_chunks):
        plugin = HybridParallelPlugin(
            pp_size=2, num_microbatches=2, precision="fp32", example_inputs=batch(1), custom_policy="auto", **style
        )
        plain, model = made(), made()
        boosted = train_beside(Booster(plugin=plugin), plain, model, batch, (1, 2))
        compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_maps_that_nothing_reads_have_the_size_that_their_stage_returned() -> None:
    run_ranks(trained, 2)
