"""Keys that people know from HuggingFace's trainers, and what to write in a recipe in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..compat.configs import accelerate, deepspeed

_LORA = "say lora: {r: ..., lora_alpha: ..., target_modules: ...}"
_RANKS = "say layout: {tp_size: ..., pp_size: ..., sp_size: ..., zero_stage: ...}"
_RECOMPUTED = "say activation_checkpointing: true, or layout: {gradient_checkpoint_config: {...}}"
_SCRIPT = "write a script with shardwright.trainer.Trainer for it"
_TABLE = {
    "parallelism_config": _RANKS,
    **dict.fromkeys(
        ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"), "say layout: {tp_size: N}"
    ),
    **dict.fromkeys(
        ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"), "say layout: {pp_size: N}"
    ),
    **dict.fromkeys(("precision", "mixed_precision", "dtype", "torch_dtype"), "say bf16: true or fp16: true"),
    **dict.fromkeys(("max_norm", "gradient_clipping"), "say max_grad_norm"),
    "remove_unused_columns": "data names the columns that are read, others are left alone: leave it out",
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_inputs"),
        "of messages, and of prompt and completion, answers alone are learned: leave it out",
    ),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization_bit", "quantization_config", "bnb_4bit_quant_type", "gptq"),
        "quantised weights are not trained: leave it out, and say lora",
    ),
    "torch_compile": "say layout: {enable_jit_fused: true}",
    # Of axolotl, LLaMA-Factory and TRL.
    **dict.fromkeys(("adapter", "finetuning_type", "peft_type"), "say lora: {r: ...} for adapters, or leave it out"),
    **dict.fromkeys(("lora_rank", "lora_target", "lora_target_linear", "peft_config"), _LORA),
    **dict.fromkeys(("base_model", "model_name", "model_path", "pretrained_model_name_or_path"), "say model"),
    **dict.fromkeys(("micro_batch_size", "per_device_batch_size"), "say per_device_train_batch_size"),
    **dict.fromkeys(("sequence_len", "seq_length", "block_size", "model_max_length"), "say data: {max_length: N}"),
    **dict.fromkeys(
        ("sample_packing", "neat_packing", "padding_free", "packing_strategy", "eval_packing", "pad_to_sequence_len"),
        "say data: {packing: true}, which fills sequences of max_length with samples that do not see each other",
    ),
    **dict.fromkeys(
        ("datasets", "pretraining_dataset", "dataset_dir", "dataset_mixture"),
        "say data: {path: FILE}, data: {dataset: NAME}, or data: {mix: [{path: FILE, weight: N}, ...]}",
    ),
    **dict.fromkeys(
        ("val_set_size", "val_size", "test_datasets", "eval_dataset", "validation_file"),
        "say eval_data: {path: FILE} and eval_strategy: steps or epoch; nothing is split off data",
    ),
    **dict.fromkeys(("optimizer", "optimizer_type"), "say optim"),
    "lr_scheduler": "say lr_scheduler_type",
    **dict.fromkeys(
        ("template", "chat_template_path", "chat_template_kwargs"),
        "conversations are written by the tokenizer's chat template, or by chat_template: FILE.jinja",
    ),
    "stage": "shardwright train pretrains and fine-tunes: leave it out; examples/dpo.py learns preferences",
    **dict.fromkeys(
        ("attn_implementation", "flash_attention", "flash_attn", "use_flash_attention_2"),
        "attention is torch's fused one; layout: {enable_flash_attention: true} asks for FlashAttention",
    ),
    "trust_remote_code": "code of the hub is not run; write a script with Booster and a model of your own for it",
    "model_init_kwargs": "say model: {config: {model_type: ...}} for a new model; one of the hub is taken as it is",
    **dict.fromkeys(
        ("wandb_project", "trackio_project", "mlflow_experiment_name"),
        "say it in the environment, as WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME, and report_to",
    ),
    "plot_loss": "`shardwright report output_dir` draws the run: leave it out",
    **dict.fromkeys(
        ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes"),
        "samples are tokenised as they are needed; dataloader_num_workers says by how many processes",
    ),
    **dict.fromkeys(
        ("eos_token", "pad_token", "special_tokens"), "the tokenizer has them: change it, save it, and say tokenizer"
    ),
    "tf32": "call torch.set_float32_matmul_precision in a script of your own, or train with bf16: true",
    "push_to_hub": "push output_dir/model with huggingface_hub when it is trained",
    "dataset_name": "say data: {dataset: NAME, split: train, text: COLUMN}",
    "dataset_text_field": "say data: {text: COLUMN}",
    **dict.fromkeys(("max_seq_length", "max_seq_len", "cutoff_len"), "say data: {max_length: N}"),
    **dict.fromkeys(("train_file", "dataset_path", "data_path"), "say data: {path: FILE}"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "say per_device_train_batch_size"),
    "per_gpu_train_batch_size": "say per_device_train_batch_size",
    "epochs": "say num_train_epochs",
    "lr": "say learning_rate",
    "lr_scheduler_kwargs": "schedules have no options, and fall to 0; " + _SCRIPT,
    "optim_args": "optimizers have no options but weight_decay and those of AdamW; " + _SCRIPT,
    "label_smoothing_factor": "the loss is the model's own; " + _SCRIPT,
    "neftune_noise_alpha": "embeddings get no noise; " + _SCRIPT,
    "group_by_length": "samples come in an order that seed alone fixes; data: {packing: true} leaves no padding",
    "data_seed": "say seed, which fixes the order of samples, too",
    "logging_strategy": "say logging_steps; metrics.jsonl has every step",
    "logging_dir": "trackers and metrics.jsonl write into output_dir",
    "logging_first_step": "the first step is always logged",
    "eval_delay": "evaluations begin with the first eval_steps",
    "eval_on_start": "evaluations begin with the first eval_steps; in a script Trainer has evaluate_at_ends",
    "save_only_model": "checkpoints are whole, and the model alone is exported to output_dir/model at the end",
    "save_safetensors": "models are always written as safetensors; leave it out",
    "overwrite_output_dir": "name another output_dir, or say resume: true",
    **dict.fromkeys(("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), _RECOMPUTED),
    "ddp_find_unused_parameters": "say layout: {find_unused_parameters: true}",
    "ddp_bucket_cap_mb": "say layout: {ddp_bucket_cap_mb: ...}",
    "ddp_timeout": "a collective may take ten minutes; shardwright.launch(timeout=) in a script of your own says else",
    "do_train": "shardwright train always trains; leave it out",
    "do_eval": "say eval_strategy: steps or epoch",
    "early_stopping_threshold": "early_stopping_patience counts evaluations whose loss is not lower at all",
    "use_cpu": "CUDA_VISIBLE_DEVICES= in the environment hides GPUs",
    "no_cuda": "CUDA_VISIBLE_DEVICES= in the environment hides GPUs",
    "auto_find_batch_size": "shardwright plan tells what fits; give per_device_train_batch_size",
    **dict.fromkeys(("use_peft", "use_lora", "lora_r", "lora_target_modules"), _LORA),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "say layout: {enable_jit_fused: true}"),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "say layout: {enable_fused_normalization: true, enable_fused_activation: true}, which takes Liger's kernels "
        "where they are installed",
    ),
    "use_cache": "training keeps no cache of keys and values: leave it out",
    "full_determinism": "call shardwright.launch(deterministic=True) in a script of your own",
    "average_tokens_across_devices": "every token of a step weighs the same, on whatever rank it is: leave it out",
    "torch_empty_cache_steps": "say PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
    "accelerator_config": "the loader and the ranks are shardwright's own: leave it out",
    "optim_target_modules": "an optimizer steps on all weights that are trained; " + _SCRIPT,
    "debug": "loss and gradient norm of every step are looked at: say on_nan: stop or spike_factor",
    # Data.
    "dataloader_drop_last": "every sample comes once in each pass, the last step has as many as are left: leave it out",
    "dataloader_pin_memory": "batches are always sent from pinned memory: leave it out",
    **dict.fromkeys(
        (
            *("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_in_order"),
            "dataloader_multiprocessing_context",
        ),
        "of the loader's options there is dataloader_num_workers; leave it out",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name"),
        "samples come in an order that seed alone fixes; data: {packing: true} leaves no padding",
    ),
    "label_names": "say data: {label: COLUMN}, and the names of the classes in labels",
    "ignore_data_skip": "a run that goes on does so at the next sample: leave it out",
    # Evaluation.
    **dict.fromkeys(
        ("eval_accumulation_steps", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
        "an evaluation adds up losses and counts and keeps no outputs: leave it out",
    ),
    **dict.fromkeys(
        ("batch_eval_metrics", "include_for_metrics"),
        "metrics are those of the task; Trainer.measure in a script adds some",
    ),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "evaluations compute in the precision of the training"),
    "do_predict": "shardwright generate writes text from what was trained; leave it out",
    "per_gpu_eval_batch_size": "say per_device_eval_batch_size",
    # Ranks.
    "local_rank": "ranks know their place from the launcher, or are started by shardwright train: leave it out",
    "ddp_backend": "NCCL is taken on GPUs and gloo on CPUs: leave it out",
    "ddp_broadcast_buffers": "say layout: {broadcast_buffers: ...}",
    "ddp_static_graph": "say layout: {static_graph: ...}",
    # What is told, and where it is kept.
    "disable_tqdm": "the live line is for terminals; a file or a pipe gets plain ones: leave it out",
    **dict.fromkeys(
        ("log_level", "log_level_replica", "log_on_each_node"),
        "the first rank alone prints, a line every logging_steps: leave it out",
    ),
    "logging_nan_inf_filter": "losses are logged as they are; on_nan says what one that is nan or inf does",
    "include_num_input_tokens_seen": "metrics.jsonl always has tokens_seen: leave it out",
    "skip_memory_metrics": "metrics.jsonl always has memory_gib: leave it out",
    "project": "WANDB_PROJECT or TRACKIO_PROJECT in the environment names it; run_name names the run in it",
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "trackio writes to this machine; push what it wrote with its own command",
    ),
    **dict.fromkeys(
        ("hub_model_id", "hub_token", "hub_strategy", "hub_revision", "hub_private_repo", "hub_always_push"),
        "push output_dir/model with huggingface_hub when it is trained; HF_TOKEN in the environment is for reading",
    ),
    "save_on_each_node": "all nodes write into one output_dir: leave it out",
    "enable_jit_checkpoint": "a run that SIGTERM ends always writes a checkpoint first: leave it out",
    "restore_callback_states_from_checkpoint": "checkpoints have all that a run goes on with: leave it out",
}
_DEEPSPEED = "say layout: {zero_stage: 1, 2 or 3}; `shardwright config ds_config.json` translates the file"
_NOTHING: tuple[Any, ...] = (None, False, "", "no", [], {})
_ASKS_NOTHING = "it asks for nothing; leave it out"
_OFF = {  # switches of HuggingFace's trainers that false, or 0, leaves as they are
    *("push_to_hub", "torch_compile", "load_in_8bit", "load_in_4bit", "group_by_length", "full_determinism", "use_cpu"),
    *("no_cuda", "auto_find_batch_size", "eval_on_start", "do_eval", "do_predict", "use_liger_kernel", "use_peft"),
    *("use_lora", "overwrite_output_dir", "save_only_model", "label_smoothing_factor", "neftune_noise_alpha"),
    *("bf16_full_eval", "fp16_full_eval", "save_on_each_node", "hub_private_repo", "hub_always_push"),
    *("ddp_find_unused_parameters", "ddp_static_graph", "ignore_data_skip"),
}


def instead_of(key: str, given: Mapping[str, Any]) -> str | None:
    """What to write instead of a key of a recipe that has the keys `given`; None where the key is not known at all."""
    if key in ("fsdp", "fsdp_config"):
        return _of_fsdp(given)
    if key == "deepspeed":
        return _of_deepspeed(given[key])
    answer = _TABLE.get(key)
    value = given[key]
    nothing = value is None or value in ("", [], {}) or (key in _OFF and not value)
    return _ASKS_NOTHING if answer and nothing else answer


def _of_fsdp(given: Mapping[str, Any]) -> str:
    """The layout that `fsdp`, and `fsdp_config` with it, stand for."""
    fsdp = given.get("fsdp", True)
    if fsdp in _NOTHING:
        return _ASKS_NOTHING + ", and fsdp_config with it" * ("fsdp_config" in given)
    words = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    config = _loaded(given.get("fsdp_config", {}))
    if config is None:
        return f"its configuration {given['fsdp_config']!r:.60} cannot be read; say layout: {{zero_stage: 3}}"
    names = {"offload": ("offload_params", True), "auto_wrap": ("auto_wrap_policy", None)}
    options = dict(names.get(word, ("sharding_strategy", word)) for word in map(str, words) if word.lower() != "true")
    try:
        found = accelerate.read_fsdp({**config, **options})
    except ValueError as error:
        return f"of its configuration, {error}"
    unread = [note.key for note in found.notes]
    without = f"; {', '.join(unread)}: `shardwright config` says why there is no counterpart" if unread else ""
    return f"say {_written(found.layout, found.recipe)}{without}"


def _of_deepspeed(value: Any) -> str:
    """The layout that DeepSpeed's configuration, or a file with one, stands for."""
    if value in _NOTHING:
        return _ASKS_NOTHING
    config = _loaded(value)
    if config is None:
        return _DEEPSPEED
    try:
        found = deepspeed.read(config)
    except ValueError as error:
        return f"of its configuration, {error}"
    precision = {name: True for name in ("bf16", "fp16") if found.recipe.get(name)}
    file = value if isinstance(value, str) and not value.startswith("{") else "ds_config.json"
    return f"say {_written(found.layout, precision)}; `shardwright config {file}` translates all of the file"


def _written(layout: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Keys of a recipe in one line."""
    keys = {**({"layout": dict(layout)} if layout else {}), **recipe}
    lines = [
        yaml.safe_dump({name: value}, default_flow_style=True, width=10**6).strip()[1:-1]
        for name, value in keys.items()
    ]
    return " and ".join(lines) or "nothing in its place"


def _loaded(value: Any) -> Mapping[str, Any] | None:
    """A configuration, or that of a JSON file; None where there is none that can be read."""
    try:
        if isinstance(value, str):
            value = json.loads(value if value.lstrip().startswith("{") else Path(value).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, Mapping) else None
