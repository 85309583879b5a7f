"""What modules keep besides tensors, and statistics: right on every stage that reads them, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright import Booster
from shardwright.pipeline.cut.plan import plan_cut
from shardwright.pipeline.settings import PipelineSettings
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from tests.models.beside_one_process import train_beside
from tests.models.kept_values import COUNTED, REFUSED, RIGHT, Net, Statistics
from tests.models.side_doors import batch


def made(net: type[Net]) -> Net:
    torch.manual_seed(0)
    return net().double()


def settings(**others: Any) -> PipelineSettings:
    return PipelineSettings(**{"pp_style": "1f1b", "num_model_chunks": 1, "num_microbatches": 2} | others)


@pytest.mark.parametrize("net", REFUSED, ids=lambda net: net.__name__)
def test_what_no_stage_can_see_is_refused_by_name(net: type[Net]) -> None:
    with pytest.raises(ValueError, match=REFUSED[net]):
        plan_cut(made(net), settings(num_layers_per_stage=[2, 2]), 2, example_inputs=batch(5))


@pytest.mark.parametrize("net", COUNTED, ids=lambda net: net.__name__)
@pytest.mark.parametrize("style", ["interleaved", "zbv"])
def test_a_count_is_one_per_rank(net: type[Net], style: str) -> None:
    with pytest.raises(ValueError, match=r"makes a new steps of the old one: it would change 2 times"):
        plan_cut(made(net), settings(pp_style=style, num_model_chunks=2), 2, example_inputs=batch(5))


def test_where_each_chunk_has_its_own_they_stay() -> None:
    plan_cut(made(Statistics), settings(pp_style="interleaved", num_model_chunks=2), 2, example_inputs=batch(5))


def test_the_dry_run_leaves_the_model_alone() -> None:
    for net in (*REFUSED, *RIGHT):
        model = made(net)
        kinds, before = [type(module) for module in model.modules()], {**vars(model)}
        try:
            plan_cut(model, settings(), 2, example_inputs=batch(5))
        except ValueError:
            assert net in REFUSED
        assert [type(module) for module in model.modules()] == kinds
        assert vars(model) == before


def trained(rank: int, world: int, folder: str) -> None:
    for net in RIGHT:
        plugin = HybridParallelPlugin(
            pp_size=world, precision="fp32", example_inputs=batch(5), custom_policy="auto", num_microbatches=1
        )
        plain = made(net)
        model = copy.deepcopy(plain)
        booster = Booster(plugin=plugin)
        boosted = train_beside(booster, plain, model, batch, (1, 2, 3))
        held = dict(boosted.unwrap().named_buffers())
        for name, buffer in plain.named_buffers():
            if name in held:
                torch.testing.assert_close(held[name], buffer, rtol=1e-10, atol=1e-10)
        if net is Statistics:
            whole_checkpoints(booster, boosted, plain, Path(folder))


def whole_checkpoints(booster: Booster, boosted: nn.Module, plain: Net, folder: Path) -> None:
    """Of statistics those of the rank that has gathered them are saved."""
    booster.save_model(boosted, folder / "whole", shard=False)
    booster.save(folder / "all", boosted)
    if torch.distributed.get_rank() == 0:
        (file,) = (folder / "whole").glob("*.safetensors") if (folder / "whole").is_dir() else [folder / "whole"]
        saved = load_file(file)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(saved[name], buffer, rtol=1e-10, atol=1e-10)


def test_every_stage_sees_what_it_reads(tmp_path: Path) -> None:
    run_ranks(trained, 2, folder=str(tmp_path))
