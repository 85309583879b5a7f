"""Find the policy for a model: an own one by its model type, else transformers' plan."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any

import torch.nn as nn

from ..layer.parallel_module import native_class
from .base import Policy
from .generic import ADVICE, GenericPolicy

_LOGGER = logging.getLogger(__name__)
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
    "musicgen_decoder": ("bart", "MusicgenPolicy"),
    "musicgen_melody_decoder": ("bart", "MusicgenPolicy"),
    "opt": ("opt", "OPTPolicy"),
    "bloom": ("bloom", "BloomPolicy"),
    "falcon": ("falcon", "FalconPolicy"),
    "chatglm": ("chatglm", "ChatGLMPolicy"),
    "gpt_neox": ("gpt_neox", "GPTNeoXPolicy"),
    "gptj": ("gpt_neox", "GPTJPolicy"),
    "dbrx": ("dbrx", "DbrxPolicy"),
    "jetmoe": ("jetmoe", "JetMoePolicy"),
    "gpt_oss": ("gpt_oss", "GptOssPolicy"),
    "phi": ("phi", "PhiPolicy"),
    "phi3": ("phi", "Phi3Policy"),
    "xlnet": ("xlnet", "XLNetPolicy"),
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

    A class may be named instead ("LlamaForCausalLM", or with its module in front). It counts before a model type, a
    nearer base class before a farther one, and both before the policies that come with the package. Registering again
    replaces the policy.
    """
    key = model_type_or_class
    is_class = isinstance(key, type) and issubclass(key, nn.Module) and key is not nn.Module
    if not is_class and not (isinstance(key, str) and key.strip()):
        meant = "; the policy comes second" if _is_policy(key) else ""
        meant = f"; use its class, {type(key).__name__}" if isinstance(key, nn.Module) else meant
        raise ValueError(
            f"model_type_or_class={key!r} must be the model_type of a config, such as 'llama', or a class of models"
            f"{meant}"
        )
    if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
        meant = f"; pass the class: {type(policy_class).__name__}" if isinstance(policy_class, Policy) else ""
        raise ValueError(f"policy_class={policy_class!r} must be a subclass of shardwright.shardformer.Policy{meant}")
    if policy_class is Policy or inspect.isabstract(policy_class):
        raise ValueError(f"policy_class={policy_class.__name__} says nothing about a model; derive one from it")
    required = [
        name
        for name, parameter in inspect.signature(policy_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ValueError(
            f"policy_class={policy_class.__name__} is built without arguments, and needs {', '.join(required)}; give "
            "them defaults, or pass an instance: policy=, to the plugin custom_policy="
        )
    if isinstance(key, str):
        _check_name(key)
    _registered[key] = policy_class


def _check_name(name: str) -> None:
    """In another case a model_type may be the name of a user's class; with spaces around it, it is nobody's."""
    known = _same_but_for_writing(name)
    if name != name.strip():
        raise ValueError(
            f"model_type_or_class={name!r} has spaces around it, so no model goes by it - did you mean "
            f"{known or name.strip()!r}?"
        )
    if known is not None and known != name:
        _LOGGER.warning(
            f"register_policy({name!r}): models of the model_type {known!r} do not go by this name, only a class that "
            "is called so; did you mean the type?"
        )


def _same_but_for_writing(name: str) -> str | None:
    def plain(text: str) -> str:
        return "".join(letter for letter in text.casefold() if letter.isalnum())

    return name if name in _OWN else next((known for known in _OWN if plain(known) == plain(name)), None)


def _is_policy(value: object) -> bool:
    return isinstance(value, Policy) or (isinstance(value, type) and issubclass(value, Policy))


def _built(policy_class: type[Policy], key: Any) -> Policy:
    try:
        return policy_class()
    except Exception as error:
        name = key if isinstance(key, str) else key.__name__
        raise ValueError(
            f"policy_class={policy_class.__name__}, which was registered for {name!r}, raised {type(error).__name__} "
            f"when it was built: {error}"
        ) from error


def get_autopolicy(model: nn.Module) -> Policy:
    """A fresh policy for `model`.

    Raises ValueError for models that are neither known nor have a plan in transformers.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    key = _registered_key(model)
    if key is not None:
        return _built(_registered[key], key)
    if kind in _OWN:
        module, name = _OWN[kind]
        return getattr(import_module(f"shardwright.shardformer.policies.{module}"), name)()
    if kind is None:
        raise ValueError(
            f"{type(model).__name__} is no transformers model, so no policy can be found for it; pass policy=, to the "
            "plugin custom_policy= ('auto', with example_inputs=, infers one and tries it on a small copy), or "
            f"name one for its class with shardwright.shardformer.register_policy. {ADVICE}"
        )
    return GenericPolicy()


def has_policy(model: nn.Module) -> bool:
    """Whether `get_autopolicy` finds one: for models of transformers, and for those that one was registered for."""
    return is_registered(model) or getattr(getattr(model, "config", None), "model_type", None) is not None


def is_registered(model: nn.Module) -> bool:
    """Whether `register_policy` named a policy for this model."""
    return _registered_key(model) is not None


def _registered_key(model: nn.Module) -> Any:
    """Its class, the name of one, or its model type, whichever comes first; None where none was named."""
    classes = native_class(model).__mro__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    keys = (*(key for cls in classes for key in (cls, cls.__name__, f"{cls.__module__}.{cls.__name__}")), kind)
    return next((key for key in keys if key in _registered), None)
