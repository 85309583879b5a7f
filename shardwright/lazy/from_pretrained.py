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

from ..files.errors import CheckpointNotFound
from ..files.hf_names import ignored
from ..files.huggingface import HfFiles, HfSource
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
    directory = Path(pretrained_model_name_or_path, kwargs.pop("subfolder", None) or "")
    if not directory.is_dir():
        raise ValueError(
            f"from_pretrained({str(directory)!r}) inside LazyInitContext: every rank reads its slices from a local "
            "directory; download it first (huggingface_hub.snapshot_download) and give its path"
        )
    dtype, variant = _dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))), kwargs.pop("variant", None)
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
        *(name for name, value in kwargs.items() if value not in (None, False, {}) or name == "state_dict"),
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
    source = HfSource(files, model, model.state_dict())
    _check(source, model, directory)
    setattr(model, SOURCE, source)
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model.eval()


def _dtype(asked: Any) -> Any:
    """What the argument says, as transformers reads it: "auto" or a torch.dtype."""
    if isinstance(asked, dict):
        asked = asked.get("", torch.get_default_dtype())  # those of sub-models have no effect in transformers either
    dtype = getattr(torch, asked, None) if isinstance(asked, str) and asked != "auto" else asked
    if dtype in ("auto", None) and asked in ("auto", None):
        return "auto"
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"from_pretrained(dtype={asked!r}) inside LazyInitContext: weights are floating numbers; "
            "give torch.float32, torch.bfloat16, torch.float16, their names, or 'auto'"
        )
    return dtype


def _files(directory: Path, variant: str | None) -> HfFiles:
    try:
        return HfFiles(directory, variant)
    except CheckpointNotFound as error:
        raise ValueError(str(error)) from None


def _check(source: HfSource, model: Any, directory: Path) -> None:
    """Say what the files and the model have not in common, as transformers does; ValueError where it is layers."""
    state = model.state_dict()
    may_miss, may_have = ignored(model, "missing"), ignored(model, "unexpected")
    held = {id(tensor) for name, tensor in _tensors(model) if name in source}
    missing = [name for name, tensor in _tensors(model) if name in state and id(tensor) not in held]
    missing = [name for name in missing if not may_miss(name)]
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
    if missing or unexpected:
        parts = [f"not in the files and initialised anew: {_shown(missing)}"] if missing else []
        parts += [f"in the files and not used: {_shown(unexpected)}"] if unexpected else []
        get_dist_logger().warning(f"{kind} from {directory}: {'; '.join(parts)}", ranks=[0])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
