"""Writing what was found: a recipe, a plugin's call, the dict form, and configurations of other frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from . import accelerate, deepspeed
from .found import Found, Note

TARGETS = ("shardwright", "plugin", "from_config", "deepspeed", "accelerate")
_MISSING = {
    "model": "model: NAME_OR_DIRECTORY",
    "data": "data: {path: train.jsonl, text: text}",
}


def write(found: Found, target: str) -> tuple[str, list[Note]]:
    """The text, and what it lacks."""
    text = _WRITERS[target](found)
    return text, found.notes


def _recipe(found: Found) -> str:
    missing = [line for key, line in _MISSING.items() if key not in found.recipe]
    if found.recipe.get("eval_strategy", "no") != "no" and "eval_data" not in found.recipe:
        missing.append("eval_data: {path: held_out.jsonl, text: text}")
    data = found.recipe.get("data")
    if isinstance(data, dict) and not {"path", "dataset", "mix"} & set(data):
        missing.append("data.path or data.dataset, and data.text or data.messages")
    lines = [f"# to be added: {line}" for line in missing]
    recipe = {**found.recipe, **({"layout": found.layout} if found.layout else {})}
    return "\n".join([*lines, yaml.safe_dump(recipe, sort_keys=False, width=100).rstrip() if recipe else "{}"]) + "\n"


def _plugin(found: Found) -> str:
    """A statement of python."""
    arguments = dict(found.arguments)
    checkpointing = arguments.pop("gradient_checkpoint_config", None)
    shown = [f"{name}={value!r}" for name, value in arguments.items()]
    imports = ["from shardwright.plugins import HybridParallelPlugin"]
    if checkpointing is not None:
        imports.append("from shardwright.shardformer import PipelineGradientCheckpointConfig")
        inner = ", ".join(f"{name}={value!r}" for name, value in checkpointing.items())
        shown.append(f"gradient_checkpoint_config=PipelineGradientCheckpointConfig({inner})")
    for name, value in _others(found, ("max_grad_norm", "activation_checkpointing", "bf16", "fp16")):
        if name != "gradient_accumulation_steps":
            found.note(name, value, "no argument of a plugin; the script says it")
    body = "".join(f"    {each},\n" for each in shown)
    return "\n".join(imports) + f"\n\nplugin = HybridParallelPlugin(\n{body})\n"


def _others(found: Found, read: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in found.recipe.items() if name not in read]


_SCHEDULES = {"1f1b": "1F1B", "zb": "ZBH1", "zbv": "ZBV", "interleaved": "interleaved", "gpipe": "gpipe"}
_SCALER = ("initial_scale", "min_scale", "growth_interval")


def _from_config(found: Found) -> str:
    """The dict form that `HybridParallelPlugin.from_config` and InternLM take."""
    left = dict(found.arguments)
    stage, size = left.pop("zero_stage", 0), left.pop("zero_group_size", None)
    zero1: dict[str, Any] = {"size": size or -1, "fsdp": stage == 3} if stage else {"size": 1}
    if stage == 2:
        found.note("layout.zero_stage", 2, "the dict form has stages 0, 1 and 3; this is 1")
    pipeline: dict[str, Any] = {"size": left.pop("pp_size", 1)}
    if "pp_style" in left:
        pipeline["mode"] = _SCHEDULES.get(left["pp_style"], left["pp_style"])
        if left["pp_style"] in _SCHEDULES:
            left.pop("pp_style")
        else:
            pipeline.pop("mode")
    if "overlap_p2p" in left:
        pipeline["interleaved_overlap"] = left.pop("overlap_p2p")
    parallel = {"zero1": zero1, "tensor": {"size": left.pop("tp_size", 1), "mode": "mtp"}, "pipeline": pipeline}
    parallel["sequence_parallel"] = left.pop("enable_sequence_parallelism", False)
    optimizer = {
        theirs: left.pop(ours)
        for ours, theirs in (
            *(("overlap_communication", "overlap_sync_grad"), ("overlap_allgather", "overlap_sync_param")),
            ("max_norm", "clip_grad_norm"),
        )
        if ours in left
    }
    if "zero_bucket_size_in_m" in left:
        optimizer["reduce_bucket_size"] = int(left.pop("zero_bucket_size_in_m") * 1e6)
    names = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
    model: dict[str, Any] = {"dtype": names[left.pop("precision")]}
    checkpointing = left.pop("gradient_checkpoint_config", {})
    if set(checkpointing) == {"gradient_checkpointing_ratio"}:
        model["checkpoint"] = checkpointing["gradient_checkpointing_ratio"]
    elif checkpointing:
        left["gradient_checkpoint_config"] = checkpointing
    for ours, theirs in (("num_model_chunks", "num_chunks"), ("parallel_output", "parallel_output")):
        if ours in left:
            model[theirs] = left.pop(ours)
    data = {
        theirs: left.pop(ours)
        for ours, theirs in (("num_microbatches", "micro_num"), ("microbatch_size", "micro_bsz"))
        if ours in left
    }
    scaler: dict[str, Any] = {
        name: left.pop(name)
        for name in (*_SCALER[3:], "growth_factor", "backoff_factor", "max_scale", "hysteresis")
        if name in left
    }
    fp16 = {name: left.pop(name) for name in _SCALER if name in left}
    if fp16:
        scaler["fp16"] = fp16
    sections = {
        "parallel": parallel,
        "hybrid_zero_optimizer": optimizer,
        "model": model,
        "data": data,
        "grad_scaler": scaler,
    }
    for name, value in left.items():
        found.note(f"layout.{name}", value, "not in the dict form: from_config(config, " + f"{name}={value!r})")
    for name, value in _others(found, ("max_grad_norm", "activation_checkpointing", "bf16", "fp16")):
        if name != "gradient_accumulation_steps":
            found.note(name, value, "not part of a layout")
    return "".join(f"{name} = {section!r}\n" for name, section in sections.items() if section)


_WRITERS: dict[str, Callable[[Found], str]] = {
    "shardwright": _recipe,
    "plugin": _plugin,
    "from_config": _from_config,
    "deepspeed": lambda found: json.dumps(deepspeed.write(found), indent=2) + "\n",
    "accelerate": lambda found: yaml.safe_dump(accelerate.write(found), sort_keys=False),
}
