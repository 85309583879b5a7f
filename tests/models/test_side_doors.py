"""Values that go from one layer to a later one by other ways than what layers return: sent, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, run_ranks
from tests.models.side_doors import REFUSED, RIGHT, Net, batch


def made(net: type[Net]) -> Net:
    torch.manual_seed(0)
    return net().double()


def refused(rank: int, world: int) -> None:
    for net, words in REFUSED.items():
        plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=2,
            num_microbatches=2,
            precision="fp32",
            example_inputs=batch(5),
            custom_policy="auto",
            num_layers_per_stage=[2, 2],
        )
        model = made(net)
        with pytest.raises(ValueError, match=words):
            Booster(plugin=plugin).boost(model, adamw(model.parameters()))


def test_what_no_stage_can_see_is_refused_by_name() -> None:
    run_ranks(refused, 2)


def trained(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    for net in RIGHT:
        for layout in layouts:
            plugin = HybridParallelPlugin(
                pp_size=world,
                precision="fp32",
                example_inputs=batch(5),
                custom_policy="auto",
                num_microbatches=2,
                **layout,
            )
            plain = made(net)
            model = copy.deepcopy(plain)
            booster = Booster(plugin=plugin)
            boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
            step: Any = adamw(plain.parameters())
            for seed in (1, 2):
                want = plain(**batch(seed))["loss"]
                want.backward()
                given = booster.execute_pipeline(iter([batch(seed)]), boosted, None, optimizer, return_loss=True)
                if given["loss"] is not None:
                    torch.testing.assert_close(given["loss"], want, rtol=1e-10, atol=1e-10)
                compare_models(
                    plain, boosted, coordinate=plugin.mesh.coordinate, gradients=optimizer.gradients(), weights=False
                )
                step.step()
                optimizer.step()
                step.zero_grad()
                optimizer.zero_grad()
            compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_every_other_way_is_followed() -> None:
    run_ranks(trained, 2, layouts=[{}, {"pp_style": "interleaved", "num_model_chunks": 2}])


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [3, 4])
def test_every_other_way_is_followed_over_more_stages(ranks: int) -> None:
    run_ranks(trained, ranks, layouts=[{}])
