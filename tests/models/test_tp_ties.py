"""Plans for models in which one parameter is in several modules: one layout for all of them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.shardformer import (
    ModulePolicyDescription,
    Plan,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
)
from shardwright.shardformer.layer import VocabParallelEmbedding1D, VocabParallelLMHead1D
from shardwright.spec import get_spec
from shardwright.testing import run_ranks


class Translator(nn.Module):
    """Two embeddings and a head, of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(11, 6), nn.Embedding(11, 6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.target.weight = self.head.weight = self.source.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.source(ids)).tanh() + self.target(labels.roll(1))
        return F.cross_entropy(self.head(hidden).view(-1, 11), labels.view(-1))


class Named(Policy):
    def __init__(self, rules: dict[str, Any]) -> None:
        self.given = rules

    def plan(self) -> Plan:
        return Plan(self.given, "Named")


class ByClass(Policy):
    def __init__(self, **layers: Any) -> None:
        self.layers = layers

    def plan(self) -> Plan:
        return Plan({}, "ByClass")

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        children = [
            SubModuleReplacementDescription(name, layer, {"make_vocab_size_divisible_by": 1})
            for name, layer in self.layers.items()
        ]
        return {Translator: ModulePolicyDescription(sub_module_replacement=children)}


def ties(rank: int, world_size: int) -> None:
    former = ShardFormer(ShardConfig(make_vocab_size_divisible_by=1))
    embedding, head = "vocab_embedding", "vocab_head"
    layers = {"source": VocabParallelEmbedding1D, "head": VocabParallelLMHead1D}
    for policy, message in (
        (
            Named({"source": embedding, "head": head}),
            r"source\.weight and target\.weight are one parameter \(tied\), but rule 'source' of Named is for the "
            r"first alone, and Embedding would take this rank's part for the whole; give the second a rule",
        ),
        (Named({"head": head, "target": embedding}), r"target\.weight and source\.weight are one parameter"),
        (Named({"source": embedding, "target": "hidden_embedding", "head": head}), "lay it out differently"),
        (ByClass(**layers), r"source\.weight and target\.weight are one parameter \(tied\), but rule 'source'"),
    ):
        model = Translator()
        with pytest.raises(ValueError, match=message):
            former.shard_model(model, policy)
        assert model.head.weight.shape == (11, 6)
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
    labels = ids.flip(0)
    for policy in (
        Named({"source": embedding, "target": embedding, "head": head}),
        ByClass(**layers, target=VocabParallelEmbedding1D),
    ):
        reference, model = Translator().double(), former.shard_model(Translator().double(), policy)
        losses = reference(ids, labels), model(ids, labels)
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
        for (name, want), param in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                param.grad + 0, get_spec(param).shard(want.grad, rank), rtol=1e-10, atol=1e-10, msg=name
            )


def test_tied_parameters_have_one_layout_or_are_refused() -> None:
    run_ranks(ties, 2)
