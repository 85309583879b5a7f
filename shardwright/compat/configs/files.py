"""Which framework a configuration file belongs to, and reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ...utils.errors import nearest_file
from . import accelerate, colossalai, deepspeed, internlm, legacy_colossalai
from .found import Found

SOURCES = ("colossalai", "internlm", "deepspeed", "accelerate", "fsdp", "shardwright")
_DEEPSPEED = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "zero_allow_untested_optimizer",
)


def read_file(path: Path, source: str | None = None) -> tuple[str, Found]:
    """The framework (found out from the file where `source` is None), and what its configuration comes to."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a configuration in it")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file{nearest_file(path)}")
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: a configuration is python, JSON, YAML or a shell script") from None
    if path.suffix == ".py":
        return _read_python(text, str(path), source)
    if path.suffix in (".sh", ".txt", "") and source in (None, "colossalai"):
        return "colossalai", colossalai.read(text, str(path))
    given = _load(text, path)
    source = source or _guess(given, path)
    if source == "deepspeed":
        return source, deepspeed.read(given)
    if source == "accelerate":
        return source, accelerate.read(given)
    if source == "fsdp":
        return source, accelerate.read_fsdp(given)
    if source == "shardwright":
        return source, _recipe(given)
    raise ValueError(f"{path}: configurations of {source} are python files or command lines (.py, .sh)")


def _read_python(text: str, file: str, source: str | None) -> tuple[str, Found]:
    """A script that builds a plugin, or a configuration file of assignments."""
    if source not in (None, "colossalai", "internlm"):
        raise ValueError(f"{file}: a python file is of colossalai or internlm, not of {source}")
    builds = any(f"{name}(" in text for name in colossalai.PLUGINS)
    if source != "internlm" and builds:
        return "colossalai", colossalai.read(text, file)
    if source == "colossalai" or (source is None and legacy_colossalai.is_legacy(text, file)):
        return "colossalai", legacy_colossalai.read(text, file)
    return "internlm", internlm.read(text, file)


def _load(text: str, path: Path) -> Mapping[str, Any]:
    try:
        given = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: this is not JSON ({error.msg})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: this is not YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: a configuration is a mapping of keys, not a {type(given).__name__}")
    return given


def _guess(given: Mapping[str, Any], path: Path) -> str:
    keys = {str(key) for key in given}
    if keys & set(_DEEPSPEED):
        return "deepspeed"
    if keys & {"compute_environment", "distributed_type", "num_machines", "parallelism_config"}:
        return "accelerate"
    if {key.removeprefix("fsdp_") for key in keys} & set(accelerate.FSDP):
        return "fsdp"
    if keys & {"layout", "data", "model", "per_device_train_batch_size"}:
        return "shardwright"
    raise ValueError(
        f"{path}: whose configuration this is cannot be told from its keys; say --from {' or '.join(SOURCES)}"
    )


def _recipe(given: Mapping[str, Any]) -> Found:
    recipe = dict(given)
    layout = recipe.pop("layout", {})
    recipe.setdefault("max_grad_norm", 1.0)  # which recipes do by themselves, and others only when they are told
    return Found(dict(layout) if isinstance(layout, Mapping) else {}, recipe)
