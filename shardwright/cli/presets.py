"""Model shapes that `shardwright plan` knows by name: kind of config in transformers, and its settings."""

from __future__ import annotations

from typing import Any


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 128256
) -> tuple[str, dict[str, Any]]:
    return "llama", {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
    }


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": _llama(64, 128, 4, 4, 2, vocabulary=101),
    "llama-1b": _llama(2048, 8192, 16, 32, 8),
    "llama-8b": _llama(4096, 14336, 32, 32, 8),
    "llama-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-405b": _llama(16384, 53248, 126, 128, 8),
    "gpt2": ("gpt2", {}),
    "bert-base": ("bert", {}),
    "t5-base": (
        "t5",
        {
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "decoder_start_token_id": 0,
        },
    ),
    "qwen3-moe-30b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
}
