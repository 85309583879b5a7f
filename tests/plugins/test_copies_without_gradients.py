"""Parameters that several pipeline stages hold and that get a gradient on none of them stay as they are, in a step in
which one process gives them none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks

WORDS, WIDTH, LENGTH, SAMPLES = 23, 8, 5, 4
COPIES = {"gauge.weight", "gauge.bias", "project.weight", "project.bias"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * hint)


class Guided(nn.Module):
    """Every layer reads a hint: of a module that runs without autograd, and of one that only batches with images
    reach.
    """

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gauge, self.project = nn.Embedding(WORDS, WIDTH), nn.Linear(1, WIDTH), nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, images: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            hint = self.gauge(input_ids.double().mean(1, keepdim=True) / WORDS)[:, None]
        if images is not None:
            hint = hint + self.project(images)[:, None]
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, hint)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made() -> Guided:
    torch.manual_seed(0)
    return Guided().double()


def batch(seed: int, images: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 1:] = -100
    seen = {"images": torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)} if images else {}
    return {"input_ids": ids, "labels": labels, **seen}


def trained(rank: int, world: int) -> None:
    with keep_float64():
        for stage in (0, 2):
            plugin = HybridParallelPlugin(
                pp_size=2,
                num_microbatches=2,
                precision="fp32",
                zero_stage=stage,
                example_inputs=batch(9, images=True),
                custom_policy="auto",
            )
            plain, model = made(), made()
            booster = Booster(plugin=plugin)
            boosted, optimizer, *_ = booster.boost(model, adamw(model))
            assert {name for name, _ in model.named_parameters()} >= COPIES, "not held by both stages"
            step: Any = adamw(plain)
            for number, images in enumerate((True, False, True)):
                inputs = batch(number, images)
                want = plain(**inputs)["loss"]
                want.backward()
                given = booster.execute_pipeline(iter([inputs]), boosted, None, optimizer)["loss"]
                assert given is None or abs(float(given - want.detach())) < 1e-10
                step.step()
                optimizer.step()
                step.zero_grad()
                optimizer.zero_grad()
                compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False, tolerance=1e-10)


def test_copies_that_get_no_gradient_are_not_decayed() -> None:
    run_ranks(trained, 2)
