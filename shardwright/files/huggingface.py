"""Reading boxes of tensors from HuggingFace safetensors files, or from a resumable checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .boxes import Box
from .errors import CheckpointDamaged, CheckpointNotFound, UnsafeCheckpoint
from .hf_names import Stored, convert
from .paths import inside, read_json
from .tensor_file import TensorFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HfFiles:
    """The tensors of one file, or of the files that an index names; files are opened when something in them is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, TensorFile] = {}
        self._file_of: dict[str, Path] = {}
        if path.is_file():
            self._add_file(path)
        elif path.is_dir():
            self._find()
        else:
            raise CheckpointNotFound(
                f"{path} does not exist; give a directory with safetensors files, or one such file"
            )

    def _find(self) -> None:
        """The index if there is one, else the single file; with a name between (model.fp16.safetensors) where it is
        the only one.
        """
        indexes = (
            [self.path / INDEX]
            if (self.path / INDEX).exists()
            else sorted(self.path.glob("model.safetensors.index.*.json"))
        )
        singles = (
            [self.path / SINGLE] if (self.path / SINGLE).exists() else sorted(self.path.glob("model.*.safetensors"))
        )
        found = indexes or singles
        if len(found) != 1:
            raise CheckpointNotFound(
                f"{self.path} has "
                + (
                    f"several weights: {', '.join(path.name for path in found)}; give the file"
                    if found
                    else f"neither {SINGLE} nor {INDEX}; save the model with safetensors (save_pretrained does)"
                )
            )
        path = inside(self.path, found[0].name)
        if not indexes:
            self._add_file(path)
            return
        index: Any = read_json(path)
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict):
            raise UnsafeCheckpoint(f"{path} has no weight_map")
        paths: dict[str, Path] = {}
        for key, file in table.items():
            if not isinstance(file, str) or file not in paths:
                paths[file] = inside(self.path, file)
            self._file_of[key] = paths[file]

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

    def shape(self, key: str) -> tuple[int, ...]:
        return self._file(key).tensors[key].shape


class HfSource:
    """The tensors of a model, by their names in memory."""

    def __init__(self, files: HfFiles, model: nn.Module, stored: dict[str, Stored]) -> None:
        self._files = files
        self._model = model
        self._stored = stored
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))  # parts of one tensor are read one after the other

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def keys_of(self, name: str) -> list[str]:
        return [key for key, _ in self._stored[name].keys]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        return (
            tuple(self._converted(name).shape) if stored.converter is not None else self._files.shape(stored.keys[0][0])
        )

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        stored = self._stored[name]
        if stored.converter is None:
            self._files.read(stored.keys[0][0], box, out)
        else:
            full = self._converted(name)
            out.copy_(box.view(full, (0,) * full.ndim))

    def _converted(self, name: str) -> torch.Tensor:
        if self._last[0] != name:
            self._last = (
                name,
                convert(self._model, name, self._stored[name], lambda key: self._files.tensor(key).clone()),
            )
        return self._last[1]
