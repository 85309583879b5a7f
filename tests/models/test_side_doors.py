"""Values that go from one layer to a later one by other ways than what layers return: sent, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, run_ranks
from tests.models.beside_one_process import train_beside
from tests.models.side_doors import REFUSED, RIGHT, SAMPLES, Net, NothingToTrain, SometimesRead, batch


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
            boosted = train_beside(booster, plain, model, batch, (1, 2))
            compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_every_other_way_is_followed() -> None:
    run_ranks(trained, 2, layouts=[{}, {"pp_style": "interleaved", "num_model_chunks": 2}])


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [3, 4])
def test_every_other_way_is_followed_over_more_stages(ranks: int) -> None:
    run_ranks(trained, ranks, layouts=[{}])


def trained_with_and_without(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    """Zeros in place of no gradient would have AdamW decay what nobody reads."""
    scaled = {"scale": torch.linspace(0.5, 2, SAMPLES, dtype=torch.float64)}
    for layout in layouts:
        plugin = HybridParallelPlugin(
            pp_size=world,
            num_microbatches=2,
            precision="fp32",
            example_inputs=batch(5) | scaled,
            custom_policy="auto",
            **layout,
        )
        plain = made(SometimesRead)
        model = copy.deepcopy(plain)
        booster = Booster(plugin=plugin)
        steps: list[Any] = [torch.optim.AdamW(one.parameters(), lr=0.02, weight_decay=0.3) for one in (plain, model)]
        boosted, optimizer, *_ = booster.boost(model, steps[1])
        for seed in range(4):
            inputs = batch(seed) | (scaled if seed % 2 else {})
            plain(**inputs)["loss"].backward()
            booster.execute_pipeline(iter([inputs]), boosted, None, optimizer)
            for each in (steps[0], optimizer):
                each.step()
                each.zero_grad()
        compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_what_a_batch_does_not_read_has_no_gradient() -> None:
    interleaved = {"pp_style": "interleaved", "num_model_chunks": 2}
    run_ranks(trained_with_and_without, 2, layouts=[{}, interleaved, {"enable_metadata_cache": False}])


def trained_without_parameters(rank: int, world: int) -> None:
    """The rank in the middle has none; weights of the others are seen in the losses that follow."""
    plugin = HybridParallelPlugin(
        pp_size=world, num_microbatches=2, precision="fp32", example_inputs=batch(5), custom_policy="auto"
    )
    plain = made(NothingToTrain)
    model = copy.deepcopy(plain)
    booster = Booster(plugin=plugin)
    step: Any = adamw(plain.parameters())
    boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    assert any(True for _ in boosted.parameters()) == (rank != 1)
    for seed in range(3):
        want = plain(**batch(seed))["loss"]
        want.backward()
        loss = booster.execute_pipeline(iter([batch(seed)]), boosted, None, optimizer)["loss"]
        if loss is not None:
            torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)
        for each in (step, optimizer):
            each.step()
            each.zero_grad()


def test_a_rank_may_have_nothing_to_train() -> None:
    run_ranks(trained_without_parameters, 3)
