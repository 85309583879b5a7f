"""Families whose attention goes around transformers' interface, with sequences split; against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from sequence_ranks import BATCHES, compare
from torch import nn

from shardwright.plugins.hybrid.layer_axis import LayerFacts
from shardwright.plugins.hybrid.sequence import probe_mode
from shardwright.plugins.hybrid.sequence_axis import SequenceFacts
from shardwright.shardformer.attention_routes import hides_by_numbers, route_attention
from shardwright.testing import keep_float64, run_ranks, zoo

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _made(config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).double().train()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=zoo.PERTURBATION)
    return model


def gptj() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_inner": 48, "n_positions": 64}
    return _made(transformers.GPTJConfig(vocab_size=101, **sizes, **NO_DROPOUT, bos_token_id=1, eos_token_id=2))


def codegen() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_inner": 48, "n_positions": 64, "n_ctx": 64}
    return _made(transformers.CodeGenConfig(vocab_size=101, **sizes, **NO_DROPOUT, bos_token_id=1, eos_token_id=2))


def gpt_neo() -> nn.Module:
    """Windows in every second layer."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "window_size": 5}
    none = {"attention_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0}
    kinds = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "vocab_size": 101}
    return _made(transformers.GPTNeoConfig(**sizes, **none, **kinds, bos_token_id=1, eos_token_id=2))


def falcon(alibi: bool, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return _made(transformers.FalconConfig(**sizes, **none, alibi=alibi, **more))


def mpt() -> nn.Module:
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "vocab_size": 101, "expansion_ratio": 2}
    return _made(transformers.MptConfig(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gptj": gptj,
    "codegen": codegen,
    "gpt-neo": gpt_neo,
    "bloom": lambda: zoo.build("bloom-causal-lm"),
    "falcon": lambda: falcon(False, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: falcon(True),
    "falcon-eager": lambda: falcon(True, multi_query=False, attn_implementation="eager"),
    "mpt": mpt,
}


def compare_all(rank: int, world: int, cases: list[tuple[str, str, dict[str, Any], bool]]) -> None:
    """(model, batch, arguments of the plugin, whether the model is called itself)"""
    for name, kind, arguments, called in cases:
        with keep_float64():
            try:
                compare(MODELS[name](), BATCHES[kind](3, 19), arguments, called)
            except Exception as error:
                error.add_note(f"{name}, {kind}, {arguments}")
                raise


CASES = [
    ("gptj", "few", ULYSSES, True),
    ("codegen", "masked", ULYSSES, False),
    ("gpt-neo", "masked", ULYSSES, True),
    ("gpt-neo", "packed", RING, True),
    ("bloom", "masked", ULYSSES, True),
    ("bloom", "few", RING, True),
    ("falcon", "packed", RING, False),
    ("falcon-alibi", "masked", RING, True),
    ("mpt", "masked", RING, True),
]
SWEEP = [
    (name, kind, {**mode, **more}, called)
    for name in MODELS
    for kind in ("few", "masked")
    for mode in (ULYSSES, RING)
    for more, called in (({"zero_stage": 2}, True), ({"tp_size": 2}, True), ({"sp_size": 4}, True))
    if (name, "tp_size" in more) not in [("mpt", True), ("falcon", True)]
]


def test_against_one_process() -> None:
    run_ranks(compare_all, 2, CASES, timeout=120)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_every_case(case: Any) -> None:
    run_ranks(compare_all, case[2]["sp_size"] * case[2].get("tp_size", 1), [case], timeout=120)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_what_is_cut(mode: str) -> None:
    """The batch of those that are given positions; the layers of those that make a bias of whole sequences. In none is
    attention computed whole.
    """
    for name in MODELS:
        facts = probe_mode(mode, MODELS[name]())
        if name in ("gptj", "codegen", "gpt-neo", "falcon"):
            assert isinstance(facts, SequenceFacts), name
        else:
            assert isinstance(facts, LayerFacts), name
            assert facts.plan.traded, name
            assert not facts.plan.whole, name


def test_layers_keep_one_class() -> None:
    """By which compiled ones share a graph."""
    model: Any = zoo.build("bloom-causal-lm")
    route_attention(model)
    assert len({type(layer.self_attention) for layer in model.transformer.h}) == 1


def test_whose_padding_in_front_gets_the_mean_of_all_values() -> None:
    """Falcon's with alibi, whatever computes its attention."""
    assert hides_by_numbers(falcon(True))
    assert hides_by_numbers(mpt())
    assert not hides_by_numbers(falcon(False))
