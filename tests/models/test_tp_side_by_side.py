"""Layers whose attention and MLP stand side by side: one reduction for both, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from shardwright import Booster
from shardwright.models.dry_run import meta_copy, without_data
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import Policy, ShardConfig, ShardFormer
from shardwright.shardformer.policies.gpt_neox import GPTNeoXPolicy
from shardwright.shardformer.rules import Rules
from shardwright.shardformer.side_by_side import SideBySide, _Follow, _without_dropout
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks, train_steps
from tests.ranks.counting import CountCollectives

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = {**SMALL, "intermediate_size": 44, "attention_dropout": 0.0, "hidden_dropout": 0.0}
MODELS: dict[str, Any] = {
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(
            vocab_size=101,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**SMALL, intermediate_size=44)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**NEOX)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**SMALL, bias=True, num_kv_heads=2)),
    "falcon, grouped": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2)
    ),
    # without a policy of its own
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(**SMALL, intermediate_size=44, num_key_value_heads=2, sliding_window=4)
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    return model.double().train()


def batch(step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    length = 9 + 2 * (step % 2)
    ids = torch.randint(1, 101, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(samples):
        mask[row, length - row :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def shard(model: nn.Module, policy: Policy | None = None) -> Any:
    return ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).shard_model(model, policy)


def reductions(model: nn.Module) -> int:
    """Of one forward of two layers, the embedding's and the loss's left out."""
    with CountCollectives() as counted:
        model(input_ids=batch(0)["input_ids"])
    return counted.calls["allreduce_"] - 1


def plain_loops(rank: int, world: int) -> None:
    for name in MODELS:
        reference, model = build(name), build(name)
        with keep_float64():
            model = shard(model)
            batches = [batch(step) for step in range(2)]
            losses = train_steps(reference, adamw(reference), batches), train_steps(model, adamw(model), batches)
        compare_models(reference, model, coordinate=rank, losses=losses)
        assert reductions(model) == 2, name


def test_plain_loops_train_like_one_process() -> None:
    run_ranks(plain_loops, 2, timeout=110)


def plugins(rank: int, world: int, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    for name, layout, recompute in cases:
        reference, model = build(name), build(name)
        settings = dict(layout)
        if recompute:
            model.gradient_checkpointing_enable()
            if "pp_size" in settings:
                settings["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(1.0)
        plugin = HybridParallelPlugin(precision="fp32", max_norm=0.0, **settings)
        booster = Booster(plugin=plugin)
        with keep_float64():
            model, optimizer, *_ = booster.boost(model, adamw(model))
            reference_optimizer = adamw(reference)
            for step in range(2):
                reference_optimizer.zero_grad()
                optimizer.zero_grad()
                expected = reference(**batch(step)).loss
                expected.backward()
                found = booster.execute_pipeline(
                    iter([batch(step)]), model, lambda outputs, _: outputs.loss, optimizer, return_loss=True
                )["loss"]
                coordinate = plugin.mesh.coordinate
                losses = None if found is None else (expected.detach(), found.double())
                gradients = optimizer.gradients()
                compare_models(
                    reference, model, coordinate=coordinate, losses=losses, gradients=gradients, weights=False
                )
                optimizer.step()
                reference_optimizer.step()
                compare_models(reference, model, coordinate=coordinate, gradients=False)


def test_plugins_train_like_one_process() -> None:
    pipeline = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}
    run_ranks(
        plugins,
        4,
        [
            ("gptj", {**pipeline, "pp_style": "zb"}, True),
            ("gpt_neox", pipeline, False),
            ("falcon, grouped", {"tp_size": 2, "zero_stage": 3}, True),
        ],
        timeout=110,
    )


def dropout(rank: int, world: int) -> None:
    """While dropout acts on each branch, they are reduced apart and every rank sees the same; afterwards together
    again.
    """
    for name in ("gptj", "phi", "gpt_neox"):
        model = shard(build(name))
        dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        assert reductions(model) == 2
        for module in dropouts:
            module.p = 0.3
        with keep_float64():
            hidden = model.base_model(batch(1)["input_ids"]).last_hidden_state.detach()
        everyone = [torch.empty_like(hidden) for _ in range(world)]
        torch.distributed.all_gather(everyone, hidden.contiguous())
        assert torch.equal(*everyone)
        assert reductions(model) == 4
        model.eval()
        assert reductions(model) == 2


def test_dropout_on_each_branch_reduces_twice() -> None:
    run_ranks(dropout, 2, timeout=110)


def hooks(rank: int, world: int) -> None:
    reference, model = build("gpt_neox").eval(), shard(build("gpt_neox")).eval()
    seen: list[torch.Tensor] = []
    with keep_float64(), torch.no_grad():
        for each in (reference, model):
            attention = each.gpt_neox.layers[1].attention
            attention.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
            each(input_ids=batch(0)["input_ids"])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-10, atol=1e-10)
    assert reductions(model) == 3  # of the hooked layer two


def test_a_hook_on_a_branch_sees_all_of_it() -> None:
    run_ranks(hooks, 2, timeout=60)


class Layer(nn.Module):
    def __init__(self, combine: Any) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop, self.combine = nn.LayerNorm(8), nn.Dropout(0.3), combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self, x, self.norm(x))


BESIDE: list[Any] = [
    lambda m, x, n: m.a(m.up(n)) + m.b(m.up(n)) + x,
    lambda m, x, n: x + m.a(m.up(n)) + m.b(m.up(n)),
    lambda m, x, n: m.norm(m.a(m.up(n)).view(-1, 8).view(x.shape) + m.b(m.up(n))),  # the sum is whole
]
NOT_BESIDE: list[Any] = [
    lambda m, x, n: (lambda y: y + m.b(m.up(m.norm(y))))(x + m.a(m.up(n))),  # one after the other
    lambda m, x, n: x + m.norm(m.a(m.up(n))) + m.b(m.up(n)),
    lambda m, x, n: x + 0.5 * m.a(m.up(n)) + m.b(m.up(n)),
    lambda m, x, n: x + m.a(m.up(n)) - m.b(m.up(n)),
    lambda m, x, n: x + nn.functional.dropout(m.a(m.up(n)), 0.1) + m.b(m.up(n)),
    lambda m, x, n: (lambda y: x + y + y + m.b(m.up(n)))(m.a(m.up(n))),
    lambda m, x, n: (lambda z: x + m.a(m.up(n)) + z)(m.b(m.up(n))),  # the last comes first
    lambda m, x, n: (lambda y: (x + y + m.b(m.up(n))) * y.detach())(m.a(m.up(n))),
    lambda m, x, n: (lambda y: y + m.b(m.up(n)) + y[:, :1])(m.a(m.up(n))),
    lambda m, x, n: x + m.a(m.up(n)) + m.b(m.a(m.up(n))),  # the first runs twice
    lambda m, x, n: m.b(m.up(n)) if m.training else m.a(m.up(n)) + m.b(m.up(n)),
]


def holds(layer: Layer) -> list[list[str]] | None:
    """The dropouts in between, in training and evaluation mode; None where the proof fails."""
    between = []
    for training in (True, False):
        copied = meta_copy(layer).train(training)
        follow = _Follow(copied, SideBySide("a", "b"))
        with _without_dropout([follow]), without_data():
            copied(torch.empty(2, 3, 8, device="meta"))
        if not follow.holds:
            return None
        between.append(follow.between)
    return between


def test_only_what_is_added_up_once_is_reduced_once() -> None:
    for combine in BESIDE:
        assert holds(Layer(combine)) == [[], []]
    assert holds(Layer(lambda m, x, n: m.drop(m.a(m.up(n))) + m.drop(m.b(m.up(n))) + x)) == [["drop"] * 2] * 2
    assert holds(Layer(lambda m, x, n: m.drop(m.a(m.up(n)) + m.b(m.up(n))) + x)) == [[], []]
    for number, combine in enumerate(NOT_BESIDE):
        assert holds(Layer(combine)) is None, number


class Claims(GPTNeoXPolicy):
    def rules(self) -> Rules:
        return super().rules() | {"layers.*": SideBySide("attention.dense", "mlp.dense_4h_to_h")}


class Misspelled(GPTNeoXPolicy):
    def rules(self) -> Rules:
        return super().rules() | {"layers.*": SideBySide("attention.dense", "mlp.down")}


def claims(rank: int, world: int) -> None:
    reference, model = (tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**NEOX, use_parallel_residual=False)) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    model = shard(model, Claims())
    assert reductions(model) == 4
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(0)).loss, reference(**batch(0)).loss, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"SideBySide: there is no 'mlp.down' in it; name two row linears"):
        shard(build("gpt_neox"), Misspelled())


def test_a_rule_that_does_not_hold_reduces_twice() -> None:
    run_ranks(claims, 2, timeout=60)
