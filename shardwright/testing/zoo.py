"""Tiny transformers models with random weights: every family with every task head, built from configs, offline.

    model = zoo.build("llama-causal-lm", dtype=torch.float64)
    loss = model(**zoo.inputs(model)).loss

Sizes are chosen to catch mistakes: a vocabulary of 101, 5 labels, 4 layers, a hidden size of 48 that differs from heads
x head size where the family allows it, fewer key/value heads than heads. Weights are large enough for attention to be
far from uniform, and every parameter is perturbed, so that none sits at the zero or one it was initialised with.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..interface.model import ModelWrapper
from ..utils.errors import nearest
from .inputs import Batch, make_inputs

INIT_STD = 0.15
PERTURBATION = 0.05

_DECODER = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": INIT_STD,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": False,
    "num_labels": 5,
}
_TEXT_HEADS = {
    "base": "{}Model",
    "causal_lm": "{}ForCausalLM",
    "sequence_classification": "{}ForSequenceClassification",
    "token_classification": "{}ForTokenClassification",
    "question_answering": "{}ForQuestionAnswering",
}
_BERT_HEADS = {
    **_TEXT_HEADS,
    "causal_lm": "{}LMHeadModel",
    "masked_lm": "{}ForMaskedLM",
    "multiple_choice": "{}ForMultipleChoice",
    "next_sentence": "{}ForNextSentencePrediction",
    "pretraining": "{}ForPreTraining",
}
_GPT2_HEADS = {**_TEXT_HEADS, "causal_lm": "{}LMHeadModel", "double_heads": "{}DoubleHeadsModel"}
_T5_HEADS = {
    "seq2seq_base": "{}Model",
    "encoder": "{}EncoderModel",
    "conditional_generation": "{}ForConditionalGeneration",
    "sequence_classification": "{}ForSequenceClassification",
    "token_classification": "{}ForTokenClassification",
    "question_answering": "{}ForQuestionAnswering",
}
_VIT_HEADS = {
    "image_base": "{}Model",
    "image_classification": "{}ForImageClassification",
    "masked_image": "{}ForMaskedImageModeling",
}
_LM_ONLY = ("causal_lm",)

_BERT = {
    **{
        name: _DECODER[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    },
    **{
        name: _DECODER[name]
        for name in ("max_position_embeddings", "initializer_range", "pad_token_id", "use_cache", "num_labels")
    },
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    **{
        name: _DECODER[name]
        for name in ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
    },
    **{name: _DECODER[name] for name in ("use_cache", "num_labels")},
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "summary_first_dropout": 0.0,
    "classifier_dropout": 0.0,
}
_T5 = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 88,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "classifier_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "initializer_factor": 0.5,
    "use_cache": False,
    "num_labels": 5,
}
_OPT = {
    **{
        name: _DECODER[name]
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "attention_dropout")
    },
    **{name: _DECODER[name] for name in ("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")},
    **{name: _DECODER[name] for name in ("use_cache", "num_labels")},
    "ffn_dim": 88,
    "word_embed_proj_dim": 48,
    "init_std": INIT_STD,
    "dropout": 0.0,
    "layerdrop": 0.0,
}
_BLOOM = {
    **{
        name: _DECODER[name]
        for name in ("vocab_size", "hidden_size", "initializer_range", "pad_token_id", "bos_token_id")
    },
    **{name: _DECODER[name] for name in ("eos_token_id", "use_cache", "num_labels", "attention_dropout")},
    "n_layer": 4,
    "n_head": 4,
    "hidden_dropout": 0.0,
}
_VIT = {
    **{
        name: _DECODER[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_labels")
    },
    "initializer_range": INIT_STD,
    "image_size": 20,
    "patch_size": 5,
    "encoder_stride": 5,
    "num_channels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_CHATGLM = {
    **{
        name: _DECODER[name]
        for name in ("hidden_size", "num_attention_heads", "initializer_range", "attention_dropout", "pad_token_id")
    },
    **{name: _DECODER[name] for name in ("bos_token_id", "eos_token_id", "tie_word_embeddings")},
    **{name: _DECODER[name] for name in ("use_cache", "num_labels")},
    "padded_vocab_size": 101,
    "num_layers": 4,
    "ffn_hidden_size": 88,
    "kv_channels": 16,
    "seq_length": 64,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
}
_CHATGLM_HEADS = {
    "base": "{}Model",
    "causal_lm": "{}ForConditionalGeneration",
    "sequence_classification": "{}ForSequenceClassification",
}
_CHATGLM_MODULE = "shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm"
# The default implementation of experts, grouped_mm, has no float64 kernel.
_MOE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_QWEN3_MOE = _MOE | {"moe_intermediate_size": 40, "num_experts": 4, "head_dim": 16}


@dataclass(frozen=True)
class _Variant:
    """One config of a family, with the heads that are built on it."""

    prefix: str  # of the transformers class names
    config: Mapping[str, Any]
    heads: Mapping[str, str] = field(default_factory=lambda: _TEXT_HEADS)
    only: tuple[str, ...] = ()  # tasks, when not all heads
    family: str = ""  # when it is not the variant's own name
    module: str = "transformers"  # that has the classes


_VARIANTS: dict[str, _Variant] = {
    "llama": _Variant("Llama", _DECODER),
    "llama-tied": _Variant("Llama", _DECODER | {"tie_word_embeddings": True}, only=_LM_ONLY, family="llama"),
    "llama-biased": _Variant(
        "Llama", _DECODER | {"attention_bias": True, "mlp_bias": True}, only=_LM_ONLY, family="llama"
    ),
    "mistral": _Variant("Mistral", _DECODER | {"sliding_window": 5, "head_dim": 16}),
    "qwen2": _Variant("Qwen2", _DECODER),
    "qwen2-tied": _Variant("Qwen2", _DECODER | {"tie_word_embeddings": True}, only=_LM_ONLY, family="qwen2"),
    "qwen3": _Variant("Qwen3", _DECODER | {"head_dim": 16}),
    "qwen3-tied": _Variant(
        "Qwen3", _DECODER | {"head_dim": 16, "tie_word_embeddings": True}, only=_LM_ONLY, family="qwen3"
    ),
    "qwen3-moe": _Variant("Qwen3Moe", _DECODER | _QWEN3_MOE, only=_LM_ONLY),
    "mixtral": _Variant("Mixtral", _DECODER | _MOE | {"num_local_experts": 4}, only=_LM_ONLY),
    "gpt2": _Variant("GPT2", _GPT2, _GPT2_HEADS),
    "gpt2-untied": _Variant("GPT2", _GPT2 | {"tie_word_embeddings": False}, _GPT2_HEADS, only=_LM_ONLY, family="gpt2"),
    "bert": _Variant("Bert", _BERT, _BERT_HEADS),
    "bert-untied": _Variant(
        "Bert", _BERT | {"tie_word_embeddings": False}, _BERT_HEADS, only=("masked_lm",), family="bert"
    ),
    "t5": _Variant("T5", _T5, _T5_HEADS),
    "t5-gated": _Variant(
        "T5",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "initializer_factor": 0.2},
        _T5_HEADS,
        only=("conditional_generation",),
        family="t5",
    ),
    "opt": _Variant("OPT", _OPT, {task: name for task, name in _TEXT_HEADS.items() if task != "token_classification"}),
    "opt-projected": _Variant("OPT", _OPT | {"word_embed_proj_dim": 40}, only=_LM_ONLY, family="opt"),
    "bloom": _Variant("Bloom", _BLOOM),
    "vit": _Variant("ViT", _VIT, _VIT_HEADS),
    "chatglm": _Variant("ChatGLM", _CHATGLM, _CHATGLM_HEADS, module=_CHATGLM_MODULE),
    "chatglm-plain": _Variant(
        "ChatGLM",
        _CHATGLM
        | {
            "multi_query_attention": False,
            "rmsnorm": False,
            "add_bias_linear": True,
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": True,
        },
        _CHATGLM_HEADS,
        only=_LM_ONLY,
        family="chatglm",
        module=_CHATGLM_MODULE,
    ),
}


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    name        "<variant>-<task>", for example "llama-tied-causal-lm"
    family      transformers family, for example "llama"
    task        what the head does: decides the inputs (see `inputs.TASKS`)
    model_class, config_class   names in `module`
    config      keyword arguments of the config
    """

    name: str
    family: str
    task: str
    model_class: str
    config_class: str
    config: Mapping[str, Any]
    module: str = "transformers"


def _entries() -> dict[str, Entry]:
    entries = {}
    for variant, spec in _VARIANTS.items():
        for task in spec.only or spec.heads:
            name = f"{variant}-{task.replace('_', '-')}"
            config = dict(spec.config)
            if task == "question_answering":
                config["num_labels"] = 2  # a start and an end score: some heads size their output by it, others fix it
            if spec.prefix == "Bert" and task == "causal_lm":
                config["is_decoder"] = True
            model_class = spec.heads[task].format(spec.prefix)
            config_class = f"{spec.prefix}Config"
            entries[name] = Entry(name, spec.family or variant, task, model_class, config_class, config, spec.module)
    return entries


ENTRIES: dict[str, Entry] = _entries()


def names(family: str | None = None, task: str | None = None) -> list[str]:
    """Names of the models, of one family and with one task where these are given."""
    for label, value, known in (("family", family, _known("family")), ("task", task, _known("task"))):
        if value is not None and value not in known:
            raise ValueError(f"{label}={value!r} is not one of {', '.join(known)}{nearest(value, known)}")
    return [entry.name for entry in ENTRIES.values() if family in (None, entry.family) and task in (None, entry.task)]


def _known(attribute: str) -> list[str]:
    return sorted({getattr(entry, attribute) for entry in ENTRIES.values()})


def entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise ValueError(
            f"{name!r} is not in the zoo{nearest(name, ENTRIES)}; shardwright.testing.zoo.names() lists all"
        )
    return ENTRIES[name]


def config(name: str, **overrides: Any) -> Any:
    """The transformers config of a model; `overrides` replace single settings (`num_hidden_layers=8`)."""
    found = entry(name)
    return getattr(_module(found), found.config_class)(**{**found.config, **overrides})


def _module(found: Entry) -> Any:
    return importlib.import_module(found.module)  # late: it takes seconds, and rank processes may not need it


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> nn.Module:
    """The model `name` in training mode. Equal arguments give equal weights; every dtype gets the same (rounded)
    values.

    The caller's random state is left alone.
    """
    model_config = config(name, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(_module(entry(name)), entry(name).model_class)(model_config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=PERTURBATION)
    return model.to(dtype).train()


def inputs(
    model: nn.Module | str,
    batch_size: int = 4,
    seq_len: int = 13,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Batch:
    """A batch for a model of the zoo or for its name (then `overrides` are those given to `build`).

    Images come in `dtype`, by default that of the model's parameters, or float64 for a name.
    """
    if isinstance(model, str):
        return make_inputs(
            entry(model).task, config(model, **overrides), batch_size, seq_len, seed, dtype or torch.float64
        )
    if overrides:
        raise ValueError(f"{', '.join(overrides)}: a model brings its own config; overrides go with a name")
    plain: Any = model.unwrap() if isinstance(model, ModelWrapper) else model
    return make_inputs(
        _task_of(plain), plain.config, batch_size, seq_len, seed, dtype or next(plain.parameters()).dtype
    )


def _task_of(model: nn.Module) -> str:
    """By class; sharded models are subclasses of the original one."""
    tasks = {entry.model_class: entry.task for entry in ENTRIES.values()}
    for base in type(model).__mro__:
        if base.__name__ in tasks:
            return tasks[base.__name__]
    raise ValueError(
        f"{type(model).__name__} is not a class of the zoo; use shardwright.testing.inputs.make_inputs(task, "
        "model.config)"
    )
