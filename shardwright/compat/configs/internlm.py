"""The python configuration files of InternLM and InternEvo, read as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from ...plugins.hybrid.config_form import SECTIONS, read_config
from .found import Found, Rules, apply, each_leaf, nothing, says, to_recipe
from .statements import read_assignments

_MODEL = "the model of a recipe is a name, a directory or {config: {model_type: ...}} of transformers"
_DATA = "say data: {path: FILES, text: COLUMN} or {dataset: NAME}"
_CHECKPOINTS = "save_steps, save_total_limit, output_dir and resume say when and where checkpoints are written"
_ADAM = "AdamW has one constant beta2"
_LOSS = "the model's own loss is used"

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
    "data.valid_every": says("with eval_data: eval_strategy: steps, and as many eval_steps"),
    "data.gradient_accumulation": to_recipe("gradient_accumulation_steps"),
    "data.num_worker": to_recipe("dataloader_num_workers"),
    "data.skip_batches": says("resume goes on at the sample where it stopped"),
    "data.rampup_batch_size": says("all steps have the same batch size"),
    "monitor": says("report_to, and metrics.jsonl"),
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
    reading = read_config(known)
    found.layout = {
        name: {key: each for key, each in asdict(value).items() if each is not None} if is_dataclass(value) else value  # type: ignore[arg-type]
        for name, value in reading.arguments.items()
        if name != "dp_size" and value is not None
    }
    precision = found.layout.pop("precision", None)
    if precision in ("bf16", "fp16"):
        found.recipe[precision] = True
    if "max_norm" in found.layout:
        found.recipe["max_grad_norm"] = found.layout.pop("max_norm")
    else:
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
        found.note("data.seq_len", data.get("seq_len"), _DATA)
    if "lr_scheduler" in given:
        found.recipe["lr_scheduler_type"] = "cosine"  # the one that it has
    _rest(given, found)
    return found


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
                    found.note(key, each, "no key of the layout")
        else:
            left[section] = value
    apply(RULES, left, found)
