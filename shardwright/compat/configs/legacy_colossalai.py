"""Python configuration files of Colossal-AI before it had plugins, `colossalai.launch(config="config.py")`, as text.

They have the shape of InternLM's, whose framework came of it, and other keys: `gradient_accumulation` and
`clip_grad_norm` at the top level, `fp16 = dict(mode=AMP_TYPE.NAIVE)`, `zero = dict(model_config=..., ...)`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from .colossalai import PLUGINS
from .found import CUDNN, QUIET, Found, Rules, apply, asks, dotted, nothing, says, to_layout, to_recipe
from .statements import Called, parse, read_assignments
from .training_calls import OPTIMIZERS, read_optimizer

_THEIRS = (
    *("clip_grad_norm", "gradient_accumulation", "fp16", "zero", "gradient_handler", "torch_ddp"),
    *("NUM_MICRO_BATCHES", "TENSOR_SHAPE"),
)
_MODES = ("2d", "2.5d", "3d", "sequence")  # of tensor parallelism, which InternLM has not
_INTERNLM = (
    *("hybrid_zero_optimizer", "grad_scaler", "adam", "beta2_scheduler", "ckpt", "JOB_NAME", "model_type"),
    *("monitor", "use_fp32_norm"),
)
_INTERNLM_DATA = ("micro_num", "micro_bsz", "seq_len")
_INTERNLM_PARALLEL = ("zero1", "weight", "sequence_parallel", "expert", "expert_weight", "sequence_2D")
_INTERNLM_MODES = ("mtp", "msp", "fsp", "isp")

_SCRIPT = "only the script reads it"
_LAUNCHER = "torchrun, srun or nproc: start the ranks"
_PLACED = "weights stay on the device; cpu_offload of the layout keeps masters and optimizer states on the host"
_CAST = "fp16: true casts the model and keeps fp32 masters"
_STRATEGY = "zero.model_config.shard_strategy"
_CONSTANTS = {
    "BATCH_SIZE": "per_device_train_batch_size, of one data-parallel rank",
    "GLOBAL_BATCH_SIZE": "per_device_train_batch_size x gradient_accumulation_steps x replicas",
    "TOTAL_BATCH_SIZE": "per_device_train_batch_size x gradient_accumulation_steps x replicas",
    "LEARNING_RATE": "learning_rate",
    "LR": "learning_rate",
    "WEIGHT_DECAY": "weight_decay",
    "NUM_EPOCHS": "num_train_epochs",
    "TRAIN_ITERS": "max_steps",
    "WARMUP_STEPS": "warmup_steps",
    "WARMUP_EPOCHS": "warmup_steps, in steps or as a share of them",
    "WARMUP_FRACTION": "warmup_steps, below 1 a share of all steps",
    "SEQ_LENGTH": "data: {max_length: ...}",
    "SEQ_LEN": "data: {max_length: ...}",
    "SEED": "seed",
    "LOG_PATH": "output_dir",
}


def _offload(found: Found, key: str, value: Any) -> None:
    if value in (True, "cpu"):
        found.layout["cpu_offload"] = True


def _placement(found: Found, key: str, value: Any) -> None:
    if value in ("cpu", "auto"):
        found.layout["cpu_offload"] = True
        found.note(key, value, f"in part: {_PLACED}")


def _other(name: str, quiet: Any) -> Any:
    return says(f"no option of the layout: {name}", (*QUIET, quiet))


_SCALER: Rules = {
    name: to_layout(name)
    for name in ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval")
}
_SCALERS = {
    **_SCALER,
    **{name: to_layout(name) for name in ("hysteresis", "max_scale")},
    "verbose": nothing,
    "log_num_zeros_in_grad": nothing,
}
RULES: Rules = {
    "clip_grad_norm": to_recipe("max_grad_norm"),
    "gradient_accumulation": to_recipe("gradient_accumulation_steps"),
    "seed": to_recipe("seed"),
    **{f"fp16.{name}": rule for name, rule in _SCALERS.items()},
    "fp16.mode": nothing,  # _precision
    "fp16.clip_grad_norm": nothing,  # overwritten by the one of the top level
    "fp16.init_scale": to_layout("initial_scale"),
    "fp16.enabled": says("the loss of fp16 is always scaled", (True, None)),
    "fp16.dynamic_grad_scale": says("the loss scale is dynamic; initial_scale and max_scale bound it", (True, None)),
    "fp16.opt_level": says(_CAST, ("O0", "O1", "O2", "O3")),
    "fp16.min_loss_scale": to_layout("min_scale"),
    "fp16.max_loss_scale": to_layout("max_scale"),
    "fp16.loss_scale": says("the loss scale is dynamic; initial_scale and max_scale bound it", ("dynamic", None)),
    "fp16.master_weights": says("masters are always kept", (True, None)),
    **{
        f"fp16.{name}": says(_CAST)
        for name in (
            *("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "cast_model_outputs"),
            *("num_losses", "verbosity"),
        )
    },
    **{f"zero.optimizer_config.{name}": rule for name, rule in _SCALERS.items()},
    "zero.optimizer_config.gpu_margin_mem_ratio": says(_PLACED, (*QUIET, 0.0)),
    "zero.optimizer_config.cpu_offload": _offload,
    "zero.model_config.bf16": nothing,  # _precision
    "zero.model_config.tensor_placement_policy": _placement,
    "zero.model_config.offload_config.device": _offload,
    _STRATEGY: nothing,  # how a weight is cut; all of them are
    "zero.model_config.reduce_scatter_bucket_size_mb": _other("buckets of zero_stage 3 are layers", 25),
    "zero.model_config.fp32_reduce_scatter": says("communication_dtype=torch.float32 is an argument of the plugin"),
    "zero.model_config.gradient_predivide_factor": _other("gradients are divided once", 1.0),
    "zero.model_config.reuse_fp16_shard": nothing,  # where gradients are kept
    "zero.model_config.use_memory_tracer": nothing,
    "zero.model_config.warmup_non_model_data_ratio": says(_PLACED),
    "torch_ddp.bucket_cap_mb": to_layout("ddp_bucket_cap_mb"),
    **{
        f"torch_ddp.{name}": to_layout(name)
        for name in ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    },
    "gradient_handler": nothing,  # gradients are always averaged over the ranks that share a weight
    **CUDNN,
    **dict.fromkeys(("rank", "local_rank", "world_size", "host", "port", "backend"), says(_LAUNCHER, ())),
    "model.num_chunks": nothing,  # _pipeline
    **{
        f"model.{name}": says("activation_checkpointing: true computes activations of layers again")
        for name in ("checkpoint", "use_grad_checkpoint")
    },
    "parallel.data": nothing,  # what the other sizes leave, there too
    "parallel.pipeline": nothing,  # _parallel
    "parallel.tensor": nothing,
}


def is_legacy(text: str, file: str) -> bool:
    """Whether a python configuration is of Colossal-AI, and not of InternLM; ValueError where its keys do not tell."""
    given, unread = read_assignments(text, file)
    names = {*given, *(name.partition(".")[0] for name, _ in unread)}
    parallel = given.get("parallel")
    inner = set(parallel) if isinstance(parallel, Mapping) else set()
    mode = str(dotted(given, "parallel.tensor.mode", "")).lower()
    imported = _imported(text, file)
    ours = [name for name in _THEIRS if name in names]
    ours += [f"parallel.tensor.mode {mode!r}"] * (mode in _MODES) + ["import colossalai"] * ("colossalai" in imported)
    others = [name for name in _INTERNLM if name in names]
    others += [f"parallel.{name}" for name in _INTERNLM_PARALLEL if name in inner]
    others += [f"data.{name}" for name in _INTERNLM_DATA if dotted(given, f"data.{name}") is not None]
    others += [f"parallel.tensor.mode {mode!r}"] * (mode in _INTERNLM_MODES)
    others += ["import internlm"] * bool({"internlm", "internevo"} & imported)
    if bool(ours) == bool(others):
        why = f"{ours[0]} is of Colossal-AI's, {others[0]} of InternLM's" if ours else "no key of it tells"
        raise ValueError(
            f"{file}: whether this is a configuration of Colossal-AI or of InternLM cannot be told ({why}); say "
            "--from colossalai or --from internlm"
        )
    return bool(ours)


def _imported(text: str, file: str) -> set[str]:
    """Packages that a file imports."""
    found = set()
    for node in ast.walk(parse(text, file)):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
    return found


def read(text: str, file: str) -> Found:
    """`file` for messages."""
    given, unread = read_assignments(text, file)
    if not {*_THEIRS, "parallel"} & {*given, *(name for name, _ in unread)}:
        raise ValueError(
            f"{file} builds none of {', '.join(PLUGINS)}, and has none of parallel, {', '.join(_THEIRS)}, so that "
            "there is no layout in it"
        )
    found = Found()
    objects = dict(unread)
    for name, expression in unread:
        constant = name.isupper() and name not in (*_CONSTANTS, "NUM_MICRO_BATCHES")  # noted where it is used
        if not constant and name not in ("fp16.mode", "model.type", "optimizer.type", _STRATEGY):
            found.note(name, expression, "no constant; the file is read, not run: write the value out")
    if "clip_grad_norm" not in objects:
        found.recipe["max_grad_norm"] = 0.0  # where it says none it does not clip, other than recipes
    _precision(given, objects, found)
    _parallel(given, objects, found)
    _pipeline(given, found)
    optimizer = given.get("optimizer")
    if isinstance(optimizer, Mapping):
        _optimizer(optimizer, objects, found)
    for name, value in given.items():
        if name.isupper():
            if name in _CONSTANTS:
                found.note(name, value, f"{_SCRIPT}; say {_CONSTANTS[name]}")
        elif value is not None and (name != "optimizer" or not isinstance(value, Mapping)):
            apply(RULES, {name: value}, found)
    if not found.recipe.get("fp16"):
        for name in _SCALERS:
            found.layout.pop(name, None)  # only fp16 scales the loss
    if "num_microbatches" in found.layout:  # those of each of the batches that make a step
        found.layout["num_microbatches"] *= found.recipe.get("gradient_accumulation_steps", 1)
    return found


def _precision(given: Mapping[str, Any], objects: Mapping[str, str], found: Found) -> None:
    """Of `zero`, whose weights are fp16 unless it says bf16, or of `fp16`; with the defaults of its loss scale."""
    zero, fp16 = given.get("zero"), given.get("fp16")
    if isinstance(zero, Mapping):
        found.layout["zero_stage"] = 3
        if asks(dotted(zero, "model_config.bf16", False)):
            found.recipe["bf16"] = True
            return
        found.recipe["fp16"] = True
        found.layout |= {"initial_scale": 2.0**32, "max_scale": 2.0**32}
        return
    mode = objects.get("fp16.mode", "").rpartition(".")[2]
    if mode in ("TORCH", "APEX", "NAIVE"):
        if mode == "APEX" and dotted(given, "fp16.opt_level") == "O0":
            return  # fp32
        found.recipe["fp16"] = True
        if mode != "NAIVE":
            found.layout |= {"growth_interval": 2000, "hysteresis": 1}  # of their scalers
        if mode == "APEX":
            found.layout["max_scale"] = 2.0**24
    elif "fp16.mode" in objects:
        found.note("fp16.mode", objects["fp16.mode"], "AMP_TYPE.TORCH, APEX or NAIVE is fp16: true")
    elif dotted(given, "fp16.mode") is not None or (fp16 and "mode" not in fp16):
        found.note("fp16", fp16, "a mode makes it fp16: true, AMP_TYPE.TORCH, APEX or NAIVE")


def _parallel(given: Mapping[str, Any], objects: Mapping[str, str], found: Found) -> None:
    parallel = given.get("parallel")
    if parallel is None:
        return
    if not isinstance(parallel, Mapping):
        raise ValueError(f"parallel={parallel!r} must be a dict, such as dict(pipeline=2, tensor=dict(size=2))")
    if "pipeline" in parallel and "parallel.pipeline.size" not in objects:  # which is noted
        found.layout["pp_size"] = _size("pipeline", parallel["pipeline"], found)
    if "tensor" not in parallel or "parallel.tensor.size" in objects:
        return
    size = _size("tensor", parallel["tensor"], found)
    mode = str(dotted(parallel, "tensor.mode", "1d") or "1d").lower()
    if mode == "sequence":  # a ring through which keys and values pass, over the ranks that would share a layer
        if size > 1:
            found.layout |= {
                "sp_size": size,
                "enable_sequence_parallelism": True,
                "sequence_parallelism_mode": "ring_attn",
            }
        return
    found.layout["tp_size"] = size
    if mode in _MODES and size > 1:
        why = f"layers are sharded in one dimension: tp_size={size} has as many ranks share a layer"
        found.note("parallel.tensor.mode", mode, why)
    elif mode not in ("1d", *_MODES):
        found.note("parallel.tensor.mode", mode, "layers are sharded in one dimension, as by 1d")


def _size(name: str, value: Any, found: Found) -> int:
    """`value` is the size, or a dict with the size and more."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key in ("depth", "tesseract_dep", "tesseract_dim"):
                found.note(f"parallel.{name}.{key}", each, "the depth of 2.5d, which has no counterpart")
            elif key not in ("size", "mode"):
                found.note(f"parallel.{name}.{key}", each, "no key of the layout")
        value = value.get("size")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"parallel.{name}={value!r} must be a whole number, or a dict with one as size")
    return value


def _pipeline(given: Mapping[str, Any], found: Found) -> None:
    """What is read where there are stages."""
    batches, chunks = given.get("NUM_MICRO_BATCHES"), dotted(given, "model.num_chunks", 1)
    if found.layout.get("pp_size", 1) == 1:
        return
    if isinstance(batches, int):
        found.layout["num_microbatches"] = batches
    if isinstance(chunks, int) and chunks > 1:
        found.layout |= {"pp_style": "interleaved", "num_model_chunks": chunks}


def _optimizer(given: Mapping[str, Any], objects: Mapping[str, str], found: Found) -> None:
    """`optimizer = dict(type=HybridAdam, lr=...)`, which a script builds."""
    arguments = {key: value for key, value in given.items() if key != "type"}
    written = given.get("type") or objects.get("optimizer.type")
    name = str(written).rpartition(".")[2]
    if name in OPTIMIZERS:
        call = ast.Call(ast.Name(name, ast.Load()), [], [])
        read_optimizer(name, Called(call, list(arguments.items())), found)
    else:
        found.note("optimizer", {"type": str(written), **arguments}, "a script builds it; say optim and learning_rate")
