"""Random legal layouts: model, sizes, schedule, ZeRO stage, batch, and how the user trains. A seed draws the same on
every machine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from habits import CRITERIA, LORA_TARGETS, OPTIMIZERS, Habits
from hybrid_ranks import Layout

from shardwright.shardformer import PipelineGradientCheckpointConfig

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
# Whose sequences can be cut along an axis of their own.
ATTENDED = (
    "llama-causal-lm",
    "llama-tied-causal-lm",
    "gpt2-causal-lm",
    "gpt2-untied-causal-lm",
    "bert-masked-lm",
    "qwen3-moe-causal-lm",
    "qwen2-tied-causal-lm",
    "t5-conditional-generation",
    "t5-gated-conditional-generation",
)
RECOMPUTED = (
    {"selective_ratio": 1.0},
    {"gradient_checkpointing_ratio": 0.5, "selective_ratio": 0.5},
    {"selective_ratio": 1.0, "selective_keep": ("aten.mm", "aten.bmm", "aten.tanh")},
    {"gradient_checkpointing_ratio": 1.0},
)
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
    if plugin.get("pp_style") in ("zb", "zbv"):  # with draws of its own, so that other layouts stay what they are
        plugin["deferred_bytes"] = random.Random(f"deferred {seed}").choice([None, None, 0, 20_000, 200_000])
    if pp > 1:
        away = random.Random(f"away {seed}")
        plugin["offload_activations"] = away.choice(
            [None, None, 1.0, 0.5, [away.choice([0.0, 0.5, 1.0]) for _ in range(pp * chunks)]]
        )
    partly = random.Random(f"partly {seed}")
    if partly.random() < 0.3:
        plugin["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(**partly.choice(RECOMPUTED))
    if plugin["zero_stage"] == 3:
        plugin["gather_ahead"] = random.Random(f"ahead {seed}").choice([None, None, 0, 1, 3])
    if plugin["zero_stage"] in (1, 2):
        plugin["overlap_allgather"] = rng.random() < 0.5
        plugin["zero_bucket_size_in_m"] = rng.choice([12, 0.005])
    plugin["overlap_communication"] = rng.random() < 0.7
    plugin["parallel_output"] = rng.random() < 0.8
    plugin["make_vocab_size_divisible_by"] = rng.choice([1, 8, 64])
    plugin["dp_outside"] = rng.random() < 0.8
    if family == "qwen3" and dp > 1:
        group = plugin.get("zero_group_size") or dp
        fits = [size for size in (2, 4) if group % size == 0]
        plugin["ep_size"] = random.Random(f"experts {seed}").choice([1, *fits, *fits])
    overrides = _overrides(rng, family, pp * chunks, plugin)
    # the first stage embeds and has no layer
    if "num_layers_per_stage" in plugin and random.Random(f"entry {seed}").random() < 0.4:
        first, second, *others = plugin["num_layers_per_stage"]
        plugin["num_layers_per_stage"] = [0, first + second, *others]
    layout = Layout(
        model,
        world,
        plugin,
        overrides,
        dtype="fp64" if rng.random() < 0.85 else "fp32",
        batch=batch,
        accumulate=rng.choice([1, 1, 2, 3]),
        seed=seed,
        checkpointing=rng.random() < 0.25,
        calls=pp == 1 and rng.random() < 0.3,
        steps=3,  # the first length comes again
    )
    if tp == pp == 1 and rng.random() < 0.3:
        layout = _as_zero_plugin(rng, layout)
    if rng.random() < 0.02 and not layout.calls and not layout.zero:
        plugin.pop("microbatch_size", None)
        plugin["num_microbatches"] = 256
        layout = replace(layout, batch=256, accumulate=1, steps=1)
    _other_schedule(random.Random(-1 - seed), plugin)
    if plugin.get("pp_style") == "1f1b" and not {"num_layers_per_stage", "microbatch_size"} & set(plugin):
        plugin["cut_memory"] = random.Random(f"memory {seed}").choice([None, 1.0, 1.2])
    chance = {"zbv": 0.5, "interleaved": 0.5 * (chunks == 2 and tp > 1)}.get(plugin.get("pp_style", ""), 0.0)
    if random.Random(f"pairs {seed}").random() < chance:
        plugin["pp_style"] = "dualpipev"
    if pp > 1 and model.endswith("causal-lm") and plugin["pp_style"] != "auto":
        plugin["num_sequence_slices"] = random.Random(f"slices {seed}").choice([1, 1, 2, 3, 5])
    if tp > 1:
        _split_sequences(random.Random(f"sequence {seed}"), plugin)
    if dp > 1 and not layout.zero and model in ATTENDED:
        layout = _split_over_axis(random.Random(f"axis {seed}"), layout, dp)
    return _with_habits(rng, layout)


def _split_sequences(rng: random.Random, plugin: dict[str, Any]) -> None:
    """Half of the layouts with tensor parallelism split sequences along it."""
    if rng.random() < 0.5:
        return
    plugin["enable_sequence_parallelism"] = True
    plugin["sequence_parallelism_mode"] = rng.choice([None, "split_gather", "ring"])
    plugin["enable_sequence_overlap"] = rng.random() < 0.5
    plugin.pop("num_sequence_slices", None)


def _split_over_axis(rng: random.Random, layout: Layout, dp: int) -> Layout:
    """Most of the layouts with several replicas make some of them ranks of the sequence axis."""
    plugin = layout.plugin
    if rng.random() < 0.3 or plugin.get("enable_sequence_parallelism"):
        return layout
    sp = rng.choice([size for size in range(2, dp + 1) if dp % size == 0])
    plugin["enable_sequence_parallelism"] = True
    plugin["sp_size"] = sp
    plugin["sequence_parallelism_mode"] = rng.choice([None, "all_to_all", "ring_attn", "ring_attn"])
    if plugin["sequence_parallelism_mode"] == "ring_attn" and sp == 4:
        plugin["inner_ring_size"] = rng.choice([None, 2])
        plugin["ulysses_size"] = random.Random(f"places {layout.seed}").choice([None, 2, 2, 4])
        if plugin["ulysses_size"] == 4:
            plugin["inner_ring_size"] = None
    if plugin.get("zero_group_size") is not None and dp // sp % plugin["zero_group_size"]:
        plugin["zero_group_size"] = None
    if (plugin.get("zero_group_size") or dp // sp) % plugin.get("ep_size", 1):
        plugin["ep_size"] = 1
    plugin.pop("num_sequence_slices", None)
    if layout.model == "gpt2-causal-lm" and random.Random(f"layers {layout.seed}").random() < 0.5:
        layout = replace(layout, model="bloom-causal-lm")  # whose layers alone are given parts
    return layout


def _other_schedule(rng: random.Random, plugin: dict[str, Any]) -> None:
    """Some of the layouts with 1F1B get a relative of it, or search for their schedule."""
    if plugin.get("pp_style") != "1f1b" or rng.random() < 0.6:
        return
    plugin["pp_style"] = rng.choice(["eager_1f1b", "auto"])
    if plugin["pp_style"] == "auto":
        plugin["auto_memory"] = rng.choice([1.0, 1.5, 9.0])
        if isinstance(plugin["offload_activations"], list):
            plugin["offload_activations"] = 1.0
        plugin.pop("num_layers_per_stage", None)
        if plugin.pop("microbatch_size", None) is not None:
            plugin["num_microbatches"] = rng.randint(1, 4)


def _as_zero_plugin(rng: random.Random, layout: Layout) -> Layout:
    """The same job under LowLevelZeroPlugin, which has no batches to split."""
    old = layout.plugin
    plugin = {
        "stage": max(old["zero_stage"], 1),
        "zero_group_size": old.get("zero_group_size"),
        "overlap_communication": old["overlap_communication"],
        "reduce_bucket_size_in_m": 12 if old["zero_stage"] == 3 else old.get("zero_bucket_size_in_m", 12),
    }
    plugin |= {name: old[name] for name in ("overlap_allgather", "gather_ahead") if name in old}
    return replace(layout, plugin=plugin, zero=True, calls=False)


def _with_habits(rng: random.Random, layout: Layout) -> Layout:
    """Each habit with a probability of its own; those that exclude one another give way in the order in which they
    stand here.
    """
    plugin, stage = layout.plugin, layout.plugin.get("zero_stage", layout.plugin.get("stage"))
    whole = (
        plugin.get("tp_size", 1) == plugin.get("ep_size", 1) == 1
    )  # element-wise or not, every optimizer may have any parameter
    habits: dict[str, Any] = {
        "bare": rng.random() < 0.4,
        "read_norm": rng.random() < 0.25,
        "captured": rng.random() < 0.4,
    }
    habits["clip"] = rng.choice(["", "plugin", "plugin", "norm", "value", "outside"])
    habits["clip_at"] = 0.003 if habits["clip"] == "value" else 0.05
    if rng.random() < 0.4:
        habits["optimizer"] = rng.choice(
            sorted(OPTIMIZERS) if whole else [name for name in sorted(OPTIMIZERS) if "own" not in name]
        )
    if rng.random() < 0.12 and layout.family in LORA_TARGETS and not layout.zero:
        habits["lora"] = True
    elif rng.random() < 0.25:
        habits["frozen" if rng.random() < 0.5 else "unused"] = True
    if layout.model.endswith("causal-lm") and rng.random() < 0.35:
        habits["criterion"] = rng.choice(sorted(CRITERIA))
        if plugin.get("tp_size", 1) > 1 and layout.calls:
            plugin["parallel_output"] = False
    if layout.family in ("llama", "qwen2") and layout.model.endswith("causal-lm") and rng.random() < 0.15:
        habits["embeds"] = True
    if not habits.get("lora") and rng.random() < 0.2:
        habits["resume"] = True
    # T5 keeps some layers in fp32, routers choose other experts after a rounding
    precise = layout.family not in ("t5", "qwen3")
    if precise and layout.dtype == "fp32" and rng.random() < 0.6:
        habits["half"] = rng.choice(["bf16", "fp16"])
    elif stage != 3 and rng.random() < 0.12:
        habits["wire"] = "fp32" if layout.dtype == "fp64" else "bf16"
    if habits.get("half") or habits.get("wire"):
        # whose steps follow the size of gradients
        habits["optimizer"] = rng.choice(["sgd", "own adagrad"] if whole else ["sgd"])
    if stage == 3 and not habits.get("half") and random.Random(f"wire {layout.seed}").random() < 0.12:
        habits["wire"] = "fp32" if layout.dtype == "fp64" else "bf16"
        habits["optimizer"] = "sgd"
    return replace(layout, habits=Habits(**habits))


def _overrides(rng: random.Random, family: str, stages: int, plugin: dict[str, Any]) -> dict[str, Any]:
    """Of the model's config: enough layers, any number of heads, any size of vocabulary."""
    layers = max(stages, rng.choice([2, 3, 4, 5])) if family != "t5" else max((stages + 1) // 2, rng.choice([2, 3]))
    overrides: dict[str, Any] = {LAYER_NAMES.get(family, "num_hidden_layers"): layers}
    if family == "t5":
        overrides["num_decoder_layers"] = max(stages - layers, rng.choice([2, 3]))
        layers += overrides["num_decoder_layers"]
    if stages > 1 and rng.random() < 0.3:
        cuts = sorted(rng.sample(range(1, layers + 1), stages - 1))  # the last stage may have no layer
        plugin["num_layers_per_stage"] = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    heads = rng.choice([2, 3, 4, 6, 12])
    if family in ("llama", "qwen2"):
        overrides |= {
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        }
        overrides["head_dim"] = 8 if family == "llama" else None
        if family == "qwen2":
            overrides.pop("head_dim")
    elif family == "qwen3":
        overrides |= {
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        }
    else:
        overrides[HEAD_NAMES.get(family, "num_attention_heads")] = heads
    overrides["vocab_size"] = rng.choice([96, 101, 131])
    return overrides
