"""The model of a recipe: its config, the class with the task's head, its weights and adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..booster import Booster
from ..files.errors import CheckpointError
from ..lazy import LazyInitContext
from ..lazy.notes import notes_of
from ..utils.errors import divisors, nearest
from ..utils.versions import is_installed
from .errors import RecipeError
from .hub import why_not
from .recipe import Recipe
from .tasks import TASKS

# of configs, read by transformers under names that no config class lists
_OLD_KEYS = (
    *("rope_theta", "rope_scaling", "torch_dtype", "attn_implementation", "experts_implementation", "auto_map"),
    "decoder_start_token_id",
)
# of configs, of which nothing works that is less than 1
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "n_embd", "n_layer", "n_head", "d_model", "d_ff", "num_layers"),
)


def load_config(recipe: Recipe) -> Any:
    """The transformers config of the model."""
    if isinstance(recipe.model, dict):
        given = dict(recipe.model["config"])
        kind = given.pop("model_type", None)
        _check_sizes(given)
        if kind is None:
            raise RecipeError("model.config has no model_type; give one, such as model_type: llama")
        if kind not in CONFIG_MAPPING:
            raise RecipeError(
                f"model.config.model_type={kind!r} is none of transformers {transformers.__version__}"
                f"{nearest(kind, CONFIG_MAPPING)}"
            )
        try:
            config = AutoConfig.for_model(kind, **given)
        except Exception as error:  # transformers validates in many ways
            raise RecipeError(f"model.config is none that transformers takes: {first_line(error)}") from error
        _check_config_keys(config, given)
        _check_heads(config)
        return config
    try:
        return AutoConfig.from_pretrained(recipe.model)
    except Exception as error:
        reason = why_not(error, recipe.model)
        raise RecipeError(
            f"model={recipe.model!r}: {reason}"
            if reason
            else f"model={recipe.model!r} is neither a directory with a config.json nor a model that can be loaded "
            f"({first_line(error)})"
        ) from error


def prepare_head(recipe: Recipe, config: Any, padding: int) -> None:
    """The config as the task's head needs it; RecipeError where there is none."""
    head_of(recipe, config)
    if recipe.task == "seq2seq-lm":
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                raise RecipeError(f"model.config has no {name}, with which answers begin; for T5 both are 0")
    if recipe.task.startswith("sequence-") and config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = padding  # decoders classify by the last token that is none
    if recipe.task == "sequence-regression":
        config.num_labels = 1
        config.problem_type = "regression"
    if not TASKS[recipe.task].labelled:
        return
    if recipe.labels is not None:
        config.num_labels = len(recipe.labels)
        config.id2label = dict(enumerate(recipe.labels))
        config.label2id = {name: number for number, name in enumerate(recipe.labels)}
    if config.num_labels < 2:
        raise RecipeError("the model has one label, so that there is nothing to tell apart; give labels: [A, B, ...]")
    config.problem_type = "single_label_classification"


def head_of(recipe: Recipe, config: Any) -> Any:
    """The class of transformers that has the model and the head of the task."""
    mapping = getattr(transformers, TASKS[recipe.task].auto)._model_mapping
    if type(config) not in mapping:
        others = [
            name for name, task in TASKS.items() if type(config) in getattr(transformers, task.auto)._model_mapping
        ]
        hint = f"it can be trained as {', '.join(others)}" if others else "write a script with Booster for it"
        raise RecipeError(
            f"model: a {config.model_type} is no {recipe.task} of transformers {transformers.__version__}; {hint}"
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _check_config_keys(config: Any, given: Mapping[str, Any]) -> None:
    """transformers keeps whatever a config is given, also what no model reads."""
    kind = type(config)
    parameters = inspect.signature(kind.__init__).parameters
    common = vars(transformers.PreTrainedConfig())
    own = [*(name for name in parameters if name not in common), *kind.attribute_map]
    known = {*parameters, *kind.attribute_map, *common, *dir(kind), *_OLD_KEYS}
    for name in given:
        if name not in known:
            raise RecipeError(
                f"model.config.{name} is nothing that a {config.model_type} of transformers "
                f"{transformers.__version__} reads{nearest(name, own) or nearest(name, known)}"
            )


def _check_sizes(given: Mapping[str, Any]) -> None:
    """transformers takes sizes of which nothing can be built, and divides by some of them."""
    for name in _SIZES:
        value = given.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise RecipeError(f"model.config.{name}={value} is too small: at least 1")


def _check_heads(config: Any) -> None:
    """That every group of query heads has as many; transformers finds out in the first step."""
    text = config.get_text_config()
    heads, groups = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        raise RecipeError(
            f"model.config.num_key_value_heads={groups} does not divide num_attention_heads={heads}; give one of "
            f"{', '.join(map(str, divisors(heads)))}"
        )


def local_directory(name: str) -> str:
    """Where the files of a model are; those of a name on the hub are fetched once, and ranks read their slices."""
    if Path(name).is_dir():
        return name
    try:
        directory = huggingface_hub.snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    except Exception as error:  # of many kinds: no network, no such name, no access
        raise RecipeError(f"model={name!r}: {why_not(error, name) or first_line(error)}") from error
    if not any(Path(directory).glob("*.safetensors")):
        raise RecipeError(
            f"model={name!r} has no safetensors on the hub; load it with from_pretrained of transformers, save it with "
            "save_pretrained(DIRECTORY), and name that directory"
        )
    return directory


def build_model(recipe: Recipe, config: Any) -> Any:
    """The model with the task's head, its weights still unmade where that can be; they are the same at every layout."""
    head_of(recipe, config)
    auto = getattr(transformers, TASKS[recipe.task].auto)
    if isinstance(recipe.model, dict):

        def made() -> Any:
            return auto.from_config(config)
    else:
        directory = local_directory(recipe.model)

        def made() -> Any:
            return auto.from_pretrained(directory, config=config, dtype=torch.float32)

    try:
        return _built(recipe, made)
    except RecipeError:
        raise
    except KeyError as error:  # of a table of names that transformers has, such as that of activations
        name = next((key for key, value in vars(config).items() if value == error.args[0]), None)
        if name is None:
            raise
        raise RecipeError(
            f"model.config.{name}={error.args[0]!r} is nothing that transformers knows{nearest(error.args[0], ACT2FN)}"
        ) from error
    except (ValueError, OSError, CheckpointError) as error:
        what = f"model={recipe.model!r}" if isinstance(recipe.model, str) else "model.config"
        raise RecipeError(f"{what} cannot be built: {first_line(error)}") from error


def _built(recipe: Recipe, made: Callable[[], Any]) -> Any:
    copied = recipe.lora is not None and TASKS[recipe.task].head  # peft trains a copy of such a head, with its weights
    with LazyInitContext():
        model = made()
        if not copied and all(getattr(notes_of(param), "obstacle", None) is None for param in model.parameters()):
            return _with_adapters(recipe, model)
    with torch.random.fork_rng(devices=[]):  # weights that are made of one another, all at once
        torch.manual_seed(recipe.seed)
        return _with_adapters(recipe, made())


def _with_adapters(recipe: Recipe, model: Any) -> Any:
    if recipe.lora is None:
        return model
    if not is_installed("peft"):
        raise RecipeError("lora needs the package peft: pip install peft")
    import peft

    if recipe.lora.lora_alpha <= 0:
        raise RecipeError(
            f"lora.lora_alpha={recipe.lora.lora_alpha:g}: adapters are scaled by it, so none would be learned; give a "
            "number above 0, such as 16"
        )
    given = {key: value for key, value in vars(recipe.lora).items() if value is not None}
    names = [name.rpartition(".")[2] for name, _ in model.named_modules() if name]
    targets = recipe.lora.target_modules  # as text a pattern; of a list peft lets names pass that nothing has
    for key, wanted in (
        ("target_modules", targets if isinstance(targets, list) else ()),
        ("modules_to_save", recipe.lora.modules_to_save or ()),
    ):
        for name in wanted:
            if name.rpartition(".")[2] not in names:
                raise RecipeError(f"lora.{key}: {name!r} is no module of the model{nearest(name, names)}")
    try:
        return Booster().enable_lora(model, lora_config=peft.LoraConfig(task_type=TASKS[recipe.task].adapters, **given))
    except ValueError as error:
        raise RecipeError(f"lora: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error of another package says, as far as its first sentence: a line that ends in a colon goes on."""
    said, *rest = [line.strip() for line in str(error).split("\n") if line.strip()] or [type(error).__name__]
    while said.endswith(":") and rest:
        said += f" {rest.pop(0)}"
    return said
