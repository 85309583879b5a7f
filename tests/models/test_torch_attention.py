"""torch's own attention modules, dealt by heads: what they return, every gradient and every updated weight are those of
plain torch in one process, for every way to call them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import Plan, Policy, ShardConfig, ShardFormer
from shardwright.shardformer.torch_attention import TorchAttention
from shardwright.spec import get_spec
from shardwright.testing import adamw, compare_models, run_ranks

WIDTH = 24
# Options of the module, features of keys and of values, heads: three and one for two ranks.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 4},
    "uneven": {"num_heads": 3, "batch_first": True, "add_bias_kv": True},
    "fewer heads than ranks": {"num_heads": 1, "bias": False, "add_zero_attn": True},
    "other features": {"num_heads": 3, "kdim": 10, "vdim": 14, "batch_first": True, "add_bias_kv": True},
}


class One(Policy):
    def plan(self) -> Plan:
        return Plan({"attention": TorchAttention()}, "One")


def made(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.attention = nn.MultiheadAttention(WIDTH, **options)
    for param in model.parameters():  # biases begin with zeros
        nn.init.normal_(param, std=0.3)
    return model.double()


def calls(options: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Inputs, and what else the module is told: masks of both kinds, with gradients, and of every head."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    batch, rows, columns, heads = 2, 5, 7, options["num_heads"]
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    own = [draw(batch, length, width) for length, width in zip((rows, columns, columns), widths, strict=True)]
    others = own if options.get("batch_first") else [x.detach().transpose(0, 1).requires_grad_() for x in own]
    padding = torch.arange(columns).expand(batch, -1) >= torch.tensor([[columns], [4]])
    each = draw(batch * heads, rows, columns)
    found: list[tuple[list[Tensor], dict[str, Any]]] = [
        (others, {}),
        (others, {"key_padding_mask": padding, "need_weights": False}),
        (others, {"attn_mask": each, "key_padding_mask": padding, "average_attn_weights": False}),
        (others, {"attn_mask": draw(rows, columns), "need_weights": False}),
        ([x[0].detach().requires_grad_() for x in own], {"key_padding_mask": padding[1]}),
    ]
    if len(set(widths)) == 1:
        x = others[1]
        hidden = torch.ones(columns, columns, dtype=torch.bool).triu(1)
        for told in ({"need_weights": False}, {}, {"key_padding_mask": padding}):
            found.append(([x, x, x], {"attn_mask": hidden, "is_causal": True, **told}))
    return found


def compared(rank: int, world: int) -> None:
    for options in KINDS.values():
        plain, model = made(options), ShardFormer(ShardConfig()).shard_model(made(options), One())
        for inputs, told in calls(options):
            entering = list(
                {id(x): x for x in [*inputs, *told.values()] if getattr(x, "requires_grad", False)}.values()
            )
            found = []
            for one in (plain, model):
                y, weights = one.attention(*inputs, **told)
                total = (y * torch.arange(y.numel()).view(y.shape).cos()).sum()
                if weights is not None:
                    total = total + (weights * torch.arange(weights.numel()).view(weights.shape).sin()).sum()
                total.backward()
                found.append([y, weights, *(x.grad for x in entering)])
                for x in entering:
                    x.grad = None
            for want, got in zip(*found, strict=True):
                assert (want is None) == (got is None), (options, told.keys())
                if want is not None:
                    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        compare_models(plain, model, coordinate=rank)
        spec = get_spec(model.attention.out_proj.weight)
        assert spec is not None
        assert spec.is_sharded


def test_every_way_to_call_it() -> None:
    run_ranks(compared, 2)


class Net(nn.Module):
    """torch's encoder, whose evaluation goes another way, and an attention beside it that reads what it made."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 40, dropout=0.0, batch_first=True, norm_first=False)
        self.words, self.encoder = nn.Embedding(53, WIDTH), nn.TransformerEncoder(layer, 3)
        self.pool, self.out = nn.MultiheadAttention(WIDTH, 3, batch_first=True), nn.Linear(WIDTH, 53)
        self.asks = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.encoder(self.words(ids), src_key_padding_mask=padding)
        asked, _ = self.pool(self.asks.expand(len(ids), -1, -1), x, x, key_padding_mask=padding, need_weights=False)
        return self.out(x + asked.sum(1, keepdim=True)).masked_fill(padding[..., None], 0.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 53, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids.masked_fill(torch.arange(9) >= torch.tensor([[9], [4], [7], [8]]), 0)}


def loss_of(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten(), ignore_index=0)


def trained(rank: int, world: int, layout: dict[str, Any]) -> set[str]:
    plugin = HybridParallelPlugin(custom_policy="auto", example_inputs=batch(5), precision="fp32", **layout)
    plain, model = net(), net()
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, adamw(model.parameters()))
    step: Any = adamw(plain.parameters())
    for seed in (1, 2):
        want, got = (loss_of(one(**batch(seed)), batch(seed)) for one in (plain, boosted))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        want.backward()
        optimizer.backward(got)
        step.step()
        optimizer.step()
        step.zero_grad()
        optimizer.zero_grad()
    compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
    with torch.no_grad():
        torch.testing.assert_close(boosted.eval()(**batch(3)), plain.eval()(**batch(3)), rtol=1e-10, atol=1e-10)
    return {name for name, param in boosted.unwrap().named_parameters() if (get_spec(param) or param).is_sharded}


@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, pytest.param({"tp_size": 2, "zero_stage": 1}, marks=pytest.mark.sweep)], ids=str
)
def test_torchs_encoder_is_dealt_without_a_policy(layout: dict[str, Any]) -> None:
    for dealt in run_ranks(trained, 2, layout):
        assert {"encoder.layers.2.self_attn.in_proj_weight", "encoder.layers.0.linear1.weight"} <= dealt
        assert {"pool.in_proj_bias", "pool.out_proj.weight", "words.weight", "out.weight"} <= dealt
