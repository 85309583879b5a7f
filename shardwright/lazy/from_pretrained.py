"""transformers models built lazily: initialisation that is noted, and a `from_pretrained` that reads no weight, only
where each of them is (see `files.huggingface`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_utils import PreTrainedModel

from ..files.errors import CheckpointMismatch, CheckpointNotFound
from ..files.hf_names import ignored, tied_names
from ..files.huggingface import HfFiles, HfSource
from ..files.ties import are_equal
from ..logging import get_dist_logger
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
    if not isinstance(pretrained_model_name_or_path, str | os.PathLike):
        raise ValueError(
            f"from_pretrained({pretrained_model_name_or_path!r}) inside LazyInitContext: give the directory of a "
            f"model; {cls.__name__}(config) builds one with new weights"
        )
    subfolder, variant = kwargs.pop("subfolder", None) or "", kwargs.pop("variant", None)
    for name, value in (("subfolder", subfolder), ("variant", variant)):
        if value is not None and not isinstance(value, str | os.PathLike):
            raise ValueError(f"from_pretrained({name}={value!r}) inside LazyInitContext: give a name, or leave it out")
    directory = Path(pretrained_model_name_or_path, subfolder)
    if not directory.is_dir():
        raise ValueError(
            f"from_pretrained({str(directory)!r}) inside LazyInitContext: every rank reads its slices from a local "
            "directory; download it first (huggingface_hub.snapshot_download) and give its path"
        )
    dtype = _dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto")))
    ignores_shapes = bool(kwargs.pop("ignore_mismatched_sizes", False))
    if kwargs.pop("use_safetensors", True) is False:
        raise ValueError(
            "use_safetensors=False inside LazyInitContext: pickled weights are not read; convert them to safetensors"
        )
    options = {name: kwargs.pop(name) for name in ("attn_implementation", "experts_implementation") if name in kwargs}
    for name in _ABOUT_READING & kwargs.keys():
        kwargs.pop(name)
    other_sources = {name: kwargs.pop(name) for name in ("state_dict", "gguf_file") if name in kwargs}
    if config is None:
        config, kwargs = cls.config_class.from_pretrained(directory, return_unused_kwargs=True, **kwargs)
    elif not isinstance(config, transformers.PreTrainedConfig):
        config = cls.config_class.from_pretrained(config)
    else:
        config = deepcopy(config)
    unknown = [
        *(repr(arg) for arg in args),
        *(name for name, value in other_sources.items() if value is not None),
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
    files = _files(directory, variant)
    if dtype == "auto":
        dtype = config.dtype or files.floating_dtype()
    model = cls._from_config(config, dtype=dtype, **options)
    _make_tables(model, model)
    source = HfSource(files, model, model.state_dict())
    _check(source, model, directory, ignores_shapes)
    setattr(model, SOURCE, source)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in source:  # also of what the class has frozen (positions of Whisper's encoder), as transformers does
            param.requires_grad_(True)
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model.eval()


def _make_tables(module: nn.Module, owner: Any) -> None:
    """Buffers that no file has, such as sines of positions, once more: they were computed in the dtype of the weights,
    and transformers, too, computes them again in the usual one when it has loaded the weights.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    if module._non_persistent_buffers_set:
        owner._init_weights(module)
    for child in module.children():
        _make_tables(child, owner)


def _dtype(asked: Any) -> Any:
    """What the argument says, as transformers reads it: "auto" or a torch.dtype."""
    if isinstance(asked, dict):
        asked = asked.get("", torch.get_default_dtype())  # those of sub-models have no effect in transformers either
    dtype = getattr(torch, asked, None) if isinstance(asked, str) and asked != "auto" else asked
    if dtype in ("auto", None) and asked in ("auto", None):
        return "auto"
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"from_pretrained(dtype={asked!r}) inside LazyInitContext: models are built in floating numbers; "
            "give torch.float32, torch.bfloat16, torch.float16, torch.float64, their names, or 'auto'"
        )
    return dtype


def _files(directory: Path, variant: str | None) -> HfFiles:
    try:
        return HfFiles(directory, variant)
    except CheckpointNotFound as error:
        raise ValueError(str(error)) from None


def _check(source: HfSource, model: Any, directory: Path, ignores_shapes: bool) -> None:
    """Say what the files and the model have not in common, as transformers does; ValueError where it is layers.

    Nothing here depends on the rank, so that all ranks raise the same before any of them waits for another.
    """
    mismatched = _forget_mismatched(source, model, directory, ignores_shapes)
    apart = _part_tied(source, model)
    source.close()
    state = model.state_dict()
    may_miss, may_have = ignored(model, "missing"), ignored(model, "unexpected")
    held = {id(tensor) for name, tensor in _tensors(model) if name in source}
    missing = [name for name, tensor in _tensors(model) if name in state and id(tensor) not in held]
    missing = [name for name in missing if not may_miss(name) and name not in mismatched]
    unexpected = [source.keys_of(name)[0] for name in source.names if name not in state]
    unexpected = [key for key in unexpected if not may_have(key) and not key.endswith("rotary_emb.inv_freq")]
    layers = [
        next((name for name in names if re.search(r"(^|\.)\d+\.", name)), None) for names in (missing, unexpected)
    ]
    kind = type(model).__name__
    if None not in layers:
        raise ValueError(
            f"{directory} does not fit {kind}: it has no {_shown(missing)}, and {kind} has no place for "
            f"{_shown(unexpected)}. These layers would be random numbers. Use the class that wrote the files "
            "(AutoModel... finds it), or rename the tensors"
        )
    notes = {
        "not in the files and initialised anew": missing,
        "in the files and not used": unexpected,
        "of another shape in the files and initialised anew": list(mismatched.values()),
        "tied by the config, but not tied because the files have different values (tie_word_embeddings=False says "
        "so)": apart,
    }
    parts = [f"{what}: {_shown(names)}" for what, names in notes.items() if names]
    if parts:
        get_dist_logger().warning(f"{kind} from {directory}: {'; '.join(parts)}", ranks=[0])


def _forget_mismatched(source: HfSource, model: Any, directory: Path, ignores_shapes: bool) -> dict[str, str]:
    """What is to be made anew because the files have it in another shape: name -> name and both shapes; ValueError
    where that was not asked for, or tensors of the files do not fit each other. Only headers are read.
    """
    state = model.state_dict()
    mismatched: dict[str, str] = {}
    broken: list[str] = []
    for name, tensor in _tensors(model):
        if name not in state or name not in source:
            continue
        try:
            shape = source.shape(name)
        except CheckpointMismatch as error:
            broken += [f"{problem} (model {tuple(tensor.shape)})" for problem in error.mismatched]
            continue
        if shape != tensor.shape:
            mismatched[name] = f"{name} (file {shape}, model {tuple(tensor.shape)})"
    if broken or (mismatched and not ignores_shapes):
        remedy = "give the config that the files were written with"
        remedy += ", or repair the files" if broken else ", or ignore_mismatched_sizes=True to initialise these anew"
        raise CheckpointMismatch(directory, mismatched=[*broken, *mismatched.values()], remedy=remedy)
    for name in mismatched:
        source.forget(name)
    return mismatched


def _part_tied(source: HfSource, model: Any) -> list[str]:
    """As transformers does, give tensors that the config ties a parameter each where the files have different values
    for them; returns their names.
    """
    apart: list[str] = []
    found: dict[str, str] = {}  # tensor that others are tied to -> where the files have it
    tensors = dict(_tensors(model))
    for other, first in tied_names(model).items():
        if first in source:
            found[first] = first
        if other not in source:
            continue
        if first not in found:
            found[first] = other
        elif not are_equal(source, found[first], other, tensors[first].dtype):
            apart.append(other)
    for name in apart:
        owner, _, leaf = name.rpartition(".")
        shared = tensors[name]
        own = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        own.__dict__.update(shared.__dict__)
        setattr(model.get_submodule(owner), leaf, own)
        del model.all_tied_weights_keys[name]
    return apart


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
