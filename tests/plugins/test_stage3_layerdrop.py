"""Stage 3 where every rank leaves out other layers (LayerDrop), as ranks with seeds of their own do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.models.skipped_layers import that_skip
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import keep_float64, run_ranks, zoo

SIZES: dict[str, Any] = {
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 4), ("ffn_dim", 48))},
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("attention_heads", 4),)},
}


def seed(step: int, micro: int, replica: int) -> None:
    torch.manual_seed(100 * step + 10 * micro + replica)


def bart() -> Any:
    transformers = pytest.importorskip("transformers")
    drops = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, max_position_embeddings=32, dropout=0.0, **SIZES, **drops
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config)


def opt() -> Any:
    return zoo.build("opt-causal-lm", layerdrop=0.5, num_hidden_layers=4)


MODELS = {"bart": bart, "opt": opt}


def batch_of(step: int, micro: int, replica: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 61, (2, 6 + 2 * replica), generator=torch.Generator().manual_seed(3 * step + micro))
    return {"input_ids": ids, "labels": ids}


def build(name: str, recompute: bool) -> Any:
    model = MODELS[name]().double().train()
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def train(rank: int, world_size: int, name: str, recompute: bool) -> None:
    """Three steps of two microbatches, an evaluation in the middle of each, against one process that draws for every
    replica what that one draws.
    """
    with keep_float64():
        reference, model = build(name, recompute), build(name, recompute)
        plain = torch.optim.SGD(reference.parameters(), 0.5)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32"))
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for step, micro in itertools.product(range(3), range(2)):
            seed(step, micro, rank)
            loss = model(**batch_of(step, micro, rank)).loss / 2
            model.eval()
            with torch.no_grad():
                model(**batch_of(step, micro, rank))
            model.train()
            booster.backward(loss, optimizer)
            for other in range(world_size):
                seed(step, micro, other)
                expected = reference(**batch_of(step, micro, other)).loss / 2
                (expected / world_size).backward()
                if other == rank:
                    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
            if micro:
                optimizer.step()
                optimizer.zero_grad()
                plain.step()
                plain.zero_grad()
        weights = dict(reference.named_parameters())
        for each, param in model.unwrap().named_parameters():
            torch.testing.assert_close(param.detach(), weights[each].detach(), rtol=1e-10, atol=1e-12, msg=each)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
def test_ranks_may_leave_out_other_layers(name: str, recompute: bool) -> None:
    run_ranks(train, 2, name, recompute)


def losses(stage: int, settings: dict[str, Any]) -> list[float]:
    plugin = HybridParallelPlugin(zero_stage=stage, precision="fp32", **settings)
    booster = Booster(plugin=plugin)
    model = build("bart", recompute=False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model(**batch_of(step, 0, plugin.data_parallel[1])).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compare(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    """This plugin gives replicas draws of their own, which are those of other stages."""
    torch.manual_seed(7)
    expected = losses(2, {name: value for name, value in settings.items() if name != "gather_ahead"})
    torch.manual_seed(7)
    assert losses(3, settings) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ahead", [0, 1, None])
def test_losses_are_those_of_stage_2(ahead: int | None) -> None:
    run_ranks(compare, 2, {"gather_ahead": ahead})


def test_losses_beside_tensor_parallelism_are_those_of_stage_2() -> None:
    run_ranks(compare, 4, {"tp_size": 2})


class Dropping(nn.Module):
    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norm = nn.LayerNorm(2)


def test_only_layers_that_may_be_left_out_are_meant() -> None:
    model = nn.ModuleList([Dropping(0.0), Dropping(0.1)])
    assert list(that_skip(model)) == [model[1]]
    assert not list(that_skip(model[0]))
