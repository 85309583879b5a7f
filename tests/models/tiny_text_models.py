"""A tiny random model of nearly every text model type of transformers, by shrinking the sizes its config is known to
have.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, HEADS, VOCABULARY = 64, 4, 4, 120

_VALUES: tuple[tuple[int | float, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size model_dim hidden_dim "
        "encoder_hidden_size encoder_embed_dim decoder_hidden_size attention_hidden_size input_embedding_size "
        "moe_intermediate_size",
    ),
    (
        128,
        "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_size "
        "dense_intermediate_size shared_expert_intermediate_size intermediate_size_mlp mlp_dim dff "
        "shared_intermediate_size dim_ff intermediate_dim block_ff_dim ffn_intermediate_size max_position_embeddings "
        "n_positions n_ctx max_seq_len max_seq_length max_target_positions seq_length context_length "
        "max_sequence_length seq_len mamba_d_ssm",
    ),
    (VOCABULARY, "vocab_size"),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads "
        "num_encoder_attention_heads num_decoder_attention_heads attention_heads num_hidden_layers n_layer n_layers "
        "num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers num_experts num_local_experts "
        "n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k mamba_expand "
        "eos_token_id forced_eos_token_id",
    ),
    (
        16,
        "head_dim d_kv kv_channels v_head_dim mamba_d_state mamba_chunk_size mamba_head_dim ssm_state_size "
        "qk_nope_head_dim num_mel_bins",
    ),
    (
        1,
        "first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts mamba_n_groups n_groups "
        "bos_token_id decoder_start_token_id cls_token_id",
    ),
    (32, "kv_lora_rank q_lora_rank mamba_d_head image_size max_source_positions"),
    (8, "qk_rope_head_dim rotary_dim patch_size"),
    (
        0.0,
        "attention_dropout dropout hidden_dropout_prob attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop "
        "hidden_dropout activation_dropout dropout_rate resid_dropout embed_dropout embedding_dropout layerdrop "
        "encoder_layerdrop decoder_layerdrop classifier_dropout drop_path_rate attn_dropout emb_pdrop residual_dropout "
        "embedding_dropout_prob ffn_dropout residual_dropout_prob hidden_act_dropout router_jitter_noise "
        "moe_token_dropout input_jitter_noise",
    ),
    (64, "sliding_window"),
    (3, "sep_token_id unk_index unk_token_id"),
    (4, "mask_token_id"),
    (0.05, "initializer_range"),
    (100, "image_token_id image_token_index"),
    (101, "vision_start_token_id"),
    (102, "vision_end_token_id"),
    (103, "video_token_id"),
    (104, "audio_token_id"),
)
SIZES: dict[str, int | float] = {name: value for value, names in _VALUES for name in names.split()} | {
    "pad_token_id": 0
}
# Left at None where that is the default: None means "derived" or "off" there.
_OPTIONAL = frozenset(
    [
        "q_lora_rank",
        "n_inner",
        "sliding_window",
        "rotary_dim",
        "ffn_hidden_size",
        "classifier_dropout",
        "word_embed_proj_dim",
    ]
)
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "mpt": {"attn_pdrop": 0},
    "xlm": {"n_words": VOCABULARY, "emb_dim": WIDTH, "n_langs": 1},
    "flaubert": {"n_words": VOCABULARY, "emb_dim": WIDTH, "n_langs": 1},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 32},
    "mluke": {"entity_vocab_size": 10, "entity_emb_size": 32},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "esmc": {"num_key_value_heads": HEADS},
    "funnel": {"block_sizes": [2, 2]},
}
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
    sizes: dict[str, Any] = _sizes_of(config_class)
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if part.__name__ != "AutoConfig":
            sizes[name] = _sizes_of(part)
    config = config_class(**{**sizes, **_SPECIAL.get(model_type, {})})
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _sizes_of(config_class: type) -> dict[str, Any]:
    fields = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    sizes: dict[str, Any] = {}
    for name in fields & SIZES.keys():
        default = getattr(config_class, name, None)
        if not isinstance(default, list | tuple) and not (default is None and name in _OPTIONAL):
            sizes[name] = SIZES[name]
    if "kv_lora_rank" in fields and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = HEADS  # latent attention has a key and a value per head
    return sizes


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
