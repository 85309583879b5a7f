"""The YAML that `accelerate config` writes, and the configurations of FSDP in it and in HuggingFace's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .deepspeed import _WEIGHTS, _offload
from .found import QUIET, Found, Rule, Rules, apply, asks, dotted, nothing, one_of, says, to_layout, to_recipe

_HERE = "torchrun, srun or nproc: start the ranks; machines are the launcher's"
_LAYERS = "the layers are found in the model"
_ALWAYS = "it is always so"
_DEVICES = "CPUs and CUDA devices are served"
_FILES = "checkpoints are independent of the layout, and models are saved whole"


def _machines(found: Found, key: str, value: Any) -> None:
    if value and value > 1:
        found.recipe.pop("nproc", None)
        found.note(key, value, "start the ranks of several machines with torchrun or srun; nproc is for one")


def _processes(found: Found, key: str, value: Any) -> None:
    found.recipe["nproc"] = value


def _precision(found: Found, key: str, value: Any) -> None:
    if value in ("bf16", "fp16"):
        found.recipe[value] = True
    elif value == "fp8":
        found.recipe["bf16"], found.layout["use_fp8"] = True, True
    elif value not in ("no", None, False):
        found.note(key, value, "bf16, fp16 and no are the precisions")


def _strategy(found: Found, key: str, value: Any) -> None:
    names = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
    name = names.get(value, str(value).upper().removeprefix("_"))
    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
    if name not in stages:
        found.note(key, value, f"{', '.join(stages)} are the strategies")
        return
    found.layout["zero_stage"] = stages[name]
    if name.startswith("HYBRID"):
        found.note(key, value, "zero_group_size of the layout is the number of ranks of one machine: give it")


def _reshard(found: Found, key: str, value: Any) -> None:
    if isinstance(value, bool):
        found.layout["zero_stage"] = 3 if value else 2
    elif str(value).lower() in ("true", "false"):
        found.layout["zero_stage"] = 3 if str(value).lower() == "true" else 2
    else:
        _strategy(found, key, value)  # as configurations for both versions of FSDP have it


def _offload_params(found: Found, key: str, value: Any) -> None:
    if asks(value):
        found.layout["cpu_offload"] = True
        found.note(key, value, f"in part: {_WEIGHTS}")


def _checkpointing(found: Found, key: str, value: Any) -> None:
    if asks(value):
        found.recipe["activation_checkpointing"] = True


def _recomputed(found: Found, key: str, value: Any) -> None:
    if asks(value):
        found.recipe["activation_checkpointing"] = True
        found.note(key, value, "Megatron's recomputes attention alone, and here it is whole layers: the same numbers")


FSDP: dict[str, Rule] = {
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "offload_params": _offload_params,
    "cpu_offload": _offload_params,
    "activation_checkpointing": _checkpointing,
    "version": nothing,
    "auto_wrap_policy": says(_LAYERS),
    "transformer_layer_cls_to_wrap": says(_LAYERS),
    "min_num_params": says(_LAYERS),
    "wrap_class_names": says(_LAYERS),
    "backward_prefetch": says("gather_ahead of the layout says how many layers ahead weights are gathered"),
    "backward_prefetch_policy": says("gather_ahead of the layout says how many layers ahead weights are gathered"),
    "forward_prefetch": says("gather_ahead of the layout says how many layers ahead weights are gathered"),
    "use_orig_params": says(_ALWAYS, (True, "true", None)),
    "sync_module_states": nothing,  # replicas always begin with the same weights
    "cpu_ram_efficient_loading": nothing,  # LazyInitContext, which recipes use
    "state_dict_type": says(_FILES),
    "limit_all_gathers": says(_ALWAYS, (True, "true", None)),
    "xla": says(_DEVICES),
    "xla_fsdp_v2": says(_DEVICES),
    "xla_fsdp_grad_ckpt": says(_DEVICES),
}
_MEGATRON: dict[str, Rule] = {
    "tp_degree": to_layout("tp_size"),
    "pp_degree": to_layout("pp_size"),
    "num_micro_batches": to_recipe("gradient_accumulation_steps"),
    "gradient_clipping": to_recipe("max_grad_norm"),
    "recompute_activations": _recomputed,
    "use_distributed_optimizer": lambda found, key, value: found.layout.update(zero_stage=1) if value else None,
    "sequence_parallelism": lambda found, key, value: (
        found.layout.update(enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather")
        if value
        else None
    ),
}


def _sequence(found: Found, key: str, value: Any) -> None:
    if value and value > 1:
        mode = "all_to_all" if key.endswith("sp_size") else "ring_attn"
        found.layout |= {"sp_size": value, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


def _sharded(found: Found, key: str, value: Any) -> None:
    if value and value > 1:
        found.layout.setdefault("zero_stage", 3)
        found.layout["zero_group_size"] = value


RULES: Rules = {
    "compute_environment": nothing,
    "distributed_type": one_of(
        "",
        dict.fromkeys(("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")),
        _DEVICES,
    ),
    "num_processes": _processes,
    "num_machines": _machines,
    "mixed_precision": _precision,
    "downcast_bf16": says("bf16: true keeps fp32 masters"),
    "use_cpu": says("CUDA_VISIBLE_DEVICES= hides GPUs"),
    "main_training_function": nothing,
    "debug": nothing,
    "same_network": nothing,
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "gpu_ids"), says(_HERE)),
    **{f"tpu_{name}": says(_DEVICES) for name in ("env", "use_cluster", "use_sudo", "name", "zone")},
    "enable_cpu_affinity": says("numactl, or --cpu-bind of srun, ties ranks to cores"),
    "gradient_accumulation_steps": to_recipe("gradient_accumulation_steps"),
    "dynamo_config.dynamo_backend": lambda found, key, value: (
        found.layout.update(enable_jit_fused=True) if str(value).lower() == "inductor" else None
    ),
    "dynamo_config.dynamo_mode": says("layers are compiled in torch's default mode", (*QUIET, "default")),
    **dict.fromkeys(
        (f"dynamo_config.dynamo_use_{name}" for name in ("dynamic", "fullgraph", "regional_compilation")),
        says("layers of one kind are compiled as one graph"),
    ),
    "fp8_config": says("fp8_options of the layout has the options of fp8"),
    "deepspeed_config.zero_stage": to_layout("zero_stage"),
    "deepspeed_config.gradient_accumulation_steps": to_recipe("gradient_accumulation_steps"),
    "deepspeed_config.gradient_clipping": to_recipe("max_grad_norm"),
    "deepspeed_config.offload_optimizer_device": _offload,
    "deepspeed_config.offload_param_device": says(_WEIGHTS),
    "deepspeed_config.zero3_init_flag": nothing,  # LazyInitContext, which recipes use
    "deepspeed_config.zero3_save_16bit_model": nothing,  # models are always saved whole
    "deepspeed_config.deepspeed_config_file": says("a file of its own: shardwright config reads that one"),
    "deepspeed_config.deepspeed_multinode_launcher": says(_HERE),
    **{f"fsdp_config.fsdp_{name}": rule for name, rule in FSDP.items()},
    **{f"megatron_lm_config.megatron_lm_{name}": rule for name, rule in _MEGATRON.items()},
    "parallelism_config.parallelism_config_tp_size": to_layout("tp_size"),
    "parallelism_config.parallelism_config_dp_shard_size": _sharded,
    "parallelism_config.parallelism_config_dp_replicate_size": nothing,  # what the other sizes leave
    "parallelism_config.parallelism_config_cp_size": _sequence,
    "parallelism_config.parallelism_config_sp_size": _sequence,
    "parallelism_config.parallelism_config_cp_comm_strategy": says("keys and values travel round a ring"),
}


def read(given: Mapping[str, Any]) -> Found:
    found = Found()
    apply(RULES, given, found)
    if given.get("distributed_type") == "FSDP":
        found.layout.setdefault("zero_stage", 3)  # what Accelerate takes where the file says none, here and below
    elif given.get("distributed_type") == "DEEPSPEED" and not dotted(given, "deepspeed_config.deepspeed_config_file"):
        found.layout.setdefault("zero_stage", 2)
    if "max_grad_norm" not in found.recipe and "megatron_lm_config" not in given:
        why = "a recipe clips gradients at 1.0, as HuggingFace's Trainer does; say 0 if the script does not clip them"
        found.note("max_grad_norm", None, why)
    if found.recipe.get("nproc") is not None and any(note.key == "num_machines" for note in found.notes):
        found.recipe.pop("nproc")
    return found


def read_fsdp(given: Mapping[str, Any]) -> Found:
    """With or without the prefix `fsdp_`, as Trainer's `fsdp_config` has it."""
    found = Found()
    plain = {str(key).removeprefix("fsdp_"): value for key, value in given.items()}
    apply(FSDP, plain, found)
    found.layout.setdefault("zero_stage", 3)
    return found


def write(found: Found) -> dict[str, Any]:
    """What `accelerate launch --config_file` takes: FSDP2 for the ZeRO stages; what it has not is noted."""
    layout, recipe = dict(found.layout), dict(found.recipe)
    stage = layout.pop("zero_stage", 0)
    out: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if stage else "MULTI_GPU",
        "mixed_precision": "no" if found.precision == "fp32" else found.precision,
        "num_machines": 1,
        "num_processes": recipe.pop("nproc", None) or 1,
    }
    if stage:
        out["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": bool(layout.pop("cpu_offload", False)),
            "fsdp_activation_checkpointing": bool(recipe.pop("activation_checkpointing", False)),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if stage == 1:
            found.note("layout.zero_stage", 1, "FSDP shards gradients too, as zero_stage 2")
    if layout.get("tp_size", 1) > 1:
        out["parallelism_config"] = {"parallelism_config_tp_size": layout.pop("tp_size")}
    for name in ("precision", "tp_size"):
        layout.pop(name, None)
    for name in ("bf16", "fp16"):
        recipe.pop(name, None)
    for name, value in layout.items():
        if (name, value) not in (("pp_size", 1), ("sp_size", 1)):
            found.note(f"layout.{name}", value, "no key of Accelerate's configuration")
    for name, value in recipe.items():
        found.note(name, value, "an argument of Accelerator or of the script, not of the configuration")
    return out
