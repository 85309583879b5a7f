"""The JSON that DeepSpeed takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .found import Found, Rules, apply, asks, dotted, nothing, one_of, says, to_layout, to_recipe

_TUNES = "there is nothing to tune: buckets follow zero_bucket_size_in_m, and at zero_stage 3 the layers"
_WEIGHTS = "weights stay on the device; cpu_offload=True of the layout keeps masters and optimizer states on the host"
_CHECKPOINTING = "it says how layers are recomputed, not that they are; activation_checkpointing: true recomputes them"


def _enabled(name: str, to: str = "recipe") -> Any:
    def read(found: Found, key: str, value: Any) -> None:
        if value is True:
            getattr(found, to)[name] = True

    return read


def _tracker(found: Found, key: str, value: Any) -> None:
    if value is True:
        found.recipe.setdefault("report_to", []).append(key.partition(".")[0])


def _offload(found: Found, key: str, value: Any) -> None:
    if value == "cpu":
        found.layout["cpu_offload"] = True
    elif value not in (None, "none", "auto"):
        found.note(key, value, "optimizer states are not offloaded to disk; cpu keeps them in host memory")


def _bucket(found: Found, key: str, value: Any) -> None:
    if value != "auto":
        found.layout["zero_bucket_size_in_m"] = float(value) / 1e6


def _power(found: Found, key: str, value: Any) -> None:
    found.layout["initial_scale"] = 2.0**value


def _betas(found: Found, key: str, value: Any) -> None:
    if value != "auto":
        found.recipe["adam_beta1"], found.recipe["adam_beta2"] = value


def _if_enabled(why: str) -> Any:
    """A section that is off unless it says `enabled`."""

    def read(found: Found, key: str, value: Any) -> None:
        if not isinstance(value, Mapping) or asks(value.get("enabled", False)):
            found.note(key, value, why)

    return read


def _shared(found: Found, key: str, value: Any) -> None:
    if value > 1:
        found.layout |= {
            "sp_size": value,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all",
        }


def _group(found: Found, key: str, value: Any) -> None:
    if value > 0:
        found.layout["zero_group_size"] = value


def _cpu(found: Found, key: str, value: Any) -> None:
    if asks(value):
        found.layout["cpu_offload"] = True


RULES: Rules = {
    "train_batch_size": says(
        "a recipe has it as per_device_train_batch_size x gradient_accumulation_steps x replicas: give what it lacks"
    ),
    "train_micro_batch_size_per_gpu": to_recipe("per_device_train_batch_size"),
    "gradient_accumulation_steps": to_recipe("gradient_accumulation_steps"),
    "gradient_clipping": to_recipe("max_grad_norm"),
    "steps_per_print": to_recipe("logging_steps"),
    "bf16.enabled": _enabled("bf16"),
    "bfloat16.enabled": _enabled("bf16"),
    "fp16.enabled": _enabled("fp16"),
    "fp16.auto_cast": says("inputs are always cast to the dtype that the model computes in"),
    "fp16.loss_scale": says("the loss scale is dynamic; initial_scale and max_scale of the layout bound it"),
    "fp16.initial_scale_power": _power,
    "fp16.loss_scale_window": to_layout("growth_interval"),
    "fp16.hysteresis": to_layout("hysteresis"),
    "fp16.consecutive_hysteresis": says("hysteresis counts overflows in all"),
    "fp16.min_loss_scale": to_layout("min_scale"),
    "zero_optimization.stage": to_layout("zero_stage"),
    "zero_optimization.overlap_comm": to_layout("overlap_communication"),
    "zero_optimization.reduce_bucket_size": _bucket,
    "zero_optimization.offload_optimizer.device": _offload,
    "zero_optimization.offload_optimizer.pin_memory": nothing,
    "zero_optimization.offload_optimizer.nvme_path": nothing,
    "zero_optimization.offload_param.device": says(_WEIGHTS),
    "zero_optimization.offload_param.pin_memory": nothing,
    "zero_optimization.offload_param.nvme_path": nothing,
    "zero_optimization.cpu_offload": _cpu,  # as older versions have it
    "zero_optimization.cpu_offload_params": says(_WEIGHTS),
    "zero_optimization.cpu_offload_use_pin_memory": nothing,
    "zero_optimization.mics_shard_size": _group,
    "zero_optimization.zero_hpz_partition_size": says("zero_group_size of the layout shards inside groups", (None, 1)),
    "zero_optimization.zero_quantized_weights": says("fp8_communication=True of the layout sends 8 bits"),
    "zero_optimization.zero_quantized_gradients": says("fp8_communication=True of the layout sends 8 bits"),
    **{
        f"zero_optimization.{name}": says(_TUNES)
        for name in (
            *(
                "allgather_bucket_size",
                "allgather_partitions",
                "contiguous_gradients",
                "reduce_scatter",
                "sub_group_size",
            ),
            *("round_robin_gradients", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "ignore_unused_parameters"),
        )
    },
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": nothing,  # models are always saved whole
    "optimizer.type": one_of(
        "optim",
        {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd"},
        "no optimizer of recipes; adamw_torch, sgd, adafactor and others are, and a script may bring any",
    ),
    "optimizer.params.lr": to_recipe("learning_rate"),
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": to_recipe("adam_epsilon"),
    "optimizer.params.weight_decay": to_recipe("weight_decay"),
    "optimizer.params.torch_adam": nothing,  # torch's Adam always
    "optimizer.params.adam_w_mode": says("weights decay as in AdamW", (True, None)),
    "optimizer.params.bias_correction": says("AdamW always corrects the bias", (True, None)),
    "scheduler.type": one_of(
        "lr_scheduler_type",
        {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"},
        "no schedule of recipes: linear, cosine, constant_with_warmup and others are",
    ),
    "scheduler.params.warmup_num_steps": to_recipe("warmup_steps"),
    "scheduler.params.total_num_steps": to_recipe("max_steps"),
    "scheduler.params.warmup_max_lr": nothing,  # _rate_of_schedule
    "scheduler.params.warmup_type": nothing,
    **{
        f"scheduler.params.{name}": says("the learning rate begins and ends at 0")
        for name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio")
    },
    "activation_checkpointing": says(_CHECKPOINTING),
    "tensor_parallel.autotp_size": to_layout("tp_size"),
    "sequence_parallel_size": _shared,
    "communication_data_type": says("communication_dtype=torch.bfloat16 (a dtype) is an argument of the plugin"),
    "tensorboard.enabled": _tracker,
    "wandb.enabled": _tracker,
    "flops_profiler": _if_enabled("profile_steps of a recipe, and booster.profile"),
    "comms_logger": _if_enabled("print(plugin.layout) tells what is sent, booster.profile when"),
    **{
        name: _if_enabled("no key that is known here")
        for name in (
            *("autotuning", "elasticity", "eigenvalue", "csv_monitor", "comet", "progressive_layer_drop"),
            *("curriculum_learning", "data_efficiency", "hybrid_engine", "amp"),
        )
    },
    "zero_allow_untested_optimizer": nothing,  # no optimizer is refused for being untested
    "wall_clock_breakdown": says("metrics.jsonl has the time of every step"),
}


# Keys whose "auto" HuggingFace's Trainer fills in, and the keys of recipes that say the same.
_TRAINER_SAYS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
_TRAINER = "an argument of HuggingFace's Trainer says it"
_HIGHEST = 0.001  # learning rate of DeepSpeed's schedules that do not say it
_WARM_UP = 1000  # steps of DeepSpeed's schedules that do not say how many


def read(given: Mapping[str, Any]) -> Found:
    found = Found()
    apply(RULES, given, found)
    for key, ours in _TRAINER_SAYS.items():
        if dotted(given, key) == "auto":
            found.note(key, "auto", f"{_TRAINER}: give {ours}")
    if "gradient_clipping" not in given:
        found.recipe["max_grad_norm"] = 0.0  # which is its default, and not that of recipes
    if "lr_scheduler_type" in found.recipe and dotted(given, "scheduler.params.warmup_num_steps") is None:
        found.recipe["warmup_steps"] = _WARM_UP
    if not found.recipe.get("fp16"):
        for name in ("initial_scale", "growth_interval", "hysteresis", "min_scale"):
            found.layout.pop(name, None)  # only fp16 scales the loss
    _rate_of_schedule(given, found)
    if "optimizer" in given and "scheduler" not in given:
        found.note("scheduler", None, "the script brings one, or the learning rate is constant; say lr_scheduler_type")
    warms_up = str(dotted(given, "scheduler.type")).startswith("Warmup")
    if warms_up and dotted(given, "scheduler.params.warmup_type", "log") == "log":
        found.note("scheduler.params.warmup_type", "log", "the learning rate rises linearly")
    if dotted(given, "optimizer.type") == "Adam" and dotted(given, "optimizer.params.adam_w_mode", True) is False:
        found.recipe.pop("optim", None)
    if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= set(found.recipe):
        found.notes = [note for note in found.notes if note.key != "train_batch_size"]  # which is their product
    if found.layout.get("zero_stage") not in (1, 2):
        found.layout.pop("zero_bucket_size_in_m", None)
    return found


def _rate_of_schedule(given: Mapping[str, Any], found: Found) -> None:
    """Two of DeepSpeed's schedules set the learning rate by themselves, whatever the optimizer says."""
    if dotted(given, "scheduler.type") not in ("WarmupLR", "WarmupDecayLR"):
        return
    highest = dotted(given, "scheduler.params.warmup_max_lr", _HIGHEST)
    stated = dotted(given, "optimizer.params.lr")
    if isinstance(highest, list):
        found.note("scheduler.params.warmup_max_lr", highest, "groups of parameters have one learning rate")
    elif highest == "auto":
        found.note("scheduler.params.warmup_max_lr", "auto", f"{_TRAINER}: give learning_rate")
    else:
        found.recipe["learning_rate"] = float(highest)
        if stated not in (None, "auto") and stated != highest:
            found.note("optimizer.params.lr", stated, f"the schedule sets the learning rate to {highest}")


def write(found: Found) -> dict[str, Any]:
    """The JSON of a layout that DeepSpeed has; what it has not is noted."""
    layout, recipe = dict(found.layout), dict(found.recipe)
    out: dict[str, Any] = {"zero_optimization": {"stage": layout.pop("zero_stage", 0)}}
    zero = out["zero_optimization"]
    size = layout.pop("tp_size", 1)
    if size > 1:
        out["tensor_parallel"] = {"autotp_size": size}
    if layout.get("sequence_parallelism_mode") == "all_to_all" and "sp_size" in layout:
        out["sequence_parallel_size"] = layout.pop("sp_size")
        for name in ("sequence_parallelism_mode", "enable_sequence_parallelism"):
            layout.pop(name, None)
    if layout.pop("cpu_offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    if "overlap_communication" in layout:
        zero["overlap_comm"] = layout.pop("overlap_communication")
    if "zero_bucket_size_in_m" in layout:
        zero["reduce_bucket_size"] = int(layout.pop("zero_bucket_size_in_m") * 1e6)
    if "zero_group_size" in layout:
        zero["mics_shard_size"] = layout.pop("zero_group_size")
    _write_precision(out, found.precision, layout)
    keys = {
        **_batches(layout, recipe),
        "gradient_clipping": recipe.pop("max_grad_norm", layout.pop("max_norm", None)),
        "steps_per_print": recipe.pop("logging_steps", None),
    }
    out |= {name: value for name, value in keys.items() if value is not None}
    _write_schedule(out, recipe)
    _write_optimizer(out, recipe, found)
    trackers = recipe.pop("report_to", [])
    for name in [trackers] if isinstance(trackers, str) else trackers:
        if name in ("tensorboard", "wandb"):
            out[name] = {"enabled": True}
        elif name != "none":
            found.note("report_to", name, "no key of DeepSpeed's configuration")
    for name in ("precision", "bf16", "fp16"):
        layout.pop(name, None)
        recipe.pop(name, None)
    for name, value in layout.items():
        found.note(f"layout.{name}", value, "no key of DeepSpeed's configuration")
    for name, value in recipe.items():
        found.note(name, value, "no key of DeepSpeed's configuration; HuggingFace's Trainer has some of them")
    return out


def _write_precision(out: dict[str, Any], precision: str, layout: dict[str, Any]) -> None:
    if precision == "fp32":
        return
    section = out[precision] = {"enabled": True}
    if precision != "fp16":
        return
    scaler = {"growth_interval": "loss_scale_window", "hysteresis": "hysteresis", "min_scale": "min_loss_scale"}
    for ours, theirs in scaler.items():
        if ours in layout:
            section[theirs] = layout.pop(ours)
    power = math.log2(layout.get("initial_scale") or 0.3)
    if power.is_integer():
        section["initial_scale_power"] = int(power)
        layout.pop("initial_scale")


def _batches(layout: dict[str, Any], recipe: dict[str, Any]) -> dict[str, int | None]:
    """Microbatches are batches of accumulation there: of a rank's samples, as many parts as the layout makes."""
    size, steps = recipe.pop("per_device_train_batch_size", None), recipe.pop("gradient_accumulation_steps", None)
    count = layout.get("num_microbatches")
    if size is not None:
        samples = size * (steps or 1)
        part = layout.get("microbatch_size")
        count = count or (samples // part if part and samples % part == 0 else None)
        if count and samples % count == 0:
            size, steps = samples // count, count
            for name in ("num_microbatches", "microbatch_size"):
                layout.pop(name, None)
    elif count:
        steps = layout.pop("num_microbatches")
        size = layout.pop("microbatch_size", None)
    return {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": steps}


def _write_schedule(out: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Those that it has, where their steps are known."""
    kind = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR", "constant_with_warmup": "WarmupLR"}.get(
        recipe.get("lr_scheduler_type", "")
    )
    warmup, steps = recipe.get("warmup_steps", 0), recipe.get("max_steps", -1)
    if kind is None or 0 < warmup < 1 or (steps < 1 and kind != "WarmupLR"):
        return
    params: dict[str, Any] = {"warmup_num_steps": int(warmup), "warmup_type": "linear"}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": recipe.get("learning_rate", _TRAINER_RATE)}
    if kind != "WarmupLR":
        params["total_num_steps"] = recipe.pop("max_steps")
    out["scheduler"] = {"type": kind, "params": params}
    for name in ("lr_scheduler_type", "warmup_steps"):
        recipe.pop(name, None)


def _write_optimizer(out: dict[str, Any], recipe: dict[str, Any], found: Found) -> None:
    params = {name: recipe.pop(ours) for name, ours in _PARAMS.items() if ours in recipe}
    if {"adam_beta1", "adam_beta2"} & set(recipe):
        params["betas"] = [recipe.pop("adam_beta1", 0.9), recipe.pop("adam_beta2", 0.999)]
    kind = recipe.pop("optim", None)
    if kind in (None, "adamw_torch", "adamw_torch_fused", "hybrid_adam", "sgd"):
        if params or kind:
            out["optimizer"] = {"type": "SGD" if kind == "sgd" else "AdamW", "params": params}
    else:
        found.note("optim", kind, "DeepSpeed has no such optimizer")


_PARAMS = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
_TRAINER_RATE = 5e-5  # of recipes that do not say it
