"""Tiny configs for every causal language model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto import modeling_auto

from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm import ChatGLMForConditionalGeneration
from shardwright.testing.matrix.sizes import parts_of, sizes_of

LARGEST = 20_000_000  # parameters


def causal_language_models() -> dict[str, str]:
    """model_type -> class, for all that `AutoModelForCausalLM` knows, and those that are written here."""
    own = {ChatGLMConfig.model_type: ChatGLMForConditionalGeneration.__name__}
    return {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **own}


def config(model_type: str, settings: Mapping[str, Any] | None = None) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**sizes_of(config_class), **(settings or {})})


def build(model_type: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """In double precision and training mode, without dropout; no parameter is left at the zero or one it was
    initialised with.
    """
    made = config(model_type, settings)
    for part in (made, getattr(made, "text_config", None)):
        if part is not None:
            part._experts_implementation = "eager"  # the grouped kernels have no double precision
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    own = [name for name, part, _ in parts_of(type(made)) if part is model_class.config_class]
    if own and type(made) is not model_class.config_class:  # the language model of a larger whole
        made = getattr(made, own[0])
    with torch.device("meta"):
        size = sum(param.numel() for param in model_class._from_config(made).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters: a size that the tiny config does not know")
    torch.manual_seed(seed)
    model = model_class._from_config(made)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn_like(param), alpha=0.02)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


def inputs(model: nn.Module) -> dict[str, Any]:
    """Sequences of different lengths, labels for a part of them."""
    generator = torch.Generator().manual_seed(3)
    text: Any = model.config.get_text_config()
    ids = torch.randint(5, min(text.vocab_size, 99), (3, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5] = -100
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    books = getattr(text, "num_codebooks", None)
    if hasattr(model, "lm_heads") and books is not None:  # a row of ids, and a label, for every codebook
        made["input_ids"] = torch.randint(5, 99, (3 * books, 16), generator=generator)
        made["labels"] = made["input_ids"].view(3, books, 16).transpose(1, 2).masked_fill(labels[..., None] < 0, -100)
    if model.config.model_type == "prophetnet":  # adds up lowest numbers, of which double precision has no sum
        del made["attention_mask"]
    if model.config.model_type == "git":  # its labels count from behind the image
        size = model.config.vision_config.image_size
        made["pixel_values"] = torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64)
    return made
