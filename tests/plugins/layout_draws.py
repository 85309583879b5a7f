"""Random legal layouts: model, sizes, schedule, ZeRO stage, batch. The same seed draws the same layout on every machine."""

from __future__ import annotations

import random
from typing import Any

from hybrid_ranks import Layout

WORLDS = (1, 2, 2, 3, 4, 4, 4, 4, 6, 8)
# name, weight of being drawn
MODELS = {
    "llama-causal-lm": 4,
    "llama-tied-causal-lm": 3,
    "llama-sequence-classification": 1,
    "gpt2-causal-lm": 3,
    "gpt2-untied-causal-lm": 1,
    "bert-masked-lm": 3,
    "bert-sequence-classification": 1,
    "bert-pretraining": 1,
    "t5-conditional-generation": 3,
    "t5-gated-conditional-generation": 1,
    "qwen3-moe-causal-lm": 3,
    "qwen2-tied-causal-lm": 1,
}
LAYER_NAMES = {"gpt2": "n_layer", "t5": "num_layers"}
HEAD_NAMES = {"gpt2": "n_head", "t5": "num_heads"}


def draw(seed: int, worlds: tuple[int, ...] = WORLDS) -> Layout:
    rng = random.Random(seed)
    world = rng.choice(worlds)
    model = rng.choices(list(MODELS), weights=list(MODELS.values()))[0]
    family = model.split("-")[0]
    tp = rng.choice([size for size in (1, 2, 3, 4) if world % size == 0])
    pp = rng.choice([size for size in (1, 1, 2, 2, 3, 4) if world // tp % size == 0])
    dp = world // tp // pp
    plugin: dict[str, Any] = {"tp_size": tp, "pp_size": pp}
    chunks = 1
    if pp > 1:
        plugin["pp_style"] = rng.choice(["gpipe", "1f1b", "1f1b", "interleaved", "zb", "zbv"])
        chunks = {"interleaved": rng.choice([2, 2, 3]), "zbv": 2}.get(plugin["pp_style"], 1)
        plugin["num_model_chunks"] = chunks
        plugin["overlap_p2p"] = rng.random() < 0.7
        plugin["enable_metadata_cache"] = rng.random() < 0.8
    batch = rng.randint(1, 6)
    if pp > 1 or rng.random() < 0.5:
        if rng.random() < 0.6:
            plugin["num_microbatches"] = rng.randint(1, batch + 1)
        else:
            plugin["microbatch_size"] = rng.randint(1, batch)
    plugin["zero_stage"] = rng.choice([0, 1, 1, 2, 3])
    if plugin["zero_stage"] and dp > 1:
        plugin["zero_group_size"] = rng.choice([None, *(k for k in range(1, dp + 1) if dp % k == 0)])
    if plugin["zero_stage"] in (1, 2):
        plugin["overlap_allgather"] = rng.random() < 0.5
        plugin["zero_bucket_size_in_m"] = rng.choice([12, 0.005])
    plugin["overlap_communication"] = rng.random() < 0.7
    plugin["parallel_output"] = rng.random() < 0.8
    plugin["make_vocab_size_divisible_by"] = rng.choice([1, 8, 64])
    plugin["dp_outside"] = rng.random() < 0.8
    return Layout(
        model,
        world,
        plugin,
        _overrides(rng, family, pp * chunks, plugin),
        dtype="fp64" if rng.random() < 0.85 else "fp32",
        batch=batch,
        accumulate=rng.choice([1, 1, 1, 2]),
        max_norm=rng.choice([0.0, 0.05]),
        seed=seed,
        checkpointing=rng.random() < 0.25,
    )


def _overrides(rng: random.Random, family: str, stages: int, plugin: dict[str, Any]) -> dict[str, Any]:
    """Of the model's config: enough layers, any number of heads, any size of vocabulary."""
    layers = max(stages, rng.choice([2, 3, 4, 5])) if family != "t5" else max((stages + 1) // 2, rng.choice([2, 3]))
    overrides: dict[str, Any] = {LAYER_NAMES.get(family, "num_hidden_layers"): layers}
    if family == "t5":
        overrides["num_decoder_layers"] = max(stages - layers, rng.choice([2, 3]))
        layers += overrides["num_decoder_layers"]
    if stages > 1 and rng.random() < 0.3:
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        plugin["num_layers_per_stage"] = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    heads = rng.choice([2, 3, 4, 6, 12])
    if family in ("llama", "qwen2"):
        overrides |= {"num_attention_heads": heads, "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0])}
        overrides["head_dim"] = 8 if family == "llama" else None
        if family == "qwen2":
            overrides.pop("head_dim")
    elif family == "qwen3":
        overrides |= {"num_attention_heads": heads, "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0])}
    else:
        overrides[HEAD_NAMES.get(family, "num_attention_heads")] = heads
    overrides["vocab_size"] = rng.choice([96, 101, 131])
    return overrides
