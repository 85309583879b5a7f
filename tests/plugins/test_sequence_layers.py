"""Models that see whole sequences and whose layers are given parts: encoder-decoders, attention that a model computes
itself, router losses, state spaces; against one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from sequence_ranks import compare
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.layer_axis import LayerFacts, check_layers
from shardwright.plugins.hybrid.layer_plan import LayerPlan
from shardwright.plugins.hybrid.sequence import probe_mode
from shardwright.testing import keep_float64, run_ranks, zoo

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
SMALL = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _made(config: Any, auto: Any = transformers.AutoModelForCausalLM) -> nn.Module:
    config._experts_implementation = "eager"  # the grouped kernels have no double precision
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = auto.from_config(config).double().train()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=zoo.PERTURBATION)
    return model


def mixtral() -> nn.Module:
    """With a router loss."""
    sizes = {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "sliding_window": 5}
    return _made(transformers.MixtralConfig(**SMALL, **sizes, output_router_logits=True, router_aux_loss_coef=0.5))


BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "forced_eos_token_id": None,
}


def bart() -> nn.Module:
    return _made(transformers.BartConfig(**BART), transformers.AutoModelForSeq2SeqLM)


def lfm2() -> nn.Module:
    """Attention, and convolutions over tokens."""
    config = transformers.Lfm2Config(
        **SMALL, num_key_value_heads=2, intermediate_size=96, layer_types=["conv", "full_attention"]
    )
    return _made(config)


def dynamic() -> nn.Module:
    """Rotary frequencies that follow the length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    return _made(
        transformers.LlamaConfig(
            **SMALL, num_key_value_heads=2, intermediate_size=96, max_position_embeddings=8, rope_parameters=rope
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "bart": bart,
    "lfm2": lfm2,
    "dynamic": dynamic,
    "bloom": lambda: zoo.build("bloom-causal-lm"),
    "t5": lambda: zoo.build("t5-conditional-generation"),
}


def batch_of(model: Any, length: int = 19, decoded: int = 13) -> dict[str, torch.Tensor]:
    """Ragged, with few labels, of lengths that do not divide."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 99, (3, length), generator=generator)
    labels = torch.randint(5, 99, (3, decoded), generator=generator) if model.config.is_encoder_decoder else ids.clone()
    mask = (torch.arange(length) < length - 3 * torch.arange(3)[:, None]).long()
    if not model.config.is_encoder_decoder:
        labels[mask == 0] = -100
    labels[0, :5], labels[2, 9:] = -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compare_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    """(model, arguments of the plugin, whether the model is called itself)"""
    for name, arguments, called in cases:
        with keep_float64():
            model = MODELS[name]()
            try:
                compare(model, batch_of(model), arguments, called)
                if name == "dynamic":
                    batch = batch_of(model)
                    del batch["attention_mask"]
                    compare(MODELS[name](), batch, arguments, called)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise


CASES = [
    ("t5", {**ULYSSES, "zero_stage": 3}, True),
    ("t5", RING, False),
    ("bart", {**RING, "zero_stage": 1}, True),
    ("bloom", RING, False),
    ("lfm2", RING, True),
    ("mixtral", RING, True),
    ("dynamic", ULYSSES, True),
]
SWEEP = [
    (name, {**mode, **more}, called)
    for name in MODELS
    for mode in (ULYSSES, RING)
    for more, called in (({}, False), ({"zero_stage": 2}, True), ({"tp_size": 2, "sp_size": 2}, True))
]


def test_against_one_process() -> None:
    run_ranks(compare_all, 2, CASES, timeout=120)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_every_case(case: Any) -> None:
    run_ranks(compare_all, case[1]["sp_size"] * case[1].get("tp_size", 1), [case], timeout=120)


def test_what_is_split() -> None:
    """All of T5's attention, that across from decoder to encoder too; with dropout as without."""
    for rate in (0.0, 0.1):
        t5 = zoo.build("t5-conditional-generation", dropout_rate=rate)
        for mode in ("all_to_all", "ring_attn"):
            facts = probe_mode(mode, t5)
            assert isinstance(facts, LayerFacts)
            assert len(facts.plan.traded) == 3 * t5.config.num_layers  # type: ignore[union-attr]
            assert not facts.plan.whole


def mistakes(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES))
    model: Any = zoo.build("t5-conditional-generation", dtype=torch.float32)
    batch = batch_of(model)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def refused(words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=words):
            call()

    refused("call the model that boost returned", lambda: model.unwrap()(**batch))
    refused("cannot be padded along", lambda: model(**batch, extra=torch.ones(3, 3)))
    refused("output_attentions=True with sequence_parallelism_mode", lambda: model(**batch, output_attentions=True))
    refused("give what its decoder reads", lambda: model(input_ids=batch["input_ids"]))
    ids = batch["labels"]
    read = {"decoder_input_ids": ids.clamp(min=0)}
    refused(r"attention_mask of shape \(3, 5\)", lambda: model(**{**batch, "attention_mask": torch.ones(3, 5)}))
    few = {**batch, **read, "labels": ids[:2]}
    refused(r"'labels' of shape \(2, .* does not fit 3 sequences", lambda: model(**few))
    refused("no token to compute", lambda: model(input_ids=ids[:, :0], **read))
    front = torch.ones(3, 7, dtype=torch.long)
    front[1, :2] = 0
    decoder = {"decoder_input_ids": 3 + front, "decoder_attention_mask": front}
    refused(
        "decoder_attention_mask with padding in front .* 7 tokens",
        lambda: model(**{**batch, **decoder, "labels": 4 + front}),
    )
    model(**{**batch, **decoder, "labels": (4 + front).masked_fill(front == 0, -100)})  # nobody reads it
    refused("generate with sequence_parallelism_mode", lambda: model.generate(batch["input_ids"]))
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES))
    bloom: Any = zoo.build("bloom-causal-lm", dtype=torch.float32)
    bloom, *_ = booster.boost(bloom, torch.optim.SGD(bloom.parameters(), lr=0.1))
    ids = torch.arange(5, 24)[None]
    in_front = {"input_ids": ids, "labels": ids, "attention_mask": (ids > 7).long()}
    refused("19 tokens are padded to a multiple of 2; .* length of 20", lambda: bloom(**in_front))
    plugin = HybridParallelPlugin(precision="fp32", **ULYSSES)
    assert "1 Lfm2ShortConv of Lfm2ForCausalLM look along" in str(plugin.preflight(lfm2().float()).notes)
    layout = plugin.preflight(zoo.build("bloom-causal-lm", num_hidden_layers=2, slow_but_exact=True, pretraining_tp=2))
    assert "2 BloomAttention of BloomForCausalLM look along" in str(layout.notes)
    assert "sp" not in {row.axis for row in layout.traffic}  # which nothing is traded over


def test_mistakes() -> None:
    run_ranks(mistakes, 2)


def test_what_computes_its_loss_of_whole_logits_is_refused_in_pipelines() -> None:
    facts = LayerFacts(LayerPlan(), True, "computed", False, False)

    class Layout:
        pp_size, tp_size = 2, 1

    class Settings:
        sequence_mode, layout = "all_to_all", Layout()

    with pytest.raises(ValueError, match=r"pp_size=2 .*takes no shift_labels.*use pp_size=1"):
        check_layers(Settings(), facts, "OldForCausalLM")  # type: ignore[arg-type]


def test_layers_that_are_given_tokens_before_samples_are_named() -> None:
    xlnet = _made(transformers.XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16))
    with pytest.raises(ValueError, match=r"its layers are given \[length, batch, \.\.\.\], 22 tokens of 3 rows"):
        probe_mode("all_to_all", xlnet)
