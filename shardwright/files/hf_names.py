"""Between the names and shapes of a transformers model in memory and those of its checkpoints.

Most families store parameters as they are. Where transformers converts (renames, experts stored one by one and fused in
memory), its own mapping is applied, forwards for reading and backwards for writing. Uses
`transformers.core_model_loading` and `conversion_mapping`, checked on transformers 5.17 and 5.23. Models that are not
transformers' keep their names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn


class Stored(NamedTuple):
    """Where one tensor of the model comes from: one tensor of the files as it is, or several through a converter."""

    keys: tuple[tuple[str, str], ...]  # (name in the files, pattern of the converter)
    converter: Any = None
    target: str = ""  # the name under which the converter collects


def is_transformers(model: nn.Module) -> bool:
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def bind(model: nn.Module, keys: Sequence[str], names: Iterable[str]) -> dict[str, Stored]:
    """For names of the model, where their values are among the `keys` of files. `names` are this rank's; foreign
    keys are left alone.
    """
    if not is_transformers(model):
        return {key: Stored(((key, ""),)) for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    hf: Any = model
    mapping = get_model_conversion_mapping(hf)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state: Any = dict.fromkeys(names, True)  # transformers looks for a value to know that a name is there
    stored: dict[str, Stored] = {}
    collected: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], hf.base_model_prefix, state)
        if pattern is None:
            stored[name] = Stored(((key, ""),))
        else:
            collected.setdefault(name, []).append((key, pattern))
    for name, sources in collected.items():
        converter = by_pattern[sources[0][1]]
        for target in converter.target_patterns:
            stored[name.replace(converter.target_patterns[0], target, 1)] = Stored(tuple(sources), converter, name)
    return stored


def convert(config: Any, name: str, stored: Stored, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The full tensor `name` of a model with this config from the tensors that it is stored as."""
    converter = deepcopy(stored.converter)
    for key, pattern in stored.keys:
        converter.add_tensor(stored.target, key, pattern, lambda key=key: fetch(key))
    made = converter.convert(stored.target, config=config)
    full = made[name]
    result: torch.Tensor = full[0] if isinstance(full, list) else full
    return result


def ignored(model: nn.Module, which: str) -> Callable[[str], bool]:
    """Whether transformers expects a name to be "missing" from, or "unexpected" in, checkpoints of this model."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{which}", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def tied_names(model: nn.Module) -> Mapping[str, str]:
    """Name that is left out of HuggingFace checkpoints -> name of the tensor that it shares."""
    found = getattr(model, "all_tied_weights_keys", None)
    return found if isinstance(found, Mapping) else {}


class Exporter:
    """From tensors of the model to tensors of its files. Built on every rank from its own part of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.converts = is_transformers(model) and self._mapping_is_needed()
        self._dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())

    def _mapping_is_needed(self) -> bool:
        from transformers.conversion_mapping import get_model_conversion_mapping

        hf: Any = self.model
        return bool(getattr(hf, "_weight_conversions", None) or get_model_conversion_mapping(hf, add_legacy=False))

    def name_of(self, name: str, aliases: Sequence[str]) -> str | None:
        """The alias of a shared tensor that files use, None for tensors that they leave out."""
        tied = tied_names(self.model)
        kept = [alias for alias in (name, *aliases) if alias not in tied and alias not in self._dropped]
        return kept[0] if kept else (None if name in self._dropped else name)

    def unit_of(self, name: str) -> str:
        """Tensors of one unit are converted together: those of a layer, or where nothing is converted each by
        itself.
        """
        if not self.converts:
            return name
        layer = re.match(r"(.*?\.\d+)\.", name)
        return layer.group(1) if layer else ""

    def revert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.converts:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        hf: Any = self.model
        return dict(revert_weight_conversion(hf, dict(tensors)))

    def write_config(self, directory: Path, dtype: torch.dtype | None) -> None:
        """config.json and generation_config.json, as transformers writes them; nothing for other models."""
        if not is_transformers(self.model):
            return
        hf: Any = self.model
        config = deepcopy(hf.config)
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [_class_name(type(self.model))]
        config.save_pretrained(directory)
        if hf.can_generate() and getattr(hf, "generation_config", None) is not None:
            hf.generation_config.save_pretrained(directory)


_MODELS = "shardwright.shardformer.modeling."


def _class_name(cls: type) -> str:
    """The model class as its module knows it, below the subclasses that sharding, staging and FSDP2 put on top."""
    for base in cls.__mro__:
        is_model = issubclass(base, sys.modules["transformers.modeling_utils"].PreTrainedModel)
        if is_model and getattr(sys.modules.get(base.__module__), base.__name__, None) is base and not _is_own(base):
            return base.__name__
    return cls.__name__


def _is_own(cls: type) -> bool:
    """Whether a class is put on top of a model's; models that are written here are none."""
    return cls.__module__.startswith("shardwright.") and not cls.__module__.startswith(_MODELS)
