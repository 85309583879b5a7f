"""Mistakes with ShardFormer alone, and in policies of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.shardformer import Plan, Policy, ShardConfig, ShardFormer
from shardwright.testing import zoo

from .model import directory
from .table import mistake, refused

SETTINGS = {"dtype": torch.float64, "num_hidden_layers": 1}


def sharded(name: str = "llama-causal-lm") -> tuple[nn.Module, Any]:
    """The plain model, and the same over all ranks."""
    former = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8))
    return zoo.build(name, **SETTINGS), former.shard_model(zoo.build(name, **SETTINGS))


@mistake(
    symptom="`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` on a model that `ShardFormer` has sharded",
    gets="the norm of the whole model on every rank, and its gradients scaled alike",
    fix="nothing to do; `sync_shared_gradients` is not needed either",
)
def clipping_shards(rank: int, world: int) -> None:
    plain, model = sharded("qwen3-causal-lm")
    norms = []
    for each in (plain, model):
        each(**zoo.inputs(plain)).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1))
    torch.testing.assert_close(norms[1], norms[0])
    assert torch.allclose(model.model.norm.weight.grad, plain.model.norm.weight.grad)


@mistake(
    symptom="`torch.optim.Adafactor`, `Muon` or another optimizer that looks at whole parameters, after "
    "`ShardFormer.optimize`",
    gets="refused in its first step: a rank holds a part of the parameters, so its updates would not be those of one "
    "process",
    fix="an element-wise optimizer such as AdamW; or `optimizer.elementwise = True` if it is one",
)
def whole_matrices(rank: int, world: int) -> None:
    plain, model = sharded()
    model(**zoo.inputs(plain)).loss.backward()
    optimizer = torch.optim.Adafactor(model.parameters())
    if world == 1:
        optimizer.step()
        return
    with refused("Adafactor looks at whole parameters", "AdamW"):
        optimizer.step()


@mistake(
    symptom="`model.save_pretrained(path)` or `model.resize_token_embeddings(n)` on a model that `ShardFormer` has "
    "sharded",
    gets="the files of the whole model, if all ranks call it; resizing is refused, since every rank holds its rows of "
    "the vocabulary",
    fix="resize before `ShardFormer.optimize`",
)
def files_of_shards(rank: int, world: int) -> None:
    plain, model = sharded()
    path = directory()
    model.save_pretrained(path)
    loaded = type(plain).from_pretrained(path, dtype=torch.float64)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in plain.state_dict().items())
    if world > 1:
        with refused("resize_token_embeddings.* of a sharded model", "before ShardFormer.optimize"):
            model.resize_token_embeddings(120)


@mistake(
    symptom="`torch.manual_seed(seed + rank)` before the model is built, then `ShardFormer.optimize`",
    gets="refused with the first weight that differs: each rank would keep its part of another model",
    fix="seed all ranks alike until the model is built",
)
def a_seed_per_rank(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = type(zoo.build("llama-causal-lm", **SETTINGS))(zoo.build("llama-causal-lm", **SETTINGS).config)
    torch.manual_seed(0)
    if world > 1:
        with refused("have different weights", "Seed all ranks alike"):
            ShardFormer(ShardConfig()).shard_model(model)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Rules(Policy):
    def __init__(self, **rules: str) -> None:
        self.given = rules

    def plan(self) -> Plan:
        return Plan(self.given, "Rules")


@mistake(
    symptom="a plan that shards two linears and says nothing of the `nn.PReLU` between them, or forgets the second "
    "linear",
    gets="refused before anything is touched: the gradient of the PReLU would be a part of a sum, the output of the "
    "linear a part of the "
    "features",
    fix="`'partial_gradient'` for parameters between, `'rowwise'` for the linear that closes",
)
def half_a_plan(rank: int, world: int) -> None:
    former, plans = (
        ShardFormer(ShardConfig()),
        ({"up": "colwise", "down": "rowwise"}, {"up": "colwise", "down": "replicated"}),
    )
    if world > 1:
        with refused("shards modules next to act.weight", "'partial_gradient'"):
            former.shard_model(Gated(), Rules(**plans[0]))
        with refused("its output is this rank's features", "'rowwise'"):
            former.shard_model(Gated(), Rules(act="partial_gradient", **plans[1]))
    assert former.shard_model(Gated(), Rules(act="partial_gradient", **plans[0]))(torch.ones(2, 8)).shape == (2, 8)


@mistake(
    symptom="`torch.nn.utils.parametrizations.weight_norm(linear)`, or another parametrization, on a linear that the "
    "plan shards",
    gets="refused by the linear's name: its weight is computed at every access, so there is no parameter to shard",
    fix="`torch.nn.utils.parametrize.remove_parametrizations(linear, 'weight')`, or `tp_size=1`",
)
def computed_weight(rank: int, world: int) -> None:
    model = zoo.build("llama-causal-lm", **SETTINGS)
    linear = model.model.layers[0].mlp.down_proj
    torch.nn.utils.parametrizations.weight_norm(linear)
    if world > 1:
        with refused("model.layers.0.mlp.down_proj", "is computed from other parameters", "remove_parametrizations"):
            ShardFormer(ShardConfig()).shard_model(model)
    torch.nn.utils.parametrize.remove_parametrizations(linear, "weight")
    assert torch.isfinite(ShardFormer(ShardConfig()).shard_model(model)(**zoo.inputs(model)).loss)
