"""Find the policy for a model: an own one by its model type, else transformers' plan."""

from __future__ import annotations

from importlib import import_module

import torch.nn as nn

from shardwright.shardformer.policies.base import Policy

# model_type of the config -> module of this package, class
_OWN = {
    "llama": ("llama", "LlamaPolicy"),
    "mistral": ("llama", "LlamaPolicy"),
    "qwen2": ("llama", "LlamaPolicy"),
    "qwen3": ("llama", "Qwen3Policy"),
    "gpt2": ("gpt2", "GPT2Policy"),
    "bert": ("bert", "BertPolicy"),
    "roberta": ("bert", "BertPolicy"),
    "camembert": ("bert", "BertPolicy"),
    "xlm-roberta": ("bert", "BertPolicy"),
    "electra": ("bert", "BertPolicy"),
    "ernie": ("bert", "BertPolicy"),
    "t5": ("t5", "T5Policy"),
    "opt": ("opt", "OPTPolicy"),
    "bloom": ("bloom", "BloomPolicy"),
    "falcon": ("falcon", "FalconPolicy"),
    "gpt_neox": ("gpt_neox", "GPTNeoXPolicy"),
    "gptj": ("gpt_neox", "GPTJPolicy"),
    "gpt_oss": ("gpt_oss", "GptOssPolicy"),
    "phi": ("phi", "PhiPolicy"),
    "phi3": ("phi", "Phi3Policy"),
    "mixtral": ("moe", "MixtralPolicy"),
    "qwen2_moe": ("moe", "Qwen2MoePolicy"),
    "qwen3_moe": ("moe", "Qwen3MoePolicy"),
    "deepseek_v2": ("moe", "DeepseekPolicy"),
    "deepseek_v3": ("moe", "DeepseekPolicy"),
}


def get_autopolicy(model: nn.Module) -> Policy:
    """A fresh policy for `model`.

    Raises ValueError for models that are neither known nor have a plan in transformers.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in _OWN:
        module, name = _OWN[kind]
        return getattr(import_module(f"shardwright.shardformer.policies.{module}"), name)()
    if kind is None:
        raise ValueError(
            f"{type(model).__name__} is no transformers model, so no policy can be found for it; pass policy=, to the plugin custom_policy="
        )
    from shardwright.shardformer.policies.generic import GenericPolicy

    return GenericPolicy()
