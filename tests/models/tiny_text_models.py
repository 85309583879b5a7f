"""A tiny random model of nearly every text model type of transformers, by shrinking the sizes its config is known to
have.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwright.testing.matrix.sizes import sizes_of

MAX_PARAMETERS = 20_000_000
_AUTO_CLASS = {"clm": "AutoModelForCausalLM", "s2s": "AutoModelForSeq2SeqLM", "mlm": "AutoModelForMaskedLM"}


def text_types() -> dict[str, str]:
    """Every model type with a language modelling head, and its kind of head."""
    from transformers.models.auto import modeling_auto as auto

    types: dict[str, str] = {}
    for head, mapping in (
        ("clm", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("s2s", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("mlm", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        for model_type in mapping:
            types.setdefault(model_type, head)
    return types


def tiny_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**sizes_of(config_class))
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def build(model_type: str, **changes: Any) -> nn.Module:
    """The model in float64, without dropout, every parameter away from its initial zero or one. Always the same
    weights.

    changes   of its config
    """
    import transformers

    auto = getattr(transformers, _AUTO_CLASS[text_types()[model_type]])
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{model_type} has {size} parameters in its smallest known config")
    torch.manual_seed(0)
    model = auto.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # grouped_mm has no float64 kernel
    return model.double().train()


def inputs(model: nn.Module, samples: int = 4, length: int = 16) -> Mapping[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    vocabulary = min(model.config.get_text_config().vocab_size, 99)
    ids = torch.randint(5, vocabulary, (samples, length), generator=generator)
    labels = torch.randint(5, vocabulary, (samples, length), generator=generator)
    labels[0, :3] = -100
    labels[1, 2:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
