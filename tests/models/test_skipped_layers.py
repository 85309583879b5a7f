"""Models that leave out whole layers at random (LayerDrop), the last one among them, without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import keep_float64, run_ranks, zoo

NAME = "opt-causal-lm"


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Of 4 samples, with fewer labels in the later ones."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 61, (4, 9), generator=generator)
    labels = ids.clone()
    for number in range(4):
        labels[number, 8 - 2 * number :] = -100
    return {"input_ids": ids, "labels": labels}


def train(rank: int, world_size: int, microbatches: int) -> None:
    """Steps of plain SGD with a large rate, so that the weights behind each are what the gradients were."""
    model: Any
    optimizer: Any
    reference, model = (zoo.build(NAME, layerdrop=1.0) for _ in range(2))
    plugin = HybridParallelPlugin(precision="fp32", num_microbatches=microbatches)
    with keep_float64():
        model, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), 0.5))
        plain = torch.optim.SGD(reference.parameters(), 0.5)
        for step in range(2):
            whole = batch_of(step)
            own = {name: value.chunk(world_size)[rank] for name, value in whole.items()}
            result = plugin.execute_pipeline(
                iter([own]), model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
            )
            expected = reference(**whole).loss
            expected.backward()
            torch.testing.assert_close(result["loss"].double(), expected, rtol=1e-10, atol=0)
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
            plain.zero_grad()
            weights = dict(reference.named_parameters())
            for name, param in model.unwrap().named_parameters():
                torch.testing.assert_close(param, weights[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("world", "microbatches"), [(1, 2), (2, 1), (2, 2)])
def test_a_loss_is_that_of_the_batch_where_the_last_layer_is_left_out(world: int, microbatches: int) -> None:
    run_ranks(train, world, microbatches)
