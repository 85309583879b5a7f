"""Reading boxes of tensors from HuggingFace safetensors files, or from a resumable checkpoint's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.config import config_of
from ..spec import ParamSpec
from .boxes import Box, parts_of
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, UnsafeCheckpoint
from .hf_names import bind, convert
from .merged import MergedTensor
from .paths import inside, read_json
from .tensor_file import StoredTensor, TensorFile


class HfFiles:
    """The tensors of one file, or of the files that an index names; files are opened when something in them is read."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """variant   which files of a directory are meant: "fp16" for model.fp16.safetensors"""
        self.path = path
        self._open: dict[Path, TensorFile] = {}
        self._file_of: dict[str, Path] = {}
        if path.is_file():
            self._add_file(path)
        elif path.is_dir():
            self._find(variant)
        else:
            raise CheckpointNotFound(
                f"{path} does not exist; give a directory with safetensors files, or one such file"
            )

    def _find(self, variant: str | None) -> None:
        """The single file if there is one, else the index, as transformers does; without them, with a name between
        (model.fp16.safetensors) where it is the only one.
        """
        between = f".{variant}" if variant else ""
        single, index_name = f"model{between}.safetensors", f"model.safetensors.index{between}.json"
        found = [path for name in (single, index_name) if (path := self.path / name).exists()][:1]
        others = [sorted(self.path.glob(name)) for name in ("model.*safetensors", "model.safetensors.index*.json")]
        whole = [path for path in others[0] if not re.search(r"-\d+-of-\d+\.safetensors$", path.name)]
        if not variant:
            found = found or whole or others[1]
        names = ", ".join(path.name for path in whole + others[1])
        if len(found) > 1:
            raise CheckpointNotFound(
                f"{self.path} has several weights: {names}; give load_model the path of one, from_pretrained variant="
            )
        if not found:
            remedy = (
                f"it has {names}; leave variant={variant!r} out, or give the name between"
                if names
                else "save the model with safetensors (save_pretrained does)"
            )
            raise CheckpointNotFound(f"{self.path} has neither {single} nor {index_name}; {remedy}")
        path = inside(self.path, found[0].name)
        if path.suffix != ".json":
            self._add_file(path)
            return
        index: Any = read_json(path)
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict):
            raise UnsafeCheckpoint(f"{path} has no weight_map")
        shards: dict[str, Path] = {}
        for key, file in table.items():
            if not isinstance(file, str) or file not in shards:
                shards[file] = inside(self.path, file)
            self._file_of[key] = shards[file]

    def _add_file(self, path: Path) -> None:
        self._open[path] = TensorFile(path)
        self._file_of = dict.fromkeys(self._open[path].tensors, path)

    @property
    def keys(self) -> list[str]:
        return list(self._file_of)

    def _file(self, key: str) -> TensorFile:
        path = self._file_of[key]
        if path not in self._open:
            self._open[path] = TensorFile(path)
        if key not in self._open[path].tensors:
            raise CheckpointDamaged(path, f"has no tensor {key!r}, which the index puts there")
        return self._open[path]

    def tensor(self, key: str) -> torch.Tensor:
        """A view of the file."""
        return self._file(key).tensor(key)

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        self._file(key).read(key, box, out)

    def described(self, key: str) -> StoredTensor:
        return self._file(key).tensors[key]

    def shape(self, key: str) -> tuple[int, ...]:
        return self.described(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self.described(key).dtype

    def floating_dtype(self) -> torch.dtype:
        """Of the first floating tensor: what transformers takes when the config names none."""
        dtypes = (self.dtype(key) for key in self.keys)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.get_default_dtype())

    def close(self) -> None:
        """Files are opened again when something in them is read again."""
        self._open.clear()


class HfSource:
    """The tensors of a model in files, by their names in memory.

    A tensor is read by boxes where the files hold it as it is, or in parts that are merged (see `merged`). Where
    transformers converts in other ways (split projections, permuted ones), its sources are read whole, converted by
    transformers' own converter and cut; one such tensor is kept, as its boxes are read one after the other.

    names   of the tensors of the model, or of this rank's part of it
    """

    def __init__(self, files: HfFiles, model: nn.Module, names: Iterable[str]) -> None:
        self._files = files
        self._config = config_of(model)  # not the model, which may own this source
        self._stored = bind(model, self.keys, names)
        self._merged: dict[str, MergedTensor | None] = {}
        self._last: tuple[str, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HfSource:
        return self  # copies of a model read the same files

    @property
    def keys(self) -> list[str]:
        """Names in the files."""
        return self._files.keys

    @property
    def names(self) -> Iterable[str]:
        """Names in memory of all that the files hold, whether or not the model has them."""
        return self._stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def keys_of(self, name: str) -> list[str]:
        return [key for key, _ in self._stored[name].keys]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the headers of the files; CheckpointMismatch where several of them do not make one tensor."""
        stored = self._stored[name]
        described: StoredTensor | MergedTensor | None
        described = self._files.described(stored.keys[0][0]) if stored.converter is None else self._merge(name)
        if described is not None:
            return described.shape
        try:
            return tuple(convert(self._config, name, stored, self._on_meta).shape)
        except Exception:  # by files that do not fit, or by an operation that needs values
            return tuple(self._described(name).shape)

    def forget(self, name: str) -> None:
        """As if the files did not have it."""
        del self._stored[name]

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        whole = self._described(name)
        if isinstance(whole, torch.Tensor):
            out.copy_(box.view(whole, (0,) * whole.ndim))
        elif isinstance(whole, MergedTensor):
            whole.read(box, out)
        else:
            self._files.read(self.keys_of(name)[0], box, out)

    def shard(self, spec: ParamSpec, coordinate: int) -> torch.Tensor:
        """The shard at `coordinate`, on the CPU and in the dtype of the files; padding is zero."""
        whole = self._described(spec.name)
        if tuple(whole.shape) != spec.full_shape:
            raise ValueError(
                f"{spec.name} is {spec.full_shape} in the model and {tuple(whole.shape)} in {self._files.path}; the "
                "config does not fit the weights"
            )
        local = torch.zeros(spec.local_shape(coordinate), dtype=whole.dtype)
        for part in parts_of(spec, coordinate, local.shape, 0, local.numel(), owned=False):
            self.read(spec.name, part.box, part.view(local.view(-1)))
        return local

    def close(self) -> None:
        """Free what reading has cached; reading again opens the files again."""
        self._files.close()
        self._last = None

    def _described(self, name: str) -> StoredTensor | MergedTensor | torch.Tensor:
        stored = self._stored[name]
        if stored.converter is None:
            return self._files.described(stored.keys[0][0])
        merged = self._merge(name)
        if merged is not None:
            return merged
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is made
            self._last = (name, self._convert(name))
        return self._last[1]

    def _merge(self, name: str) -> MergedTensor | None:
        if name not in self._merged:
            self._merged[name] = MergedTensor.of(self._files, self._stored[name])
        return self._merged[name]

    def _on_meta(self, key: str) -> torch.Tensor:
        return torch.empty(self._files.shape(key), dtype=self._files.dtype(key), device="meta")

    def _convert(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        try:
            return convert(self._config, name, stored, lambda key: self._files.tensor(key).clone())
        except (CheckpointError, UnsafeCheckpoint):
            raise
        except Exception as error:  # of tensor arithmetic: of any kind
            alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
            for key, pattern in stored.keys:
                alike.setdefault((pattern, self._files.shape(key)), []).append(key)
            parts = [
                f"{keys[0]} {shape}" + (f" and {len(keys) - 1} more like it" if len(keys) > 1 else "")
                for (_, shape), keys in alike.items()
            ]
            problem = f"{name}, which is made of {'; '.join(parts)}: one is missing, odd or too many ({error})"
            raise CheckpointMismatch(self._files.path, mismatched=[problem]) from error
