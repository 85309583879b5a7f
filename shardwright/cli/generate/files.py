"""Where a model's files are, and what is missing. torch is not imported here: what is missing is said at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.errors import nearest

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)


class GenerateError(ValueError):
    """What stands in the way, in a sentence with what would work."""


@dataclass(frozen=True)
class Model:
    """
    directory   config.json and weights
    tokenizer   the tokenizer's files
    adapters    of LoRA, which belong to the model of `directory`
    """

    directory: Path
    tokenizer: Path
    adapters: Path | None = None


def find_model(path: Path, tokenizer: Path | None = None) -> Model:
    """The model of a directory, or the one that `shardwright train` has left below it; with the tokenizer of another
    directory, where it has been found.
    """
    if not path.is_dir():
        around = path.parent.iterdir() if path.parent.is_dir() else []
        what = "is a file; name the directory that it is in" if path.exists() else "there is no such directory"
        near = "" if path.exists() else nearest(path.name, [one.name for one in around])
        raise GenerateError(f"{path}: {what}{near}")
    if not _is_model(path) and _is_model(path / "model"):
        path = path / "model"
    if (path / "adapter_config.json").is_file():
        return _adapted(path, tokenizer)
    if not (path / "config.json").is_file():
        hint = "name a directory that save_pretrained or booster.save_model wrote"
        if any(path.glob("**/*.json")) and any(part.startswith("step-") for part in (path.name, *_names(path))):
            hint = "it is a checkpoint that training goes on from; a run writes model/ when it is finished"
        if snapshots := sorted(path.glob("snapshots/*/config.json")):  # as the hub's cache has it
            hint = f"name {snapshots[-1].parent}"
        raise GenerateError(f"{path} has no config.json; {hint}")
    _check_weights(path)
    if tokenizer is None and not _has_tokenizer(path):
        raise GenerateError(
            f"{path} has no tokenizer ({_TOKENIZERS[0]}); save it there: tokenizer.save_pretrained({str(path)!r})"
        )
    return Model(path, tokenizer or path)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "adapter_config.json").is_file()


def _names(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()]


def _check_weights(path: Path) -> None:
    if any((path / name).is_file() for name in _WEIGHTS):
        return
    for name in _WEIGHTS:
        index = path / f"{name}.index.json"
        if index.is_file():
            wanted = sorted(set(_read(index).get("weight_map", {}).values()))
            missing = [one for one in wanted if not (path / one).is_file()]
            if missing:
                raise GenerateError(
                    f"{path} lacks {len(missing)} of its {len(wanted)} files of weights, {missing[0]} first; copy all"
                )
            return
    raise GenerateError(
        f"{path} has no weights ({_WEIGHTS[0]}); booster.save_model(model, {str(path)!r}, shard=True) writes them"
    )


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _TOKENIZERS)


def _adapted(path: Path, tokenizer: Path | None) -> Model:
    """Adapters stand beside their tokenizer, which the model that they belong to and name need not have."""
    config = _read(path / "adapter_config.json")
    kind = config.get("task_type")
    if kind not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):  # the model that they name would write, and mean nothing by it
        raise GenerateError(f"{path} holds adapters of the task {kind}, which writes no text")
    base = config.get("base_model_name_or_path")
    # from here, as peft reads it, or else from where the adapters are
    where = next((one for one in (Path(base), path / base) if one.is_dir()), None) if base else None
    if where is None:
        raise GenerateError(
            f"{path} holds the adapters of {base or 'a model without a name'}, which is no directory here; "
            "write where it is as base_model_name_or_path into adapter_config.json"
        )
    found = find_model(where, tokenizer or (path if _has_tokenizer(path) else None))
    return Model(found.directory, found.tokenizer, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise GenerateError(f"{path} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise GenerateError(f"{path} holds no JSON object")
    return found
