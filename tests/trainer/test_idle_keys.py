"""No key of a recipe is taken in silence where it would change nothing, and keys of HuggingFace's trainers that a
recipe has not are answered with what to write.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.trainer import Recipe, RecipeError, build_recipe
from shardwright.trainer.elsewhere import instead_of
from shardwright.trainer.idle import _RULES
from shardwright.trainer.reading import to_plain
from shardwright.trainer.recipe import ALIASES

PLAIN: dict[str, Any] = {"model": "gpt2", "data": {"path": "a.jsonl"}}
HELD_OUT = {"path": "b.jsonl"}
IDLE: list[tuple[dict[str, Any], str]] = [
    ({"eval_data": HELD_OUT}, "eval_data, and eval_strategy: no never tries the model"),
    ({"eval_steps": 50}, "eval_steps=50, and eval_strategy: no never tries the model; say eval_strategy: steps, or"),
    (
        {"eval_steps": 50, "eval_strategy": "epoch", "eval_data": HELD_OUT},
        "at the end of every pass; say eval_strategy",
    ),
    ({"per_device_eval_batch_size": 4}, "per_device_eval_batch_size=4, and eval_strategy: no"),
    ({"save_strategy": "no", "save_steps": 10}, "save_steps=10, and save_strategy: no writes no checkpoints"),
    ({"save_strategy": "epoch", "save_steps": 10}, "save_steps=10, and save_strategy: epoch writes a checkpoint at"),
    ({"save_strategy": "no", "save_total_limit": 1}, "save_total_limit=1, and save_strategy: no"),
    (
        {"save_strategy": "no", "on_save_error": "raise"},
        "on_save_error=raise, and save_strategy: no writes no checkpoints",
    ),
    ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "say lr_scheduler_type: constant_with_warmup, or leave"),
    ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_steps=0.1, and lr_scheduler_type: constant"),
    ({"optim": "sgd", "adam_beta2": 0.95}, "adam_beta2=0.95, and optim: sgd does not read it"),
    ({"optim": "adafactor", "adam_beta1": 0.8}, "adam_beta1=0.8, and optim: adafactor does not read it"),
    ({"optim": "sgd", "adam_epsilon": 1e-6}, "adam_epsilon=1e-06, and optim: sgd"),
    ({"warmup_steps": 10.5}, "warmup_steps=10.5 is no whole number of steps"),
    (
        {"logging_steps": 1.5},
        "logging_steps=1.5 is no whole number of steps; give one, or a share of all steps below 1",
    ),
    ({"save_steps": 0, "save_strategy": "steps"}, "save_steps=0 is too small: give a number of steps, or a share of"),
    ({"data": {"mix": [{"path": "a.jsonl", "weight": 3}]}}, "data.mix[0].weight=3 is a share among sources, and there"),
    ({"data": {"path": "a.jsonl", "split": "test"}}, "data.split='test' is of a dataset"),
    ({"data": {"mix": [{"path": "a.jsonl", "name": "x"}]}}, "data.mix[0].name='x' is of a dataset"),
]
# Keys that change a run whatever the other ones are, and those that `reading` or `tasks` refuse beside others.
EFFECTIVE = {
    *("model", "task", "tokenizer", "data", "layout", "lora", "chat_template", "output_dir", "seed", "bf16", "fp16"),
    *("activation_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "learning_rate", "lr_scheduler_type", "optim", "weight_decay", "max_grad_norm", "on_nan"),
    *("spike_factor", "dataloader_num_workers", "logging_steps", "profile_steps", "report_to", "run_name"),
    *("eval_strategy", "save_strategy", "resume", "nproc"),
}
REFUSED_ELSEWHERE = {
    *("labels", "mlm_probability", "rollbacks", "timeline_steps", "early_stopping_patience", "load_best_model_at_end"),
    *("metric_for_best_model", "greater_is_better"),
}


@pytest.mark.parametrize(("changes", "said"), IDLE, ids=[said[:40] for _, said in IDLE])
def test_a_key_without_effect_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_recipe({**PLAIN, **changes})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_no_keys_that_were_given() -> None:
    """The recipe beside a run has all keys, and is one."""
    for changes in (
        {"save_strategy": "no", "optim": "sgd", "lr_scheduler_type": "constant"},
        {"save_strategy": "epoch", "eval_strategy": "epoch", "eval_data": HELD_OUT, "optim": "adafactor"},
    ):
        recipe = build_recipe({**PLAIN, **changes})
        assert build_recipe(to_plain(recipe)) == recipe


def test_every_key_was_thought_of() -> None:
    """A new key either has an effect always, or a rule."""
    ruled = {key for rule in _RULES for key in rule.keys}
    known = EFFECTIVE | REFUSED_ELSEWHERE | ruled
    assert {each.name for each in dataclasses.fields(Recipe)} == known
    assert not EFFECTIVE & ruled
    assert not REFUSED_ELSEWHERE & (EFFECTIVE | ruled)


def test_a_stride_beside_a_mixture_is_of_all_its_sources() -> None:
    mix = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    recipe = build_recipe({**PLAIN, "task": "question-answering", "data": {"mix": mix, "stride": 16}})
    assert recipe.data is not None
    assert recipe.data.stride == 16


WRAP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}
ELSEWHERE: list[tuple[dict[str, Any], list[str]]] = [
    ({"fsdp": True}, ["fsdp is no key of a recipe; say layout: {zero_stage: 3}"]),
    ({"fsdp": "full_shard auto_wrap"}, ["say layout: {zero_stage: 3}"]),
    ({"fsdp": "shard_grad_op offload"}, ["cpu_offload: true", "zero_stage: 2"]),
    ({"fsdp": ["hybrid_shard"]}, ["zero_stage: 3", "sharding_strategy: `shardwright config`"]),
    ({"fsdp": ""}, ["fsdp is no key of a recipe; it asks for nothing; leave it out"]),
    ({"fsdp": "shard_everything"}, ["zero_stage: 3", "sharding_strategy: `shardwright config` says why"]),
    ({"fsdp_config": {"reshard_after_forward": False}}, ["say layout: {zero_stage: 2}"]),
    (
        {"fsdp_config": WRAP, "fsdp": "full_shard"},
        ["say layout: {zero_stage: 3} and activation_checkpointing: true; transformer_layer_cls_to_wrap: `shardwright"],
    ),
    ({"fsdp_config": "gone.json"}, ["its configuration 'gone.json' cannot be read; say layout: {zero_stage: 3}"]),
    ({"fsdp_config": {"reshard_after_forward": "maybe"}}, ["reshard_after_forward: `shardwright config` says why"]),
    ({"fsdp_config": "fsdp.json", "fsdp": True}, ["say layout: {cpu_offload: true, zero_stage: 3}"]),
    ({"deepspeed": "ds.json"}, ["say layout: {zero_stage: 2} and bf16: true; `shardwright config ds.json` translates"]),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, ["say layout: {zero_stage: 3}; `shardwright config"]),
    ({"deepspeed": "other.json"}, ["say layout: {zero_stage: 1, 2 or 3}; `shardwright config"]),
    ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": "big"}}}, ["reduce_bucket_size = 'big' is no value"]),
    ({"lora_r": 8}, ["say lora: {r:"]),
    ({"lr_scheduler_kwargs": {"num_cycles": 2}}, ["schedules have no options"]),
    ({"logging_first_step": True}, ["the first step is always logged"]),
    ({"local_rank": 0}, ["local_rank is no key of a recipe; ranks know their place from the launcher"]),
    ({"hub_token": "hf_x"}, ["push output_dir/model with huggingface_hub"]),
    ({"push_to_hub": False}, ["push_to_hub is no key of a recipe; it asks for nothing; leave it out"]),
    ({"remove_unused_columns": False}, ["data names the columns that are read"]),
    ({"neftune_noise_alpha": None}, ["it asks for nothing"]),
]


@pytest.mark.parametrize(("changes", "said"), ELSEWHERE, ids=lambda one: str(one)[:40])
def test_a_key_of_another_trainer_says_what_to_write(
    changes: dict[str, Any], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.json").write_text(json.dumps({"fsdp_offload_params": True}))
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    with pytest.raises(RecipeError) as caught:
        build_recipe({**PLAIN, **changes})
    for words in said:
        assert words in str(caught.value)


def test_every_argument_of_the_hugging_face_trainer_is_taken_or_answered() -> None:
    """None is answered with the key that happens to be spelled most like it (hub_token: did you mean 'tokenizer'?)."""
    from transformers import TrainingArguments  # takes seconds, which the other tests do not need

    known = {*(each.name for each in dataclasses.fields(Recipe)), *ALIASES}
    arguments = [each.name for each in dataclasses.fields(TrainingArguments) if not each.name.startswith("_")]
    answered = {name: instead_of(name, {name: True}) for name in arguments if name not in known}
    assert [name for name, answer in answered.items() if answer is None] == []


def test_keys_of_other_tools_are_answered() -> None:
    """Of axolotl, LLaMA-Factory and TRL: none with the key that is spelled most like it (adapter: 'data'?)."""
    keys = (
        "adapter attn_implementation base_model dataset_num_proc datasets finetuning_type flash_attention lora_rank "
        "lora_target micro_batch_size model_init_kwargs pad_token padding_free plot_loss quantization_bit "
        "sample_packing sequence_len stage template trust_remote_code val_set_size val_size wandb_project"
    )
    for key in keys.split():
        with pytest.raises(RecipeError) as caught:
            build_recipe({**PLAIN, key: "x"})
        assert str(caught.value).startswith(f"{key} is no key of a recipe; ")
        assert "its keys are" not in str(caught.value)


def test_what_is_said_in_its_place_is_taken() -> None:
    with pytest.raises(RecipeError) as caught:
        build_recipe({**PLAIN, "fsdp": "shard_grad_op offload", "fsdp_config": {"activation_checkpointing": True}})
    said = str(caught.value).partition("say ")[2].partition(";")[0]
    written = "\n".join(said.split(" and "))
    recipe = build_recipe({**PLAIN, **yaml.safe_load(written)})
    assert recipe.layout == {"zero_stage": 2, "cpu_offload": True}
    assert recipe.activation_checkpointing
