"""Find the policy for a model: an own one by its model type, else transformers' plan."""

from __future__ import annotations

from importlib import import_module

import torch.nn as nn

from ..layer.parallel_module import native_class
from .base import Policy
from .generic import GenericPolicy

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
    "mt5": ("t5", "T5Policy"),
    "bart": ("bart", "BartPolicy"),
    "mbart": ("bart", "BartPolicy"),
    "pegasus": ("bart", "BartPolicy"),
    "marian": ("bart", "BartPolicy"),
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


# What users registered: a class of models, or a model_type, -> policy.
_registered: dict[type[nn.Module] | str, type[Policy]] = {}


def register_policy(model_type_or_class: str | type[nn.Module], policy_class: type[Policy]) -> None:
    """Let models of a class (and its subclasses), or of a `model_type`, be sharded by `policy_class` where no other is
    passed.

    A class counts before a model type, a nearer base class before a farther one, and both before the policies that come
    with the package. Registering again replaces the policy.
    """
    key = model_type_or_class
    if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
        raise ValueError(
            f"model_type_or_class={key!r} must be the model_type of a config, such as 'llama', or a class of models"
        )
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        meant = f"; pass the class: {type(policy_class).__name__}" if isinstance(policy_class, Policy) else ""
        raise ValueError(f"policy_class={policy_class!r} must be a subclass of shardwright.shardformer.Policy{meant}")
    _registered[key] = policy_class


def get_autopolicy(model: nn.Module) -> Policy:
    """A fresh policy for `model`.

    Raises ValueError for models that are neither known nor have a plan in transformers.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    for key in (*native_class(model).__mro__, kind):
        if key in _registered:
            return _registered[key]()
    if kind in _OWN:
        module, name = _OWN[kind]
        return getattr(import_module(f"shardwright.shardformer.policies.{module}"), name)()
    if kind is None:
        raise ValueError(
            f"{type(model).__name__} is no transformers model, so no policy can be found for it; pass policy=, to the "
            "plugin custom_policy=, or name one for its class with shardwright.shardformer.register_policy"
        )
    return GenericPolicy()
