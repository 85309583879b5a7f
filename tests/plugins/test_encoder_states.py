"""Decoders that are given the states of an encoder which is no part of them, with split sequences, against one
process.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sequence_ranks import IGNORED, compare, sgd
from torch import nn

from shardwright import Booster
from shardwright.models.cross_attention import MASK, STATES, made_up_states, states_argument
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.layer_axis import ENCLOSED, LayerFacts
from shardwright.plugins.hybrid.sequence import probe_mode
from shardwright.testing import keep_float64, run_ranks
from shardwright.testing.matrix import Subject
from shardwright.testing.matrix.subject import build

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
BOTH = {**RING, "sp_size": 4, "ulysses_size": 2}
GATHERED = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather", "tp_size": 2}
Batch = dict[str, torch.Tensor]
NO_MASKS = {"length": 12, "encoded": 19, "masks": "none"}


def model_of(name: str) -> nn.Module:
    """A tiny one with attention to an encoder, in double precision."""
    return build(Subject(name, settings={"add_cross_attention": True, "is_decoder": True})).model


def batch_of(model: nn.Module, length: int = 19, encoded: int = 13, masks: str = "both") -> Batch:
    """Ragged, of lengths that do not divide.

    masks   "both", of the tokens alone ("tokens"), or "none"
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (3, length), generator=generator)
    states = made_up_states(model, 3, encoded, generator)
    argument = states_argument(model)
    assert states is not None
    assert argument is not None
    labels = ids.clone()
    labels[0, :5], labels[2, 9:] = IGNORED, IGNORED
    batch = {"input_ids": ids, "labels": labels, argument: states.double()}
    if masks != "none":
        mask = (torch.arange(length) < length - 3 * torch.arange(3)[:, None]).long()
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}
    if masks == "both" and argument == STATES:
        seen = torch.ones(3, encoded, dtype=torch.long)
        seen[0, 4:], seen[2, :2] = 0, 0
        batch[MASK] = seen
    return batch


def compare_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any], bool, dict[str, Any]]]) -> None:
    """(class, arguments of the plugin, whether the model is called itself, what its batch is like)"""
    for name, arguments, called, kind in cases:
        with keep_float64():
            model = model_of(name)
            # Of a cache BigBird's attention to an encoder would read the keys of its other attention.
            plainly = {"use_cache": False} if name.startswith("BigBirdFor") else {}
            try:
                compare(model, batch_of(model, **kind), arguments, called, **plainly)
            except Exception as error:
                error.add_note(f"{name}, {arguments}, {kind}")
                raise


CASES: list[Any] = [
    ("BartForCausalLM", {**ULYSSES, "zero_stage": 1}, True, {}),
    ("BertLMHeadModel", {**RING, "zero_stage": 3}, True, {}),
    ("BigBirdPegasusForCausalLM", RING, True, NO_MASKS),  # whose attention does not say that it is causal
    ("TrOCRForCausalLM", RING, False, {}),  # whose attention is computed whole
    ("WhisperForCausalLM", ULYSSES, True, {}),  # which takes no mask
]
FAMILIES = (
    *("Bart", "BigBird", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "Camembert", "Data2VecText", "Electra"),
    *("Ernie", "MBart", "Marian", "Mvp", "PLBart", "Pegasus", "RemBert", "RoCBert", "RoFormer", "Roberta"),
    *("RobertaPreLayerNorm", "TrOCR", "Whisper", "XGLM", "XLMRoberta", "XLMRobertaXL", "Xmod"),
)
CLASSES = ("BertLMHeadModel", "BertGenerationDecoder", "GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in FAMILIES))
FOUR: list[Any] = [
    ("BertLMHeadModel", {**RING, "pp_size": 2, "num_microbatches": 3}, False, {}),
    ("BartForCausalLM", {**BOTH, "zero_stage": 1}, True, {}),
    ("BertLMHeadModel", {**ULYSSES, "tp_size": 2}, True, {"encoded": 3, "masks": "tokens"}),
]


def test_against_one_process() -> None:
    run_ranks(compare_all, 2, CASES, timeout=120)


def test_against_one_process_on_four_ranks() -> None:
    run_ranks(compare_all, 4, FOUR, timeout=120)


def test_what_is_split() -> None:
    """All attention, that to the encoder too, where it goes through transformers' interface."""
    bart = model_of("BartForCausalLM")
    for mode in ("all_to_all", "ring_attn"):
        facts = probe_mode(mode, bart)
        assert isinstance(facts, LayerFacts)
        assert facts.reads
        assert len(facts.plan.traded) == 2 * bart.config.num_hidden_layers  # type: ignore[union-attr]
        assert not facts.plan.whole
    whisper = probe_mode("all_to_all", model_of("WhisperForCausalLM"))
    assert isinstance(whisper, LayerFacts)
    assert whisper.loss == ENCLOSED
    tokens = {name: value for name, value in batch_of(bart).items() if name != STATES}
    without = probe_mode("all_to_all", bart, tokens)
    assert isinstance(without, LayerFacts)
    assert not without.reads  # as example_inputs says


def _boosted(name: str, mode: dict[str, Any]) -> tuple[Booster, Any, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **mode))
    model: Any = model_of(name)
    reference = copy.deepcopy(model)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    return booster, model, optimizer, reference


def states_with_gradients(rank: int, world: int) -> None:
    """An encoder of the script's own gets the gradients that one process gives it; a call without states goes on."""
    for mode in (ULYSSES, RING):
        with keep_float64():
            booster, model, optimizer, reference = _boosted("BartForCausalLM", mode)
            batch = batch_of(reference)
            whole, part = (batch[STATES].clone().requires_grad_() for _ in range(2))
            expected = reference(**{**batch, STATES: whole}).loss
            expected.backward()
            loss = model(**{**batch, STATES: part}).loss
            booster.backward(loss, optimizer)
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(part.grad, whole.grad, rtol=1e-9, atol=1e-11)
            alone = {name: value for name, value in batch.items() if name not in (STATES, MASK)}
            torch.testing.assert_close(model(**alone).loss, reference(**alone).loss, rtol=1e-10, atol=1e-10)


def test_gradients_of_states() -> None:
    run_ranks(states_with_gradients, 2, timeout=120)


def mistakes(rank: int, world: int) -> None:
    _, model, _, reference = _boosted("BertLMHeadModel", RING)
    batch = batch_of(reference)
    for words, wrong in (
        (r"encoder_hidden_states of shape \(2, 13, 48\) in a batch of 3", {STATES: batch[STATES][:2]}),
        (r"encoder_attention_mask of shape \(3, 5\) .* \[3, 13\]", {MASK: batch[MASK][:, :5]}),
    ):
        with pytest.raises(ValueError, match=words):
            model(**{**batch, **wrong})
    reference.config._attn_implementation = "eager"
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **RING))
    eager, *_ = booster.boost(reference, sgd(reference))
    with pytest.raises(ValueError, match=r"hides all states of a sample.*leave such samples out"):
        eager(**{**batch, MASK: batch[MASK] * torch.tensor([[1], [0], [1]])})


def test_mistakes() -> None:
    run_ranks(mistakes, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str) -> None:
    cases = [
        (name, mode, True, kind)
        for mode in (ULYSSES, RING, GATHERED)
        for kind in ({}, NO_MASKS)
        if mode is not GATHERED or name != "GPT2LMHeadModel"  # which has no plan for it
    ]
    run_ranks(compare_all, 2, cases, timeout=120)
