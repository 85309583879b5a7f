"""HuggingFace checkpoints for lazily built models: `from_pretrained` that reads nothing, and weights read by slices.

Most families store a parameter as it is in memory, perhaps under another name; its slices are read straight from the
file, and so are those of experts that are stored one by one and fused in memory (see `merged`). Where transformers
converts in other ways (split projections, permuted ones), the sources of one parameter are read whole, converted by
transformers' own converter and cut.

Uses `transformers.core_model_loading` and `conversion_mapping`, checked on transformers 5.17 and 5.23.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_utils import PreTrainedModel

from ..logging import get_dist_logger
from ..spec import ParamSpec
from ..utils.paths import inside
from .merged import MergedSources
from .weights import SOURCE

# Arguments of from_pretrained that say how to read files; there is nothing to decide for a local directory.
_ABOUT_READING = frozenset(
    (
        "cache_dir",
        "force_download",
        "local_files_only",
        "token",
        "revision",
        "low_cpu_mem_usage",
        "weights_only",
        "disable_mmap",
        "trust_remote_code",
    )
    + ("code_revision", "adapter_kwargs", "_from_auto", "_commit_hash")  # what Auto classes add
)


@contextmanager
def lazy_transformers(noting: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, initialisation functions of transformers are wrapped by `noting` and `from_pretrained` only builds."""
    originals: dict[str, Any] = dict(initialization.TORCH_INIT_FUNCTIONS)
    from_pretrained = PreTrainedModel.__dict__["from_pretrained"]
    initialization.TORCH_INIT_FUNCTIONS.update({name: noting(function) for name, function in originals.items()})
    base: Any = PreTrainedModel
    base.from_pretrained = classmethod(cast(Any, _from_pretrained))
    try:
        yield
    finally:
        base.from_pretrained = from_pretrained
        initialization.TORCH_INIT_FUNCTIONS.update(originals)


def _from_pretrained(
    cls: Any, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
) -> Any:
    """The model that transformers would load, with a note of where its weights are."""
    directory = Path(pretrained_model_name_or_path)
    if not directory.is_dir():
        raise ValueError(
            f"from_pretrained({str(directory)!r}) inside LazyInitContext: every rank reads its slices from a local "
            "directory; download it first (huggingface_hub.snapshot_download) and give its path"
        )
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
    if kwargs.pop("use_safetensors", True) is False:
        raise ValueError(
            "use_safetensors=False inside LazyInitContext: pickled weights are not read; convert them to safetensors"
        )
    options = {name: kwargs.pop(name) for name in ("attn_implementation", "experts_implementation") if name in kwargs}
    for name in _ABOUT_READING & kwargs.keys():
        kwargs.pop(name)
    if config is None:
        config, kwargs = cls.config_class.from_pretrained(directory, return_unused_kwargs=True, **kwargs)
    elif not isinstance(config, transformers.PreTrainedConfig):
        config = cls.config_class.from_pretrained(config)
    else:
        config = deepcopy(config)
    unknown = [
        *(repr(arg) for arg in args),
        *(name for name, value in kwargs.items() if value not in (None, False, {})),
    ]
    if unknown:
        raise ValueError(
            f"from_pretrained({', '.join(unknown)}) inside LazyInitContext: not supported; load eagerly or leave it out"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{directory} is quantised: quantised weights cannot be sharded by slices; use a checkpoint "
            "in bf16, fp16 or fp32"
        )
    weights = PretrainedWeights(directory)
    if dtype in ("auto", None):
        dtype = config.dtype or weights.dtype()
    model = cls._from_config(config, dtype=dtype, **options)
    weights.bind(model)
    weights.check(model)
    setattr(model, SOURCE, weights)
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model.eval()


class _Stored(NamedTuple):
    """Where one parameter comes from: a single tensor as it is, or several through a converter."""

    keys: tuple[tuple[str, str], ...]  # (name in the files, pattern of the converter)
    converter: Any = None
    target: str = ""  # the name under which the converter collects


class PretrainedWeights:
    """The safetensors files of a local HuggingFace checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of = _index(directory)
        self._stored: dict[str, _Stored] = {}
        self._config: Any = None
        self._model: nn.Module | None = None
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def dtype(self) -> torch.dtype:
        """Of the first floating tensor: what transformers takes when the config names none."""
        for key in self._file_of:
            found = (
                self._open(key).get_slice(key)[:1]
                if self._open(key).get_slice(key).get_shape()
                else self._open(key).get_tensor(key)
            )
            if found.is_floating_point():
                return cast(torch.dtype, found.dtype)
        return torch.get_default_dtype()

    def bind(self, model: nn.Module) -> None:
        """Find for every tensor of the unsharded model where its values are stored."""
        hf = cast(PreTrainedModel, model)
        self._config = hf.config
        mapping = get_model_conversion_mapping(hf)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        state = hf.state_dict()
        collected: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(self._file_of, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], hf.base_model_prefix, state)
            if pattern is None:
                self._stored[name] = _Stored(((key, ""),))
            else:
                collected.setdefault(name, []).append((key, pattern))
        for name, keys in collected.items():
            converter = by_pattern[keys[0][1]]
            for target in converter.target_patterns:
                full_name = name.replace(converter.target_patterns[0], target, 1)
                self._stored[full_name] = _Stored(tuple(keys), converter, name)

    def check(self, model: nn.Module) -> None:
        """Say what the files and the model have not in common, as transformers does; ValueError where it is layers."""
        hf: Any = model
        state = hf.state_dict()
        held = {id(tensor) for name, tensor in _tensors(model) if self.holds(name)}
        missing = [name for name, tensor in _tensors(model) if name in state and id(tensor) not in held]
        missing = _without(missing, getattr(hf, "_keys_to_ignore_on_load_missing", None))
        unexpected = [stored.keys[0][0] for name, stored in self._stored.items() if name not in state]
        unexpected = _without(
            unexpected, [*(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
        )
        layers = [
            next((name for name in names if re.search(r"(^|\.)\d+\.", name)), None) for names in (missing, unexpected)
        ]
        kind = type(model).__name__
        if None not in layers:
            raise ValueError(
                f"{self.directory} does not fit {kind}: it has no {_shown(missing)}, and {kind} has no place for "
                f"{_shown(unexpected)}. These layers would be random numbers. Use the class that wrote the files "
                "(AutoModel... finds it), or rename the tensors"
            )
        if missing or unexpected:
            parts = [f"not in the files and initialised anew: {_shown(missing)}"] if missing else []
            parts += [f"in the files and not used: {_shown(unexpected)}"] if unexpected else []
            get_dist_logger().warning(f"{kind} from {self.directory}: {'; '.join(parts)}", ranks=[0])

    def holds(self, name: str) -> bool:
        return name in self._stored

    def read(self, spec: ParamSpec, coordinate: int) -> Tensor:
        stored = self._stored[spec.name]
        if stored.converter is not None:
            merged = MergedSources.of(stored.converter, stored.keys, lambda key: self._open(key).get_slice(key))
            if merged is not None:
                _check_shape(spec, merged.shape, self.directory)
                return merged.read(spec, coordinate)
            full = self._converted(spec.name, stored)
            _check_shape(spec, tuple(full.shape), self.directory)
            return spec.shard(full, coordinate)
        key = stored.keys[0][0]
        view = self._open(key).get_slice(key)
        _check_shape(spec, tuple(view.get_shape()), self.directory)
        if spec.dim is None:
            return cast(Tensor, self._open(key).get_tensor(key)).clone()
        before = (slice(None),) * spec.dim
        parts: list[Tensor] = []
        for piece in spec.pieces[coordinate]:
            if piece.is_padding:
                shape = list(spec.full_shape)
                shape[spec.dim] = piece.length
                parts.append(torch.zeros(shape, dtype=parts[0].dtype if parts else view[before + (slice(0, 0),)].dtype))
            else:
                parts.append(view[before + (slice(piece.start, piece.start + piece.length),)])
        # A slice may be a view of the whole tensor in the mapped file: copy, so that only what is used becomes
        # resident.
        return torch.cat(parts, spec.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def _converted(self, name: str, stored: _Stored) -> Tensor:
        converter = deepcopy(stored.converter)
        for key, pattern in stored.keys:
            converter.add_tensor(stored.target, key, pattern, lambda key=key: self._open(key).get_tensor(key))
        made: Mapping[str, Any] = converter.convert(stored.target, config=self._config)
        full = made[name]
        return cast(Tensor, full[0] if isinstance(full, list) else full)

    def _open(self, key: str) -> Any:
        file = self._file_of[key]
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(self.directory / file, framework="pt"))
        return self._files[file]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _without(names: list[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _index(directory: Path) -> dict[str, str]:
    """File of every stored tensor."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {key: inside(directory, file).name for key, file in file_of.items()}
    if single.exists():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    raise ValueError(
        f"{directory} has neither {single.name} nor {index.name}; save the model with safetensors "
        "(save_pretrained does)"
    )


def _check_shape(spec: ParamSpec, shape: tuple[int, ...], directory: Path) -> None:
    if shape != spec.full_shape:
        raise ValueError(
            f"{spec.name} is {spec.full_shape} in the model and {shape} in {directory}; the config does "
            "not fit the weights"
        )
