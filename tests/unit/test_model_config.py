"""Facts that configs hold, whatever the family's names for them are, and in which part they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from shardwright.models.config import (
    config_of,
    hidden_size,
    is_encoder_decoder,
    num_experts,
    parts,
    text_config,
    text_part,
    visited_share,
)
from shardwright.pipeline.cut.partition import attention_costs, chain_costs
from shardwright.pipeline.cut.surveyor import survey_model
from shardwright.pipeline.planning.placement import Placement
from shardwright.testing import zoo

TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
WIDTH = 4 * 6


def llava() -> tf.LlavaConfig:
    return tf.LlavaConfig(
        text_config=tf.LlamaConfig(**TEXT), vision_config=tf.CLIPVisionConfig(**VISION), image_token_id=63
    )


def gemma3() -> tf.Gemma3Config:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**TEXT, layer_types=kinds, sliding_window=20),
        vision_config=tf.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_id=63,
    )


# keys that a token of 100 meets on average in every layer
COMPOSITES: dict[str, tuple[Callable[[], nn.Module], list[float]]] = {
    "llava": (lambda: tf.LlavaForConditionalGeneration(llava()), [50, 50, 50]),
    "gemma3": (lambda: tf.Gemma3ForConditionalGeneration(gemma3()), [18, 50, 18]),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_attention_of_a_part_counts_in_the_cut(name: str) -> None:
    build, keys = COMPOSITES[name]
    with torch.device("meta"):
        model = build()
    survey = survey_model(model)
    assert survey.num_units == 2 + 3  # of the images, of the text
    counted = chain_costs(model, survey, Placement(1), length=100).forward
    without = chain_costs(model, survey, Placement(1)).forward
    added = [with_it - plain for with_it, plain in zip(counted, without, strict=True)]
    assert added == pytest.approx([0.0, 0.0, *(2 * number * WIDTH for number in keys), 0.0])
    # layers of another number are those of the images, of which the text's config says nothing
    assert attention_costs(model, 2, 100) == [0.0, 0.0]


def test_names_of_families() -> None:
    assert hidden_size(zoo.build("gpt2-causal-lm")) == zoo.config("gpt2-causal-lm").n_embd
    assert hidden_size(zoo.build("t5-conditional-generation")) == zoo.config("t5-conditional-generation").d_model
    assert is_encoder_decoder(zoo.build("t5-conditional-generation"))
    mixtral, qwen = zoo.build("mixtral-causal-lm"), zoo.build("qwen3-moe-causal-lm")
    assert (num_experts(mixtral), num_experts(qwen)) == (mixtral.config.num_local_experts, qwen.config.num_experts)
    assert visited_share(qwen) == qwen.config.num_experts_per_tok / qwen.config.num_experts < 1
    plain = nn.Linear(2, 2)
    assert (config_of(plain), text_config(plain), hidden_size(plain)) == (None, None, None)
    assert (visited_share(plain), is_encoder_decoder(plain)) == (1.0, False)


def test_parts_of_a_config() -> None:
    config = llava()
    assert {type(part) for part in parts(config)} == {tf.LlavaConfig, tf.LlamaConfig, tf.CLIPVisionConfig}
    assert text_part(config) is config.text_config
    several = tf.MusicgenConfig(text_encoder=tf.T5Config(), audio_encoder=tf.EncodecConfig(), decoder=tf.OPTConfig())
    assert text_part(several) is several  # transformers does not choose between its two
