"""What attention in a ring adds to scores or leaves out: sinks, biases, dropout; against one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from sequence_ranks import BATCHES, compare
from torch import Tensor, nn

from shardwright import Booster
from shardwright.attention import compiled_ring, ring
from shardwright.attention.coordinates import Dropout
from shardwright.attention.sequence_modes import name_attention
from shardwright.attention.whole_masks import RingWithMasks
from shardwright.attention.zigzag import Share
from shardwright.comm.ring import Ring
from shardwright.ops import layer_graphs
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.sequence import probe_mode
from shardwright.plugins.hybrid.sequence_axis import SequenceFacts
from shardwright.testing import keep_float64, run_ranks, zoo

RING: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": 2}
BOTH = {**RING, "sp_size": 4, "ulysses_size": 2}
P, SEED = 0.3, 12345


def _perturbed(model: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=zoo.PERTURBATION)
    return model.double().train()


def gpt_oss(**changes: Any) -> nn.Module:
    """Sinks, windows in every second layer."""
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.GptOssConfig(
        **{**sizes, **changes},
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        max_position_embeddings=64,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return _perturbed(transformers.GptOssForCausalLM(config))  # type: ignore[no-any-return]


def by_coordinates(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Eager attention of whole sequences, whose dropout is that of blocks."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * options["scaling"]
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if module.training:
        places = torch.arange(query.shape[2])
        weights = weights * Dropout(options["dropout"], SEED, places, places).kept(weights)
    return (weights @ value).transpose(1, 2).contiguous(), None


def dropping(kind: str) -> nn.Module:
    """Of attention alone."""
    if kind == "gpt2":
        model = zoo.build("gpt2-causal-lm", attn_pdrop=P, n_layer=2)
    elif kind == "bert":
        model = zoo.build("bert-masked-lm", attention_probs_dropout_prob=P)
    else:
        model = zoo.build("mistral-causal-lm", attention_dropout=P)
    name_attention(by_coordinates, "whole", [model], masks_of="eager")
    return model.train()


def compare_all(rank: int, world: int, cases: list[tuple[str, str, dict[str, Any], bool]]) -> None:
    """(model, batch, arguments of the plugin, whether the model is called itself)"""
    for name, kind, arguments, called in cases:
        drawn = [mock.patch.object(where, "draw_seed", return_value=SEED) for where in (ring, compiled_ring)]
        with keep_float64(), drawn[0], drawn[1], mock.patch.object(layer_graphs, "backend", "aot_eager"):
            model = gpt_oss() if name == "gpt-oss" else dropping(name)
            try:
                compare(model, BATCHES[kind](3, 19), arguments, called)
            except Exception as error:
                error.add_note(f"{name}, {kind}, {arguments}")
                raise


CASES = [
    ("gpt-oss", "packed", {**RING, "zero_stage": 1}, True),
    ("gpt2", "few", RING, True),
    ("bert", "masked", RING, False),
    ("mistral", "packed", {**RING, "enable_jit_fused": True}, True),
]
FOUR = [("gpt-oss", "masked", BOTH, True), ("gpt-oss", "few", {**RING, "tp_size": 2}, False)]
SWEEP = [
    (name, kind, {**RING, **more}, called)
    for name in ("gpt-oss", "gpt2", "mistral")
    for kind in ("packed", "few", "masked")
    for more, called in (
        ({"zero_stage": 3}, True),
        ({"pp_size": 2, "num_microbatches": 3}, False),
        ({"sp_size": 4}, True),
    )
    if name == "gpt-oss" or "pp_size" not in more  # where seeds would differ
]


def test_against_one_process() -> None:
    run_ranks(compare_all, 2, CASES, timeout=120)


def test_sinks_with_traded_heads_and_sharded_ones() -> None:
    run_ranks(compare_all, 4, FOUR, timeout=120)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_every_case(case: Any) -> None:
    run_ranks(compare_all, case[2]["sp_size"] * case[2].get("pp_size", 1), [case], timeout=120)


def recomputed(rank: int, world: int) -> list[Any]:
    """Gradients with and without checkpointing, of a model with all of its dropout."""
    found = []
    for checkpoints in (False, True):
        model: Any = zoo.build("gpt2-causal-lm", attn_pdrop=P, resid_pdrop=0.1, embd_pdrop=0.1).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **RING))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(7)
        batch = {**BATCHES["few"](3, 19), "use_cache": False}
        losses = []
        for _ in range(2):
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
            losses.append(loss.item())
        assert losses[0] != losses[1]
        found.append((losses, {name: grad.clone() for name, grad in optimizer.gradients().items()}))
    (losses, gradients), (again, others) = found
    assert losses == again
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12)
    return losses


def test_dropout_is_the_same_when_layers_are_recomputed() -> None:
    run_ranks(recomputed, 2, timeout=120)


def test_the_numbers_of_coordinates() -> None:
    """As many are kept as should be, whichever coordinate they are counted along; blocks have those of the whole."""
    places = torch.arange(96)
    whole = torch.empty(3, 4, 96, 96)
    kept = Dropout(P, SEED, places, places).kept(whole)
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - P)))}
    share = (kept > 0).double()
    assert share.mean().item() == pytest.approx(1 - P, abs=0.005)
    for dims in itertools.combinations(range(4), 3):
        counted = share.mean(dims)
        error = (P * (1 - P) * len(counted) / share.numel()) ** 0.5
        assert (counted - (1 - P)).abs().max() < 5 * error
    for dim in range(4):  # neighbours know nothing of each other
        size = share.shape[dim] - 1
        first, second = share.narrow(dim, 0, size) - (1 - P), share.narrow(dim, 1, size) - (1 - P)
        assert (first * second).mean().abs() / (P * (1 - P)) < 0.02
    rows, columns = torch.tensor([3, 90, 17]), torch.tensor([5, 4, 95, 0])
    block = Dropout(P, SEED, rows, columns).kept(torch.empty(3, 4, 3, 4))
    assert torch.equal(block, kept[:, :, rows][..., columns])
    assert not torch.equal(Dropout(P, SEED + 1, places, places).kept(whole), kept)


def test_sinks_in_a_graph() -> None:
    """Of one rank: the operator that graphs hold, against a softmax with one column more."""
    module: Any = SimpleNamespace(is_causal=True)
    attention = ring.RingAttention(Share(0, 1), [Ring(None, 0, 0, 1)])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (4,))
    ]

    def of_ring(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(module, q, k, v, None, s_aux=sinks)[0]

    def plainly(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(hidden, -torch.inf)
        more = sinks[None, :, None, None].expand(2, -1, 6, 1)
        return (torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)

    _compare_graphs(of_ring, plainly, given)


def test_a_learned_mask_in_a_graph() -> None:
    """A bias of all layers that a model adds to the mask, as BEiT's: its gradient is what training needs of it."""
    module: Any = SimpleNamespace(is_causal=False)
    attention = RingWithMasks(Share(0, 1), [Ring(None, 0, 0, 1)])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (1, 4, 6, 6))
    ]
    padding = torch.zeros(2, 1, 1, 6, dtype=torch.float64)
    padding[1, ..., 4:] = torch.finfo(torch.float64).min

    def of_ring(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(module, q, k, v, bias + padding)[0]

    def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ((q @ k.transpose(-1, -2) * 8**-0.5 + bias + padding).softmax(-1) @ v).transpose(1, 2)

    _compare_graphs(of_ring, plainly, given)


def _compare_graphs(of_ring: Callable[..., Tensor], plainly: Callable[..., Tensor], given: list[Tensor]) -> None:
    expected = plainly(*given)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, given, weights)
    for function in (of_ring, torch.compile(of_ring, backend="aot_eager", fullgraph=True)):
        got = function(*given)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for mine, theirs in zip(torch.autograd.grad(got, given, weights), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_what_is_cut() -> None:
    """The whole batch of models with sinks and with dropout, which so may have pipelines."""
    for model in (gpt_oss(), zoo.build("bert-masked-lm", attention_probs_dropout_prob=P)):
        assert isinstance(probe_mode("ring_attn", copy.deepcopy(model)), SequenceFacts)
