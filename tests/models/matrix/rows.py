"""Families and their classes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwright.shardformer.modeling.chatglm2_6b import modeling_chatglm
from shardwright.testing.matrix import Subject

# Family -> model types of transformers.
FAMILIES: dict[str, str] = {
    # The twelve of ColossalAI's own matrix.
    "Llama": "llama",
    "OPT": "opt",
    "BLOOM": "bloom",
    "ChatGLM2": "chatglm",
    "BERT": "bert",
    "GPT-2": "gpt2",
    "T5": "t5",
    "ViT": "vit",
    "Whisper": "whisper",
    "SAM": "sam",
    "BLIP-2": "blip-2",
    "Falcon": "falcon",
    "RoBERTa": "roberta",
    "ALBERT": "albert",
    "ERNIE": "ernie",
    "GPT-Neo": "gpt_neo",
    "GPT-J": "gptj",
    "BEiT": "beit",
    "Swin": "swin",
    "Swin V2": "swinv2",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5_text qwen3_5 qwen3_5_moe_text qwen3_5_moe",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text gemma3",
    "Gemma 3n": "gemma3n_text gemma3n",
    "Phi-3": "phi3",
    "Phi-4 multimodal": "phi4_multimodal",
    "Cohere": "cohere",
    "Cohere 2": "cohere2",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "GPT-NeoX": "gpt_neox",
    "GPT-OSS": "gpt_oss",
    "GLM 4": "glm4",
    "GLM 4.5": "glm4_moe",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "Granite 3": "granite",
    "Granite 4": "granitemoehybrid",
    "StarCoder2": "starcoder2",
    "Llama 4": "llama4_text llama4",
    "MiniMax": "minimax minimax_m2",
    "Kimi": "kimi_linear kimi_k25",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl",
    "LLaVA": "llava",
    "CLIP": "clip",
    "SigLIP": "siglip siglip2",
    "DINOv2": "dinov2",
    "DINOv3": "dinov3_vit",
    "Electra": "electra",
    "DeBERTa-v2": "deberta-v2",
    "ModernBERT": "modernbert",
    "BART": "bart",
    "mT5": "mt5",
    "mBART": "mbart",
    "Pegasus": "pegasus",
    "Wav2Vec2": "wav2vec2",
    "Moonshine": "moonshine",
    "Mamba": "mamba",
    "Mamba-2": "mamba2",
    "Bamba": "bamba",
    "Jamba": "jamba",
    "Falcon-H1": "falcon_h1",
    "RecurrentGemma": "recurrent_gemma",
    "xLSTM": "xlstm",
    "RWKV": "rwkv",
    "LFM2": "lfm2",
}
# The class that a family's page row shows: the first of these that it has.
_FIRST = (
    *("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification"),
    *("ForCTC", "ForVision2Seq", "Model"),
)
_FIRST_OF = {"BERT": "BertForMaskedLM", "ERNIE": "ErnieForMaskedLM", "RoBERTa": "RobertaForMaskedLM"}
_FIRST_OF |= {"Electra": "ElectraForMaskedLM", "DeBERTa-v2": "DebertaV2ForMaskedLM"}
_FIRST_OF |= {"BART": "BartForConditionalGeneration", "mBART": "MBartForConditionalGeneration"}
_FIRST_OF |= {"Pegasus": "PegasusForConditionalGeneration", "Whisper": "WhisperForConditionalGeneration"}
# Kinds of models -> the mappings of transformers' auto classes that the sweep goes through.
KINDS = {
    "causal LM": ("CAUSAL_LM",),
    "masked LM": ("MASKED_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "image": ("IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "VIDEO_CLASSIFICATION"),
    "audio": ("AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ"),
    "multimodal": (
        *("IMAGE_TEXT_TO_TEXT", "VISUAL_QUESTION_ANSWERING", "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASK_GENERATION"),
    ),
}
MAPPINGS = tuple(mapping for kind in KINDS.values() for mapping in kind)


@dataclass(frozen=True)
class Row:
    """`family` is the mapping for rows of the sweep; `first` rows stand for their model type, and run on every axis."""

    family: str
    model_type: str
    subject: Subject
    first: bool = False


def family_rows(family: str) -> list[Row]:
    """For every model type of the family, the class that stands for it, then the others."""
    rows = []
    for model_type in FAMILIES[family].split():
        subjects = classes_of(model_type)
        names = [subject.model_class for subject in subjects]
        first = _FIRST_OF.get(family) or next(
            (name for ending in _FIRST for name in names if name.endswith(ending)), names[0]
        )
        rows += [Row(family, model_type, subject, subject.model_class == first) for subject in subjects]
    return sorted(rows, key=lambda row: not row.first)


@functools.cache
def classes_of(model_type: str) -> tuple[Subject, ...]:
    """All models of transformers with this kind of config, bare ones and those with heads."""
    if model_type == "chatglm":
        names = ("ChatGLMForConditionalGeneration", "ChatGLMForSequenceClassification", "ChatGLMModel")
        return tuple(Subject(name, modeling_chatglm.__name__) for name in names)
    config_class = CONFIG_MAPPING[model_type]
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    module: Any = importlib.import_module(name)
    found = [
        each
        for each, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == name
        and value.config_class is config_class
        and each in module.__all__
        and value.forward is not nn.Module.forward  # not the base of the others
    ]
    return tuple(Subject(each) for each in found)


def sweep_rows(asked: Iterable[str] = ()) -> Iterator[Row]:
    """Every class of the mappings once; of those asked for, where some are, by their names or those of kinds."""
    words = [word.lower() for word in asked]
    known = {word.lower() for word in (*KINDS, *MAPPINGS)}
    for word in words:
        if word not in known:
            raise SystemExit(f"--mapping {word}: kinds and mappings are {', '.join((*KINDS, *MAPPINGS))}")
    seen: set[str] = set()
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            if words and not {kind.lower(), mapping.lower()} & set(words):
                continue
            for model_type, subject in _of_mapping(mapping):
                if subject.model_class not in seen:
                    seen.add(subject.model_class)
                    yield Row(mapping, model_type, subject)


def _of_mapping(mapping: str) -> Iterator[tuple[str, Subject]]:
    for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
        yield model_type, Subject(names if isinstance(names, str) else names[0])
    if mapping == "CAUSAL_LM":
        yield "chatglm", classes_of("chatglm")[0]


@functools.cache
def kinds_of(model_class: str) -> tuple[str, ...]:
    """Kinds of models that the class is one of."""
    return tuple(
        kind
        for kind, mappings in KINDS.items()
        if any(subject.model_class == model_class for mapping in mappings for _, subject in _of_mapping(mapping))
    )
