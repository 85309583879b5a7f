"""Sequences split over ranks of their own: layouts against one process, and what cannot be split."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from habits import Habits
from hybrid_ranks import Layout, run_layout
from sequence_ranks import activations, compare_all, volumes
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.sequence_axis import Positions
from shardwright.plugins.hybrid.sequence_probe import probe_ring, probe_ulysses
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks, zoo

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
BOTH = {**RING, "sp_size": 4, "ulysses_size": 2}
LAYOUTS = [
    # A rank without heads has the bias of the first layer in its graph all the same: in its backward gathers of weights
    # begin, which all ranks make in one order.
    Layout(
        "t5-gated-conditional-generation",
        2,
        {**ULYSSES, "zero_stage": 3, "gather_ahead": 1},
        {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 1},
        steps=1,
    ),
    Layout("llama-causal-lm", 2, ULYSSES, calls=True, habits=Habits(lora=True), checkpointing=True, steps=2),
    Layout(
        "gpt2-causal-lm",
        4,
        {**ULYSSES, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "zero_stage": 1},
        habits=Habits(clip="plugin", clip_at=0.05),
        accumulate=2,
        steps=2,
    ),
    Layout("qwen3-causal-lm", 4, {**RING, "tp_size": 2, "zero_stage": 3}, calls=True, steps=2),
]
# model, batch, arguments, called itself
CASES = [
    ("gemma2", "packed", ULYSSES, True),
    ("gemma2", "packed", RING, False),
    ("llama-causal-lm", "in front", RING, True),
    ("bert-masked-lm", "masked", RING, True),
    ("mixtral-causal-lm", "few", ULYSSES, False),
    ("gpt2-causal-lm", "one row", {**RING, "num_microbatches": 2}, False),
    ("gpt2-causal-lm", "one sample", {**RING, "num_microbatches": 2}, False),
]
UNEVEN = [
    ("mistral-causal-lm", "in front", {**ULYSSES, "sp_size": 3}, False),  # heads do not divide; windows
    ("qwen3-causal-lm", "packed", {**RING, "sp_size": 3}, True),
    ("llama-causal-lm", "few", {**RING, "sp_size": 3, "ulysses_size": 3}, True),
]
FOUR = [
    ("llama-causal-lm", "in front", BOTH, True),
    ("gemma2", "packed", BOTH, False),
    ("bert-masked-lm", "masked", BOTH, True),
]
MODELS = (
    "llama-causal-lm",
    "qwen3-causal-lm",
    "gpt2-causal-lm",
    "mistral-causal-lm",
    "mixtral-causal-lm",
    "bert-masked-lm",
    "llama-token-classification",
)
SWEEP = [
    Layout(model, world, {**mode, **plugin}, calls=calls, checkpointing=world == 2 and calls)
    for model in MODELS
    for mode in (ULYSSES, RING)
    for world, plugin, calls in [
        (2, {}, False),
        (2, {"zero_stage": 2}, True),
        (4, {"sp_size": 4}, True),
        (4, {"tp_size": 2, "zero_stage": 3}, False),
        (4, {"pp_size": 2, "num_microbatches": 3}, False),
        (4, {"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2}, False),
        (4, {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}, False),
        (4, {"zero_stage": 1}, False),  # two replicas
    ]
] + [
    Layout(model, world, {**RING, "sp_size": 4, **plugin}, calls=calls)
    for model in MODELS
    for world, plugin, calls in [
        (4, {"inner_ring_size": 2}, True),
        (4, {"ulysses_size": 2}, True),
        (4, {"ulysses_size": 4, "zero_stage": 2}, False),
        (8, {"ulysses_size": 2, "tp_size": 2}, False),
        (8, {"ulysses_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1}, False),
        (8, {"sp_size": 8, "ulysses_size": 2, "inner_ring_size": 2}, True),
    ]
]
SWEEP.append(Layout("llama-causal-lm", 4, BOTH, calls=True, habits=Habits(lora=True), checkpointing=True))
BATCHES_SWEEP = [
    (model, batch, {**mode, "sp_size": size}, called)
    for model in ("gemma2", *MODELS[:5])
    for batch in ("packed", "in front", "few")
    for mode in (ULYSSES, RING, BOTH)
    for size, called in ((2, False), (4, True))
    if mode is not BOTH or size == 4
    if (model, batch, mode["sequence_parallelism_mode"]) != ("gemma2", "in front", "ring_attn")
]


@pytest.mark.parametrize(("cases", "world"), [(CASES, 2), (UNEVEN, 3), (FOUR, 4)])
def test_batches_of_all_kinds(cases: Any, world: int) -> None:
    run_ranks(compare_all, world, cases)


@pytest.mark.sweep
@pytest.mark.parametrize("case", BATCHES_SWEEP, ids=str)
def test_every_batch(case: Any) -> None:
    run_ranks(compare_all, case[2]["sp_size"], [case])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", SWEEP, ids=str)
def test_every_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bloom-causal-lm", "does not go through transformers' AttentionInterface"),
        ("llama-sequence-classification", "no logits for every token"),
        ("t5-conditional-generation", "a call with input_ids alone fails"),
    ],
)
def test_models_that_cannot_be_split_are_named(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        probe_ulysses(zoo.build(name))


def test_what_is_found_out_of_models() -> None:
    counted = Positions(0, None, under_mask=True)
    own = (True, False, False)  # documents are kept apart without a cache
    assert probe_ring(zoo.build("qwen3-causal-lm")) == (True, True, True, counted, own, True)
    decoder, encoder, by_mask = map(
        probe_ulysses, map(zoo.build, ("mistral-causal-lm", "bert-masked-lm", "opt-causal-lm"))
    )
    assert decoder == (True, True, True, counted, own, True)
    assert encoder == (False, False, False, counted, (False, False, False), True)
    assert by_mask.positions == Positions(0, None, under_mask=False)


def other_model(rank: int, world: int) -> None:
    """Of the same config, which is refused, and of a copy of it."""
    plugin = HybridParallelPlugin(precision="fp32", **ULYSSES)
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    shares, copies = type(model)(model.config), type(model)(copy.deepcopy(model.config))
    batch = zoo.inputs(model)
    Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="from a copy of the config that was taken before"):
        shares(**batch)
    assert copies(**batch).logits.shape[:2] == batch["input_ids"].shape


def mistakes(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES))
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    batch = zoo.inputs(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def refused(words: str, call: Any) -> None:
        with pytest.raises(ValueError, match=words):
            call()

    ids = batch["input_ids"]
    refused("without labels", lambda: model(input_ids=ids))
    refused("cannot be cut along", lambda: model(**batch, extra=torch.ones(len(ids), 3)))
    few = {"labels": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
    for name, value in few.items():
        given = {**batch, name: value}
        refused(rf"entry '{name}' of shape \(1, .* other samples", lambda given=given: model(**given))
    refused(r"input_ids of shape \(0, .* no token", lambda: model(input_ids=ids[:0], labels=ids[:0]))
    refused("attention_mask of 4 dims", lambda: model(input_ids=ids, attention_mask=ids[:, None, None]))
    refused("call the model that boost returned", lambda: model.unwrap()(**batch))
    refused("generate with sequence_parallelism_mode", lambda: model.generate(ids))
    refused(
        "criterion='looks'.*outputs.loss alone",
        lambda: booster.execute_pipeline(iter([batch]), model, looks, optimizer),
    )
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape[1] == -(-ids.shape[1] // world)
    plain, other = torch.nn.Sequential(torch.nn.Linear(4, 4)), HybridParallelPlugin(precision="fp32", **ULYSSES)
    refused("Sequential is no model of transformers", lambda: Booster(plugin=other).boost(plain))


def looks(outputs: Any, inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
    return loss


def test_mistakes() -> None:
    run_ranks(mistakes, 2)
    run_ranks(other_model, 2)


def test_what_travels() -> None:
    """In numbers per layer, of b samples, S tokens, H heads and K heads of keys of size d, on each of n ranks."""
    b, length, heads, keys, size, n = 2, 32, 4, 2, 16, 4
    for (ulysses, norm, _), *rings, both, _latent in (all_modes := run_ranks(volumes, n, b, length, RING)):
        tokens = b * length // n * size  # numbers of one head
        # k and v are sent to two ranks each, since there are fewer heads than ranks
        assert ulysses == {"alltoall_base_": (8, 2 * (2 * heads + 2 * 2 * keys) * tokens * (n - 1) // n)}
        for ring, *_ in rings:
            assert ring == {"send": (3 * (n - 1), 3 * (n - 1) * 2 * keys * tokens)}
        # two trade, then one head of keys of both goes to the other place
        assert both[0] == {
            "alltoall_base_": (8, 2 * (2 * heads + 2 * keys) * tokens // 2),
            "send": (3, 3 * 2 * keys // 2 * 2 * tokens),
        }
        assert [same for _, same, _ in (*rings, both)] == [pytest.approx(norm, rel=1e-5)] * 3
    for sent, _, planned in itertools.chain(*all_modes):
        assert [(calls, 4 * numbers) for calls, numbers in sent.values()] == planned


def test_activations_are_shared() -> None:
    """What a layer leaves for its backward is an n-th on each of n ranks, and so is what the rest of the model leaves.
    Where ranks trade, the output is kept as both have it, and keys by every rank that looks at them.
    """
    b, length, heads, keys, size, n = 2, 48, 4, 2, 12, 4
    modes = [None, {**ULYSSES, "sp_size": n}, {**RING, "sp_size": n}, BOTH]
    for (whole, of_layer), *parts in run_ranks(activations, n, b, length, modes):
        tokens = 4 * b * length // n * size  # bytes of one head
        kept = [layer - of_layer // n for _, layer in parts]
        assert kept == [(heads + 2 * (n - keys)) * tokens, 0, heads * tokens]
        for (total, layer), more in zip(parts, kept, strict=True):
            assert total - 2 * more == pytest.approx(whole / n, rel=0.01), (whole, total, layer)


class ForSomeTokens(nn.Module):
    """A branch that not every part of a sequence has tokens for."""

    def __init__(self, inner: nn.Module, width: int, sign: int) -> None:
        super().__init__()
        self.inner, self.extra, self.sign = inner, nn.Linear(width, width), sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        out: torch.Tensor = self.inner(x).flatten(0, -2)
        chosen = (rows.detach()[:, 0] * self.sign > 1.2).nonzero().view(-1)
        if len(chosen):
            out = out.index_add(0, chosen, self.extra(rows[chosen]))
        return out.view_as(x)


@keep_float64()
def lacking(rank: int, world: int) -> None:
    for mode, stage, overlap in ((ULYSSES, 1, True), (RING, 2, False), (RING, 0, True), (ULYSSES, 3, True)):
        reference = zoo.build("llama-causal-lm", num_hidden_layers=4, dtype=torch.float32)
        torch.manual_seed(0)
        for number, layer in enumerate(reference.model.layers):
            layer.mlp = ForSomeTokens(layer.mlp, reference.config.hidden_size, 1 - 2 * (number % 2))
        reference = reference.double()
        buckets = {"zero_bucket_size_in_m": 0.001} if stage in (1, 2) else {}
        plugin = HybridParallelPlugin(
            precision="fp32", zero_stage=stage, overlap_communication=overlap, **buckets, **mode
        )
        booster, model = Booster(plugin=plugin), copy.deepcopy(reference)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        for seed in range(3):
            batch = zoo.inputs("llama-causal-lm", batch_size=2, seq_len=8, seed=seed)
            booster.backward(model(**batch).loss, optimizer)
            reference(**batch).loss.backward()
        gradients = optimizer.gradients()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=gradients, weights=False)


def test_ranks_that_exchange_parts_of_a_sequence_may_lack_gradients() -> None:
    """Nobody waits in backward for a bucket of a peer who waits for keys and values."""
    run_ranks(lacking, 2, timeout=60)
