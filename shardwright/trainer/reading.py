"""From YAML or JSON and `key=value` to a Recipe: names, types and values are looked at.

Where each value came from is kept.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..utils.errors import nearest, nearest_file
from .elsewhere import instead_of
from .errors import RecipeError
from .idle import check_idle, check_source
from .recipe import ALIASES, Data, Key, Lora, Recipe, Source
from .tasks import check_task

_OPTIONS = ("--nproc", "--profile", "--print-config", "--schema", "--check", "--help")  # of shardwright train
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


@dataclass
class Read:
    """A recipe, and where its values come from.

    origins   dotted key -> the file, `command line` or an alias; keys that are not here have their defaults
    """

    recipe: Recipe
    origins: dict[str, str] = field(default_factory=dict)


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Read:
    """The recipe of a file, with `key=value` and `key.key=value` on top."""
    origins: dict[str, str] = {}
    given = _load(Path(path))
    if not isinstance(given, Mapping):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, such as model: NAME; this is {_word_of(given)}")
    try:
        merged: dict[str, Any] = json.loads(json.dumps(given, default=str))
    except ValueError:
        raise RecipeError(f"{path}: a mapping or list holds itself, by an anchor (&) and an alias (*)") from None
    _note(merged, str(path), origins)
    for override in overrides:
        _apply(override, merged, origins)
    return Read(build_recipe(merged, origins), origins)


def build_recipe(given: Mapping[str, Any], origins: dict[str, str] | None = None) -> Recipe:
    """A Recipe of plain values; RecipeError names the first key that is wrong."""
    top = dict(given)
    for old, new in ALIASES.items():
        if old in top:
            if new in top:
                raise RecipeError(f"{old} and {new} are two names of one key; give one of them")
            top[new] = top.pop(old)
            if origins is not None:
                origins[new] = f"{origins.pop(old, '')} (as {old})"
    _check_ratio(given)
    recipe: Recipe = _build(Recipe, top, "")
    _check_together(recipe)
    return recipe


def keys_of(kind: type) -> dict[str, tuple[Any, Key]]:
    """Key -> its type and what it means."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {each.name: typing.get_args(hints[each.name])[:2] for each in dataclasses.fields(kind)}


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, without keys that have their defaults inside of nested ones."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: to_plain(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if isinstance(value, Recipe) or getattr(value, each.name) != each.default
        }
    if isinstance(value, list):
        return [to_plain(one) for one in value]
    return value


def to_yaml(read: Read) -> str:
    """The whole recipe with the origin of each key that is no default."""
    lines = []
    for key, value in to_plain(read.recipe).items():
        origin = _origin(key, read.origins)
        flow = None if isinstance(value, (dict, list)) else False
        text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, width=100).rstrip()
        first, *rest = text.split("\n")
        lines += [f"{first}  # {origin}", *rest]
    return "\n".join(lines) + "\n"


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Where a key is from, and those inside of it that are from elsewhere."""
    inside = {name: where for name, where in origins.items() if name.split(".")[0] == key}
    whole = inside.pop(key, None)
    others = [f"{name}: {where}" for name, where in inside.items() if where != whole]
    return "; ".join([*([whole] if whole else []), *others]) or "default"


def schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe", **_schema_of(Recipe)}


class _Loader(yaml.SafeLoader):
    """A key that is given twice is an error; YAML's own readers take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in known:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} is given twice", key.start_mark
                    )
                known.add(key.value)
        return super().construct_mapping(node, deep)


def _load(path: Path) -> Any:
    if not path.exists():
        raise RecipeError(f"{path}: there is no such file{nearest_file(path)}")
    if path.is_dir():
        raise RecipeError(f"{path} is a directory; name a recipe file in it")
    try:
        return yaml.load(path.read_text(), _Loader)
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is no text; a recipe is a YAML or JSON file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{where}: this is not YAML ({getattr(error, 'problem', error)})") from None


def _note(given: Mapping[str, Any], where: str, origins: dict[str, str], prefix: str = "") -> None:
    for key, value in given.items():
        origins[f"{prefix}{key}"] = where
        if isinstance(value, Mapping):
            _note(value, where, origins, f"{prefix}{key}.")


def _apply(override: str, merged: dict[str, Any], origins: dict[str, str]) -> None:
    key, equals, text = override.partition("=")
    key = key.removeprefix("--")
    if not equals and override.startswith("-"):
        raise RecipeError(f"{override}: there is no such option{nearest(override, _OPTIONS)}")
    if not equals or not key:
        raise RecipeError(
            f"{override!r}: what follows the recipe is key=value, such as max_steps=10 or data.path=a.jsonl"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    *outer, last = key.split(".")
    room = merged
    for name in outer:
        inner = room.setdefault(name, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"{override!r}: {name} is {_word_of(inner)} in the recipe, which has no keys inside")
        room = inner
    if len(outer) == 0:  # the newer of two names of one key wins
        for old, new in ALIASES.items():
            if last in (old, new):
                for name in (old, new):
                    merged.pop(name, None)
                    origins.pop(name, None)
    room[last] = value
    origins[key] = "command line"


def _build(kind: type, given: Mapping[str, Any], prefix: str) -> Any:
    fields = keys_of(kind)
    for key in given:
        if key not in fields:
            known = [*fields, *(ALIASES if not prefix else ())]
            instead = None if prefix else instead_of(key, given) or _inside(key)
            if instead:
                raise RecipeError(f"{key} is no key of a recipe; {instead}")
            where = f"the keys of {prefix[:-1]}" if prefix else "its keys"
            near = nearest(key, known) or f"; {where} are {', '.join(sorted(fields))}"
            raise RecipeError(f"{prefix}{key} is no key of a recipe{near}")
    values = {key: _convert(value, *fields[key], f"{prefix}{key}") for key, value in given.items()}
    return kind(**values)


def _inside(key: object) -> str | None:
    """Where a key belongs that was written at the top of a recipe."""
    for outer, kind in (("data", Data), ("lora", Lora)):
        if key in keys_of(kind):
            return f"it is one of {outer}: say {outer}: {{{key}: ...}}"
    from ..plugins import HybridParallelPlugin  # needs torch, which reading a recipe does not wait for

    if key in inspect.signature(HybridParallelPlugin).parameters:
        return f"it is one of layout: say layout: {{{key}: ...}}"
    return None


def _convert(value: Any, hint: Any, its: Key, key: str) -> Any:
    """The value as its type, or RecipeError."""
    choices, least = its.choices, its.least
    if choices and value is False and "no" in choices:
        value = "no"  # YAML reads a bare no as false
    found = _fit(value, hint, key)
    if found is _UNFIT:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and "text" in _wanted(hint)
        quoted = f"; in quotes it is text: {key}='\"{value}\"'" if is_number else ""
        path = ", such as {path: FILE}" if key in ("data", "eval_data") else ""
        raise RecipeError(f"{key}={value!r}: {_wanted(hint)} is needed{path} - {its.doc}{quoted}")
    if found == "" and key != "model":  # of which _check_together says more
        raise RecipeError(f"{key} is empty text; give one, or leave {key} out - {its.doc}")
    if choices and found not in choices:
        raise RecipeError(f"{key}={found!r} is not one of {', '.join(choices)}{nearest(found, choices)}")
    if least is not None and isinstance(found, (int, float)) and not isinstance(found, bool) and not found >= least:
        raise RecipeError(f"{key}={found} is too small: at least {least:g} - {its.doc}")
    if its.most is not None and isinstance(found, int) and found > its.most:
        raise RecipeError(f"{key}={found} is too large: at most {its.most} - {its.doc}")
    return found


_UNFIT = object()


def _fit(value: Any, hint: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType):
        kinds = [each for each in typing.get_args(hint) if each is not type(None)]
        if value is None:
            return None if len(kinds) < len(typing.get_args(hint)) else _UNFIT
        results = [_fit(value, each, key) for each in kinds]
        return next((found for found in results if found is not _UNFIT), _UNFIT)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{key}.") if isinstance(value, Mapping) else _UNFIT
    origin = typing.get_origin(hint) or hint
    if origin is list:
        if not isinstance(value, list):
            return _UNFIT
        (inner,) = typing.get_args(hint)
        found = [_fit(one, inner, f"{key}[{index}]") for index, one in enumerate(value)]
        return _UNFIT if any(one is _UNFIT for one in found) else found
    if origin is dict:
        return _numbers_in(value) if isinstance(value, Mapping) else _UNFIT
    if origin is bool:
        return value if isinstance(value, bool) else _UNFIT
    if origin in (int, float):
        return _number(value, origin)
    if not isinstance(value, str):
        return _UNFIT
    return os.path.expanduser(value) if value.startswith("~/") else value  # no shell reads what stands in a file


def _numbers_in(value: Any) -> Any:
    """Values of which no type is known: YAML 1.1 reads 1e6 as text."""
    if isinstance(value, Mapping):
        return {name: _numbers_in(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_numbers_in(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        return _UNFIT
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            value = float(value)
        except ValueError:
            return _UNFIT
    if not isinstance(value, (int, float)) or value != value or value in (float("inf"), float("-inf")):
        return _UNFIT
    if kind is int:
        return int(value) if float(value).is_integer() else _UNFIT
    return float(value)


def _wanted(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_wanted(each) for each in typing.get_args(hint) if each is not type(None))
    if dataclasses.is_dataclass(hint):
        return "a mapping of keys"
    if typing.get_origin(hint) is list:
        return f"a list, of which each is {_wanted(typing.get_args(hint)[0])}"
    return _WORDS[typing.get_origin(hint) or hint]


def _word_of(value: Any) -> str:
    return "empty" if value is None else _WORDS.get(type(value), f"a {type(value).__name__}")


def _check_together(recipe: Recipe) -> None:
    """Keys that need each other, or exclude each other."""
    if not recipe.model:
        raise RecipeError("model is missing; give the name or directory of one, or {config: {model_type: llama, ...}}")
    if recipe.data is None:
        raise RecipeError("data is missing; give {path: FILE} or {dataset: NAME}")
    if isinstance(recipe.model, dict) and set(recipe.model) != {"config"}:
        raise RecipeError(
            f"model has the keys {', '.join(map(str, recipe.model))}; a mapping has one, config, with the "
            "arguments of a transformers config: {config: {model_type: llama, ...}}"
        )
    if isinstance(recipe.model, dict) and not isinstance(recipe.model["config"], Mapping):
        raise RecipeError(
            f"model.config={recipe.model['config']!r}: a mapping is needed, such as {{model_type: llama, ...}}"
        )
    for name in ("data", "eval_data"):
        data = getattr(recipe, name)
        if data is not None:
            _check_data(name, data)
    check_task(recipe)
    if recipe.bf16 and recipe.fp16:
        raise RecipeError("bf16 and fp16 are both true; one of them is the precision")
    if recipe.layout != "auto" and isinstance(recipe.layout, str):
        raise RecipeError(
            f"layout={recipe.layout!r}: it is auto or a mapping of arguments of HybridParallelPlugin, such as "
            "{tp_size: 2, pp_size: 2}"
        )
    _check_layout(recipe)
    if recipe.eval_strategy != "no" and recipe.eval_data is None:
        raise RecipeError(f"eval_strategy={recipe.eval_strategy} needs eval_data, such as {{path: held_out.jsonl}}")
    if recipe.early_stopping_patience is not None and recipe.eval_strategy == "no":
        raise RecipeError("early_stopping_patience needs eval_strategy: steps or epoch, which is no")
    if recipe.load_best_model_at_end and recipe.eval_strategy == "no":
        raise RecipeError("load_best_model_at_end needs eval_strategy: steps or epoch, which is no")
    _check_rollbacks(recipe)
    if recipe.greater_is_better:
        raise RecipeError("greater_is_better: true, and metric_for_best_model is a loss, the lowest of which is best")
    if recipe.max_steps == 0 or (recipe.max_steps < 0 and recipe.num_train_epochs == 0):
        raise RecipeError("nothing would be trained: give max_steps or num_train_epochs above 0")
    _check_streams(recipe, recipe.data)
    check_idle(recipe)


def _check_rollbacks(recipe: Recipe) -> None:
    if recipe.spike_factor == 1:
        raise RecipeError("spike_factor=1: losses are never all below their median; give more than 1, such as 3")
    if not recipe.rollbacks:
        return
    if recipe.on_nan != "stop" and recipe.spike_factor is None:
        raise RecipeError(
            f"rollbacks={recipe.rollbacks} without what goes back: say on_nan: stop, or spike_factor: 3, or both"
        )
    if recipe.save_strategy == "no":
        raise RecipeError(f"rollbacks={recipe.rollbacks} needs checkpoints: say save_strategy: steps or epoch")


def _check_streams(recipe: Recipe, data: Data) -> None:
    """What needs to know where a stream ends, or to read it from several places."""
    sources = [data, *(data.mix or ())]
    if recipe.eval_data is not None and any(one.streaming for one in [recipe.eval_data, *(recipe.eval_data.mix or ())]):
        raise RecipeError("eval_data.streaming: an evaluation counts its samples before it begins; leave streaming out")
    if not any(one.streaming for one in sources):
        return
    if recipe.max_steps < 0:
        raise RecipeError("a stream has no length, so num_train_epochs cannot say when to stop: give max_steps")
    for name in ("eval_strategy", "save_strategy"):
        if getattr(recipe, name) == "epoch":
            raise RecipeError(
                f"{name}: epoch, and nobody knows which step of a stream is the last of a pass: say {name}: steps"
            )
    if recipe.dataloader_num_workers and any(one.dataset is not None for one in sources):
        raise RecipeError(
            f"dataloader_num_workers={recipe.dataloader_num_workers} with a stream of `datasets`, which deals its "
            "files to workers in an order of its own: leave dataloader_num_workers or streaming out"
        )


def _check_ratio(given: Mapping[str, Any]) -> None:
    ratio = given.get("warmup_ratio")
    if isinstance(ratio, (int, float)) and ratio >= 1:
        raise RecipeError(
            f"warmup_ratio={ratio} is the share of all steps in which the learning rate rises, below 1; warmup_steps "
            "takes their number"
        )


def _check_data(key: str, data: Any) -> None:
    sources = {key: data} if data.mix is None else {f"{key}.mix[{at}]": one for at, one in enumerate(data.mix)}
    if data.mix is not None and (data.path is not None or data.dataset is not None):
        raise RecipeError(f"{key} has both mix and a source of its own; put that source into mix")
    if data.mix is not None:
        own = {name for name in vars(data) if name not in ("mix", "max_length", "stride", "packing")}
        for name in sorted(own):
            if getattr(data, name) != getattr(type(data)(), name):
                raise RecipeError(f"{key}.{name} beside mix would have no effect; give it to the sources in {key}.mix")
    elif data.weight is not None:
        raise RecipeError(f"{key}.weight={data.weight:g} is a share among sources, and there is one; leave it out")
    if data.mix == []:
        raise RecipeError(f"{key}.mix is empty; give at least one source such as {{path: FILE}}")
    for name, source in sources.items():
        if (source.path is None) == (source.dataset is None):
            have = "neither" if source.path is None else "both"
            raise RecipeError(
                f"{name} has {have} of path and dataset; it needs one: {{path: FILE}} or {{dataset: NAME}}"
            )
        for one in source.path if isinstance(source.path, list) else [source.path]:
            if one == "":
                raise RecipeError(f"{name}.path has an empty text; give files, patterns or directories")
        if source.path == []:
            raise RecipeError(f"{name}.path is an empty list; give at least one file")
        check_source(name, source)
        kinds = [one for one in ("text", "messages", "prompt", "words") if getattr(source, one) is not None]
        if len(kinds) > 1:
            raise RecipeError(f"{name} has {' and '.join(kinds)}; a sample is made of one of them")
        if (source.prompt is None) != (source.completion is None):
            raise RecipeError(f"{name}: prompt and completion name two columns; give both")
    if data.mix is not None:
        _check_mix(key, data.mix)


def _check_mix(key: str, mix: list[Source]) -> None:
    if len({source.streaming for source in mix}) > 1:
        raise RecipeError(f"{key}.mix has sources with streaming and without; make them alike")
    weights = [source.weight for source in mix]
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise RecipeError(f"{key}.mix: some sources have a weight and some have none; give all or none of them one")
    if mix[0].streaming and len(mix) > 1 and weights[0] is None:
        raise RecipeError(
            f"{key}.mix: sources of streams have no number of samples that could be their weight; give each a weight"
        )
    if 0 in weights:
        raise RecipeError(
            f"{key}.mix[{weights.index(0)}].weight=0: nothing would be drawn of it; give a weight above 0, or leave "
            "that source out"
        )
    if weights[0] is not None and len(mix) == 1:
        raise RecipeError(
            f"{key}.mix[0].weight={weights[0]:g} is a share among sources, and there is one; leave it out"
        )


def _check_layout(recipe: Recipe) -> None:
    """Keys of the recipe that say what an argument of the plugin says, too."""
    layout = recipe.layout if isinstance(recipe.layout, dict) else {}
    precision = "bf16" if recipe.bf16 else "fp16" if recipe.fp16 else None
    if precision and layout.get("precision", precision) != precision:
        raise RecipeError(f"{precision}: true and layout.precision={layout['precision']!r} differ; give one of them")
    if recipe.timeline_steps and layout.get("pp_size", 1) == 1:
        raise RecipeError(
            f"timeline_steps={recipe.timeline_steps} needs a pipeline; say layout: {{pp_size: 2}}, or leave it out"
        )
    if "max_norm" in layout:
        raise RecipeError("layout.max_norm: say max_grad_norm at the top level of the recipe instead")
    if recipe.activation_checkpointing and "gradient_checkpoint_config" in layout:
        raise RecipeError(
            "activation_checkpointing and layout.gradient_checkpoint_config say the same; give one of them"
        )


def _schema_of(hint: Any) -> dict[str, Any]:
    if isinstance(hint, types.UnionType):
        return {"anyOf": [_schema_of(each) for each in typing.get_args(hint)]}
    if dataclasses.is_dataclass(hint):
        properties = {}
        for name, (kind, its) in keys_of(typing.cast(type, hint)).items():
            one = {**_schema_of(kind), "description": its.doc}
            if its.choices:
                one["enum"] = list(its.choices)
            if its.least is not None:
                one["minimum"] = its.least
            if its.most is not None:
                one["maximum"] = its.most
            properties[name] = one
        return {"type": "object", "properties": properties, "additionalProperties": False}
    origin = typing.get_origin(hint) or hint
    if origin is list:
        return {"type": "array", "items": _schema_of(typing.get_args(hint)[0])}
    names = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", type(None): "null"}
    return {"type": names[origin]}
