"""The python configuration files of InternLM and InternEvo, read as text."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, is_dataclass
from typing import Any

from ...plugins.hybrid.config_form import INNER, SCHEDULES, SECTIONS, TENSOR_MODES, read_config
from .found import CUDNN, Found, Rules, apply, dotted, each_leaf, nothing, says, to_recipe
from .statements import read_assignments

_MODEL = "the model of a recipe is a name, a directory or {config: {model_type: ...}} of transformers"
_DATA = "say data: {path: FILES, text: COLUMN} or {dataset: NAME}"
_CHECKPOINTS = "save_steps, save_total_limit, output_dir and resume say when and where checkpoints are written"
_ADAM = "AdamW has one constant beta2"
_LOSS = "the model's own loss is used"
_NO_KEY = "no key of the layout"


def _evaluated(found: Found, key: str, value: Any) -> None:
    if value:
        found.recipe |= {"eval_strategy": "steps", "eval_steps": value}


RULES: Rules = {
    "JOB_NAME": to_recipe("run_name"),
    "model_type": says(_MODEL),
    "model": says(_MODEL),
    "adam.lr": to_recipe("learning_rate"),
    "adam.adam_beta1": to_recipe("adam_beta1"),
    "adam.adam_beta2": to_recipe("adam_beta2"),
    "adam.adam_beta2_c": says(_ADAM),
    "adam.adam_eps": to_recipe("adam_epsilon"),
    "adam.weight_decay": to_recipe("weight_decay"),
    "lr_scheduler.total_steps": to_recipe("max_steps"),
    "lr_scheduler.warmup_ratio": to_recipe("warmup_steps"),  # below 1 it is a share there, too
    "lr_scheduler.init_steps": says("a warm-up begins at once"),
    "lr_scheduler.eta_min": says("the cosine ends at 0"),
    "lr_scheduler.last_epoch": nothing,
    "beta2_scheduler.init_beta2": nothing,  # adam.adam_beta2
    "beta2_scheduler.c": says(_ADAM),
    "beta2_scheduler.cur_iter": nothing,
    "loss.label_smoothing": says(_LOSS),
    "loss.moe_loss_coeff": says(_LOSS),
    "ckpt": says(_CHECKPOINTS),
    "data.type": says(_DATA),
    "data.train_folder": says(_DATA),
    "data.valid_folder": says("say eval_data: {path: FILES, text: COLUMN}"),
    "data.total_steps": to_recipe("max_steps"),
    "data.valid_every": _evaluated,
    "data.gradient_accumulation": to_recipe("gradient_accumulation_steps"),
    "data.num_worker": to_recipe("dataloader_num_workers"),
    "data.skip_batches": says("resume goes on at the sample where it stopped"),
    "data.rampup_batch_size": says("all steps have the same batch size"),
    "data.min_length": says(_DATA),
    "data.valid_micro_num": says("per_device_eval_batch_size says how many samples an evaluation takes at a time"),
    "data.empty_cache_and_diag_interval": nothing,
    "data.diag_outlier_ratio": nothing,
    "monitor": says("report_to, and metrics.jsonl"),
    "generation": says("shardwright generate writes text with a trained model"),
    "use_fp32_norm": says("norms compute in the dtype of the model, as transformers has them"),
    **CUDNN,
    "tensorboard.enable_tb": lambda found, key, value: found.recipe.update(report_to="tensorboard") if value else None,
}


def read(text: str, file: str) -> Found:
    """`file` for messages."""
    given, unread = read_assignments(text, file)
    found = Found()
    for name, expression in unread:
        found.note(name, expression, "no constant; the file is read, not run: write the value out")
    known = {
        section: {key: value for key, value in (given.get(section) or {}).items() if key in keys}
        for section, keys in SECTIONS.items()
        if isinstance(given.get(section), Mapping)
    }
    reading = read_config(_offered(known, {name for name, _ in unread}, found))
    found.layout |= {
        name: {key: each for key, each in asdict(value).items() if each is not None} if is_dataclass(value) else value  # type: ignore[arg-type]
        for name, value in reading.arguments.items()
        if name != "dp_size" and value is not None
    }
    precision = found.layout.pop("precision", None)
    if precision in ("bf16", "fp16"):
        found.recipe[precision] = True
    if "max_norm" in found.layout:
        found.recipe["max_grad_norm"] = found.layout.pop("max_norm")
    elif not {"hybrid_zero_optimizer", "hybrid_zero_optimizer.clip_grad_norm"} & {name for name, _ in unread}:
        found.recipe["max_grad_norm"] = 0.0  # where it says none it does not clip, other than recipes
    for unused in reading.without_effect:
        if unused.name != "data.micro_bsz":  # which says the batch size of a recipe
            found.note(unused.name, unused.value, unused.why)
    section = given.get("data")
    data: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    for ours, theirs in (("per_device_train_batch_size", "micro_bsz"), ("gradient_accumulation_steps", "micro_num")):
        if theirs in data:
            found.recipe[ours] = data[theirs]
    if "seq_len" in data or "pack_sample_into_one" in data:
        found.recipe["data"] = {"max_length": data["seq_len"]} if "seq_len" in data else {}
        found.recipe["data"]["packing"] = True  # samples always share sequences there
    if "lr_scheduler" in given:
        found.recipe["lr_scheduler_type"] = "cosine"  # the one that it has
    _rest(given, found)
    return found


def _offered(given: Mapping[str, Mapping[str, Any]], unread: Set[str], found: Found) -> dict[str, dict[str, Any]]:
    """The sections without what the layout has not, which is noted, or comes to the layout under another name; and
    without parts whose size is `unread`, so that they say nothing.
    """
    offered = {section: dict(keys) for section, keys in given.items()}
    for where, known in INNER.items():
        section, _, key = where.partition(".")
        inner = offered.get(section, {}).get(key)
        if isinstance(inner, Mapping) and f"{where}.size" in unread:
            offered[section].pop(key)
        elif isinstance(inner, Mapping):
            for name in [name for name in inner if name not in known]:
                found.note(f"{where}.{name}", inner[name], _NO_KEY)
            offered[section][key] = {name: value for name, value in inner.items() if name in known}
    parallel = offered.get("parallel", {})
    _tensor(parallel, found)
    weight = parallel.get("weight")
    size = weight.get("size") if isinstance(weight, Mapping) else weight
    if isinstance(size, int) and size > 1:
        found.note(
            "parallel.weight", parallel.pop("weight"), f"zero_stage: 3 with zero_group_size: {size} is near to it"
        )
    schedule = dotted(parallel, "pipeline.mode")
    if schedule is not None and str(schedule).lower() not in SCHEDULES:
        found.note("parallel.pipeline.mode", schedule, f"pp_style has {', '.join(SCHEDULES.values())}")
        parallel["pipeline"].pop("mode")
    model = offered.get("model", {})
    if str(model.get("dtype")).removeprefix("torch.") == "half":
        model["dtype"] = "torch.float16"
    elif str(model.get("dtype")).removeprefix("torch.") == "tf32":
        found.note("model.dtype", model.pop("dtype"), "fp32; TF32 is torch.set_float32_matmul_precision of a script")
    return offered


def _tensor(parallel: dict[str, Any], found: Found) -> None:
    """Modes of tensor parallelism that bring a split of the sequence with them."""
    tensor = parallel.get("tensor")
    if not isinstance(tensor, dict):
        return
    mode = str(tensor.get("mode", "none")).lower()
    if mode in TENSOR_MODES:
        return
    size, given = tensor.get("size", 1), tensor.pop("mode")
    if not isinstance(size, int):
        return  # read_config says what it must be
    if mode in ("msp", "fsp") and size > 1:
        parallel.pop("sequence_parallel", None)
        found.layout |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    elif mode == "isp" and size > 1:
        parallel.pop("sequence_parallel", None)
        found.layout |= {
            "sp_size": size,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all",
        }
    elif mode not in ("msp", "fsp", "isp"):
        found.note("parallel.tensor.mode", given, "layers are sharded in one dimension, as by mtp")
    if mode == "isp":
        parallel.pop("tensor")


def _rest(given: Mapping[str, Any], found: Found) -> None:
    """What is in no section of the layout."""
    left: dict[str, Any] = {}
    for section, value in given.items():
        if section.isupper() and section not in RULES:
            continue  # a constant of the file
        if section in SECTIONS and isinstance(value, Mapping):
            keys = {key: each for key, each in value.items() if key not in SECTIONS[section]}
            if section == "data":
                keys = {key: each for key, each in keys.items() if key not in ("seq_len", "pack_sample_into_one")}
                apply(RULES, {"data": keys}, found)
            elif section == "model" and keys:
                found.note("model", dict(keys), _MODEL)
            else:
                for key, each in each_leaf(keys, f"{section}."):
                    found.note(key, each, _NO_KEY)
        else:
            left[section] = value
    apply(RULES, left, found)
