"""Cells of a model that somebody names: what `shardwright models --check` runs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...models.verified import line_of
from .axes import AXES, pick_axes
from .run import SECONDS, run_cells
from .subject import Subject

_TRACE = 8  # lines of a failure
_BAD = ("wrong", "failed", "not built")
# Class names by what stands behind the family's name, the usual ones first.
_HEADS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION"),
    *("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0 where every cell is verified, refused or not applicable, 1 where one is wrong, 2 for a name that nothing
    stands for.
    """
    parser = argparse.ArgumentParser(prog="python -m shardwright.testing.matrix", description=__doc__)
    parser.add_argument(
        "name", help="model type or class of transformers, a directory or hub name, or file.py:function"
    )
    parser.add_argument("--axes", default="tp,pp,sp", help=f"of {', '.join(AXES)}, or tp, pp, sp, all")
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds of one cell")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        axes = pick_axes(filter(None, options.axes.split(",")))
        subject = find(options.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    shown = f" with the config of {subject.config}" if subject.config else ""
    print(f"{subject.model_class}{shown}, made small, on ranks of this machine against one process:", flush=True)
    bad = 0
    for cell in run_cells(subject, axes, options.timeout):
        bad += cell["outcome"] in _BAD
        print(line_of(cell), flush=True)
        if cell["outcome"] == "failed" and cell.get("trace"):
            print(textwrap.indent("\n".join(cell["trace"].strip().splitlines()[-_TRACE:]), "    "), flush=True)
    return 1 if bad else 0


def find(name: str) -> Subject:
    """ValueError where nothing has the name; says which names are near."""
    path, colon, function = name.partition(":")
    if colon:
        if not Path(path).is_file():
            raise ValueError(f"{name!r}: there is no file {path}; before the colon stands a Python file")
        return Subject(function, Path(path).stem, str(Path(path).resolve()))
    transformers: Any = importlib.import_module("transformers")
    if Path(name).is_dir() or "/" in name:
        return _of_config(transformers, name)
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    classes = _classes(auto)
    known = dict(reversed(classes))
    if name in known:
        return Subject(known[name])
    if name in {each for _, each in classes} or _is_model_class(transformers, name):
        return Subject(name)
    names = dict.fromkeys([*known, *(each for _, each in classes)])  # a class may answer for several types
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    meant = f" - did you mean {', '.join(map(repr, near))}?" if near else "."
    raise ValueError(
        f"{name!r} is neither a model type nor a model class of transformers {transformers.__version__}, nor a "
        f"directory{meant} A model of your own is given as file.py:function, where the function returns a tiny model "
        "and a batch"
    )


def _is_model_class(transformers: Any, name: str) -> bool:
    return hasattr(getattr(transformers, name, None), "config_class")


def _of_config(transformers: Any, name: str) -> Subject:
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # a missing file, no network, an unknown type
        raise ValueError(
            f"{name!r}: its config cannot be read ({' '.join(str(error).split())[:300]}); give a directory with a "
            "config.json, a name on the hub, or a model type of transformers"
        ) from error
    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return Subject(architecture, config=name)
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    found = next((each for model, each in _classes(auto) if model == config.model_type), None)
    if found is None:
        raise ValueError(f"{name!r}: transformers has no class for its architectures, {config.architectures}")
    return Subject(found, config=name)


def _classes(auto: Any) -> list[tuple[str, str]]:
    """(model type, class), usual heads first, then bare models."""
    found: list[tuple[str, str]] = []
    for mapping in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _HEADS), "MODEL_MAPPING_NAMES"):
        for model_type, names in getattr(auto, mapping).items():
            found.append((model_type, names if isinstance(names, str) else names[0]))
    return found
