"""Column linears that share an input, in scripts that do something to them after sharding, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
import transformers as tf

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import Plan, Policy, ShardConfig, ShardFormer
from shardwright.spec import get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
STYLES: dict[str, Any] = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=bias) for bias in (True, True, False, True))

    def forward(self, x: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        mixed = self.q(x) * self.k(x).tanh() + self.v(x) if uses_all else self.q(x).tanh()
        return self.o(mixed)  # type: ignore[no-any-return]


class AttentionPolicy(Policy):
    def plan(self) -> Plan:
        return Plan(dict(STYLES), "AttentionPolicy")


class Stretched(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Attention(), Attention()]).double()


def parametrized(rank: int, world: int) -> None:
    models: list[Any] = [blocks(), ShardFormer(ShardConfig()).shard_model(blocks(), AttentionPolicy())]
    specs = {name: copy.copy(get_spec(param)) for name, param in models[1].named_parameters()}
    outputs, inputs = [], []
    for step in range(6):  # which ids are used again is up to the allocator
        for model in models:
            if not step:
                for name in "qkv":
                    parametrize.register_parametrization(getattr(model[0], name), "weight", Stretched())
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, 4, 8, dtype=torch.double, generator=generator).requires_grad_()
            y = model[1](model[0](x))
            y.square().sum().backward()
            outputs.append(y)
            inputs.append(x.grad)
    for values in (outputs, inputs):
        for expected, found in zip(values[::2], values[1::2], strict=True):
            torch.testing.assert_close(found, expected, **CLOSE)
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        spec = specs[name.replace("parametrizations.weight.original", "weight")]
        assert spec is not None, name
        assert expected.grad is not None, name
        assert found.grad is not None, name
        torch.testing.assert_close(torch.as_tensor(found.grad), spec.shard(expected.grad, rank), **CLOSE)


def test_parametrized_siblings_get_the_gradients_of_one_process() -> None:
    run_ranks(parametrized, 2, timeout=60)


def hooked(rank: int, world: int) -> None:
    """Every second batch leaves k and v out; the hooks of the first block see those that are used alone."""
    models: list[Any] = [blocks(), ShardFormer(ShardConfig()).shard_model(blocks(), AttentionPolicy())]
    calls: list[list[str]] = [[], []]
    for model, called in zip(models, calls, strict=True):
        for name in "qkv":
            weight = getattr(model[0], name).weight
            weight.register_hook(lambda grad, name=name, called=called: called.append(name) or 3.0 * grad)
            weight.register_post_accumulate_grad_hook(lambda param, called=called: called.append(str(param.dim())))
        for step, uses_all in enumerate((False, True, False)):
            x = torch.randn(3, 4, 8, dtype=torch.double, generator=torch.Generator().manual_seed(step)).requires_grad_()
            model[1](model[0](x, uses_all), uses_all).square().sum().backward()
            called.append("step")
    assert [sorted(called) for called in calls[1:]] == [sorted(calls[0])]
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        spec = get_spec(found)
        assert spec is not None, name
        torch.testing.assert_close(torch.as_tensor(found.grad), spec.shard(expected.grad, rank), **CLOSE)


def test_hooks_of_a_script_are_not_called_for_unused_siblings() -> None:
    run_ranks(hooked, 2, timeout=60)


class Chain(nn.Module):
    """In every second batch the blocks leave k and v out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor, uses_all: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, bool(uses_all.flatten()[0]))
        return x


class ChainPolicy(Policy):
    layer_lists = ("blocks",)

    def plan(self) -> Plan:
        return Plan({f"blocks.{name}": style for name, style in STYLES.items()}, "ChainPolicy")


def unused(rank: int, world: int, stage: int, style: str = "") -> None:
    reference, model = Chain(), Chain()
    staged: Any = {}
    if style:
        example = {"x": torch.randn(4, 3, 8, dtype=torch.double), "uses_all": torch.ones(4, 1)}
        staged = {"pp_size": 2, "pp_style": style, "num_microbatches": 2, "example_inputs": example}
    plugin = HybridParallelPlugin(
        tp_size=2, zero_stage=stage, precision="fp32", max_norm=0.0, custom_policy=ChainPolicy(), **staged
    )
    booster = Booster(plugin=plugin)
    with keep_float64():
        reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step, uses_all in enumerate((0, 1, 0, 1, 0)):
            x = torch.randn(4, 3, 8, dtype=torch.double, generator=torch.Generator().manual_seed(step))
            batch = {"x": x, "uses_all": torch.full((4, 1), float(uses_all))}
            reference(**batch).square().mean().backward()
            if style:
                booster.execute_pipeline(iter([batch]), boosted, lambda y, _: y.square().mean(), optimizer)
            else:
                booster.backward(boosted(**batch).square().mean(), optimizer)
            for each in (reference_optimizer, optimizer):
                each.step()
                each.zero_grad()
    compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adamw_leaves_siblings_alone_that_a_step_did_not_use(stage: int) -> None:
    run_ranks(unused, 2, stage, timeout=60)


def test_adamw_leaves_unused_siblings_alone_where_weight_gradients_wait() -> None:
    run_ranks(unused, 4, 1, "zb", timeout=60)


def unused_rows(rank: int, world: int) -> None:
    """One key/value head that both ranks hold, in a backward that does not use it."""
    with keep_float64():
        models: list[Any] = []
        for shards in (False, True):
            torch.manual_seed(0)
            config = tf.LlamaConfig(
                vocab_size=101,
                hidden_size=32,
                intermediate_size=44,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=1,
            )
            model = tf.LlamaForCausalLM(config).double()
            models.append(ShardFormer(ShardConfig()).shard_model(model) if shards else model)
        for model in models:
            hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
            model.model.layers[0].self_attn.q_proj(hidden).square().sum().backward()
    expected, found = (model.model.layers[0].self_attn for model in models)
    grad = torch.as_tensor(found.q_proj.weight.grad)
    torch.testing.assert_close(grad, expected.q_proj.weight.grad.chunk(2)[rank], **CLOSE)
    assert found.k_proj.weight.grad is None


def test_rows_that_ranks_share_may_go_unused() -> None:
    run_ranks(unused_rows, 2, timeout=60)
