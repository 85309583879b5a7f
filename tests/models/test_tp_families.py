"""Every family with every task head against plain transformers: AdamW steps, ragged masks and labels."""

from __future__ import annotations

import pytest
import torch

from shardwright.testing import run_ranks, zoo
from shardwright.testing.matrix import Subject, pick_axes, run_cells
from tests.models.tp_ranks import train_against_reference

FULLY = 0.75  # share of the parameters
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "bert", "t5"]
LANGUAGE_MODELS = [
    "llama-causal-lm",
    "qwen3-tied-causal-lm",
    "gpt2-causal-lm",
    "bert-masked-lm",
    "t5-conditional-generation",
]


def check(problems: list[list[str]]) -> None:
    found = [f"rank {rank}: {problem}" for rank, one in enumerate(problems) for problem in one]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_every_head_like_one_process(family):
    check(run_ranks(train_against_reference, 2, zoo.names(family=family), timeout=110))


def test_more_families_train_like_one_process():
    names = [
        "opt-causal-lm",
        "chatglm-causal-lm",
        "opt-projected-causal-lm",
        "bloom-token-classification",
        "mixtral-causal-lm",
        "qwen3-moe-causal-lm",
    ]
    check(run_ranks(train_against_reference, 2, names, timeout=110))


VARIANTS = [
    *[("FalconForCausalLM", {"new_decoder_architecture": new, "multi_query": multi, "alibi": alibi,
                             "num_kv_heads": 2 if new else 4})
      for new, multi, alibi in [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]],
    ("FalconForCausalLM", {"multi_query": False, "bias": True, "parallel_attn": False, "num_kv_heads": 4}),
    ("PhiForCausalLM", {"qk_layernorm": True}),
    ("DeepseekV3ForCausalLM", {"q_lora_rank": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_options_of_families_change_how_they_are_sharded(name, settings):
    (cell,) = run_cells(Subject(name, settings=settings), pick_axes(["tp2"]))
    assert cell["outcome"] == "verified", cell
    assert cell["share"] >= FULLY, cell


def test_four_ranks_train_like_one_process():
    # Two key/value heads and four ranks: every key/value head is held by two of them.
    check(run_ranks(train_against_reference, 4, LANGUAGE_MODELS, timeout=110))


def test_float32_trains_like_one_process():
    check(run_ranks(train_against_reference, 2, LANGUAGE_MODELS, torch.float32, timeout=110))


@pytest.mark.parametrize(
    ("world_size", "names", "settings"),
    [
        (2, ["qwen2-causal-lm"], {"num_attention_heads": 3, "num_key_value_heads": 3}),  # 2 heads and 1
        (2, ["qwen3-tied-causal-lm"], {"num_attention_heads": 6, "num_key_value_heads": 3}),
        (
            2,
            ["llama-biased-causal-lm"],
            {"num_attention_heads": 3, "num_key_value_heads": 1},
        ),  # a shared key/value head, 2 query heads and 1
        (4, ["qwen3-causal-lm"], {"num_attention_heads": 3, "num_key_value_heads": 1}),  # and a rank without a head
        (4, ["llama-causal-lm"], {"num_attention_heads": 6, "num_key_value_heads": 3}),
        (2, ["gpt2-causal-lm"], {"n_head": 3}),
        (4, ["bert-masked-lm"], {"num_attention_heads": 3}),
        (2, ["t5-conditional-generation"], {"num_heads": 3}),
        (4, ["t5-gated-conditional-generation"], {"num_heads": 3}),
        (2, ["llama-causal-lm", "gpt2-untied-causal-lm"], {"intermediate_size": 87, "n_inner": 87}),
    ],
)
def test_what_does_not_divide_by_the_ranks(world_size, names, settings):
    check(run_ranks(train_against_reference, world_size, names, settings=settings, timeout=110))


@pytest.mark.parametrize(("multiple", "world_size"), [(1, 2), (64, 2), (64, 4)])
def test_vocabulary_that_does_not_divide(multiple, world_size):
    # 101 words: 51 and 50; 64 and 37; two ranks without any.
    check(
        run_ranks(
            train_against_reference,
            world_size,
            ["llama-tied-causal-lm", "bert-masked-lm"],
            make_vocab_size_divisible_by=multiple,
            timeout=110,
        )
    )


@pytest.mark.parametrize("labels", [1, 3, 7])
def test_odd_numbers_of_labels(labels):
    names = ["bert-sequence-classification", "llama-sequence-classification", "gpt2-token-classification"]
    if labels == 1:
        names = [name for name in names if "token" not in name]  # regression: labels are floats for one label only
    check(run_ranks(train_against_reference, 2, names, settings={"num_labels": labels}, timeout=110))


def test_gathered_output_trains_like_one_process():
    check(run_ranks(train_against_reference, 2, LANGUAGE_MODELS, parallel_output=False, timeout=110))
