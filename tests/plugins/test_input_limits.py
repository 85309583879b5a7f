"""What a model cannot take is refused, and nothing else: batches of every tiny model pass."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    TapasConfig,
    TapasModel,
)

from shardwright.plugins.data.input_limits import InputLimits
from shardwright.testing import zoo
from shardwright.testing.matrix.sizes import sizes_of

SMALL: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 16}


@pytest.mark.parametrize("name", zoo.names())
def test_good_batches_of_every_model_pass(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name, dtype=torch.float32)
    batch = zoo.inputs(name, batch_size=3, seq_len=12)
    limits = InputLimits(model)
    limits.check(batch)
    checked = {limit.key for limit in limits.values}
    assert "input_ids" in checked or "input_ids" not in batch
    for limit in limits.values:
        if isinstance(batch.get(limit.key), torch.Tensor) and not batch[limit.key].is_floating_point():
            wrong = batch[limit.key].clone()
            wrong.view(-1)[-1] = limit.high
            with pytest.raises(ValueError, match=rf"^{limit.key}\[.*\]={limit.high} is outside"):
                limits.check({**batch, limit.key: wrong})


def refuses(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether the limits refuse the batch, which must be so exactly when the model itself fails on it."""
    try:
        with torch.no_grad():
            model(**batch)
        fails = False
    except (IndexError, RuntimeError):
        fails = True
    try:
        InputLimits(model).check(batch)
        refused = False
    except ValueError:
        refused = True
    assert refused == fails, "the model disagrees with its limits"
    return refused


def ids(length: int, low: int = 4) -> torch.Tensor:
    return torch.randint(low, 40, (2, length), generator=torch.Generator().manual_seed(0))


def test_lengths_are_those_that_the_models_take() -> None:
    roberta = RobertaForMaskedLM(
        RobertaConfig(**SMALL, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    padded = ids(16)
    padded[:, 14:] = roberta.config.pad_token_id
    opt = OPTForCausalLM(
        OPTConfig(**SMALL, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8, word_embed_proj_dim=8)
    )
    sizes = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    bart = BartForConditionalGeneration(BartConfig(**SMALL, **sizes, encoder_ffn_dim=8, decoder_ffn_dim=8))
    assert [refuses(roberta, {"input_ids": ids(length)}) for length in (14, 15)] == [False, True]
    assert not refuses(roberta, {"input_ids": padded})  # padding takes no position
    assert [refuses(opt, {"input_ids": ids(length)}) for length in (16, 17)] == [False, True]
    for source, target in ((16, 16), (17, 16), (16, 17)):
        assert refuses(bart, {"input_ids": ids(source), "decoder_input_ids": ids(target)}) == (source + target > 32)
        assert refuses(bart, {"input_ids": ids(source), "labels": ids(target)}) == (source + target > 32)


def test_what_models_take_beyond_their_tables() -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    fsmt = FSMTForConditionalGeneration(
        FSMTConfig(
            langs=["a", "b"],
            src_vocab_size=40,
            tgt_vocab_size=40,
            d_model=8,
            **sizes,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            max_position_embeddings=16,
        )
    )
    assert not refuses(fsmt, {"input_ids": ids(20), "labels": ids(20)})  # its table of positions grows
    tapas = TapasModel(
        TapasConfig(**SMALL, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    cells = torch.zeros(2, 20, 7, dtype=torch.int64)
    cells[:, :, 1] = cells[:, :, 2] = torch.arange(20) // 5
    assert not refuses(tapas, {"input_ids": ids(20), "token_type_ids": cells})  # it counts the tokens of a cell
    phi4 = Phi4MultimodalForCausalLM(Phi4MultimodalConfig(**sizes_of(Phi4MultimodalConfig)))
    assert not refuses(phi4, {"input_ids": ids(20)})  # its table of positions is that of an image's 16 patches
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    labels = ids(8)
    labels[:, 1] = -1
    assert not refuses(gpt2, {"input_ids": ids(8), "labels": labels, "ignore_index": -1})
    assert refuses(gpt2, {"input_ids": ids(8), "labels": labels})
    text = {
        "model_type": "gemma",
        "vocab_size": 40,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "head_dim": 4,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    paligemma = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", **vision, "projection_dim": 8},
            text_config={**text, "num_attention_heads": 2, "num_key_value_heads": 2},
            image_token_id=45,
            projection_dim=8,
            hidden_size=8,
        )
    )
    image = ids(8)
    image[:, :4] = 45  # replaced by the image before the table is asked
    assert not refuses(
        paligemma,
        {"input_ids": image, "pixel_values": torch.ones(2, 3, 8, 8), "attention_mask": torch.ones_like(image)},
    )


def test_a_model_of_any_kind_has_no_limits_that_nobody_knows() -> None:
    limits = InputLimits(nn.Sequential(nn.Linear(3, 3)))
    limits.check({"input_ids": torch.tensor([-5]), "labels": torch.tensor([10**6])})
    assert limits.values == [] == limits.lengths


def test_the_check_costs_microseconds() -> None:
    with torch.device("meta"):
        limits = InputLimits(zoo.build("gpt2-causal-lm", dtype=torch.float32))
    tokens = torch.randint(1, 101, (8, 60))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens % 3 == 0, -100),
    }

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(50):
            limits.check(batch)
        return (time.perf_counter() - start) / 50

    assert min(seconds() for _ in range(5)) < 2e-3  # some 30 microseconds on an idle core


@pytest.mark.parametrize("name", ["llama-causal-lm", "bert-sequence-classification", "gpt2-causal-lm", "opt-causal-lm"])
def test_what_devices_say_fits_into_their_assertions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's takes 254 bytes, and says nothing of why it fails with more."""
    said = list[str]()
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: said.append(message))
    limits = InputLimits(zoo.build(name))
    limits.check({limit.key: torch.zeros(2, 3, dtype=torch.int64, device="meta") for limit in limits.values})
    assert len(said) == len(limits.values) > 1
    for limit, message in zip(limits.values, said, strict=True):
        assert len(message.encode()) <= 254
        assert f"an entry of {limit.key} is outside of {limit.what}: entries must lie in 0..{limit.high - 1}" in message
        assert message.endswith("...") or limit.advice in message
