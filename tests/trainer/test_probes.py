"""Models that cannot be trained as a recipe says, found out on a small copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.trainer import RecipeError
from shardwright.trainer.probes import check_order, check_packing

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260}


def model_of(kind: str, **settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | settings))


@pytest.mark.parametrize(
    ("kind", "settings", "apart"),
    [
        ("llama", {"intermediate_size": 64}, True),
        ("mixtral", {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2}, True),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, True),
        ("bloom", {}, False),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, False),
        ("mamba", {"state_size": 4}, False),
        ("bert", {"intermediate_size": 64, "is_decoder": True}, False),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_packing_where_samples_would_see_each_other(kind: str, settings: dict[str, Any], apart: bool) -> None:
    model = model_of(kind, **settings)
    check_order(model)
    if apart:
        check_packing(model)
        return
    with pytest.raises(RecipeError, match=f"packing: true, and a {kind} .* say packing: false"):
        check_packing(model)


def test_a_model_that_reads_both_ways_is_none() -> None:
    """A BERT without is_decoder is in transformers' list of causal models."""
    with pytest.raises(RecipeError, match=r"in both directions.*is_decoder: true"):
        check_order(model_of("bert", intermediate_size=64))
