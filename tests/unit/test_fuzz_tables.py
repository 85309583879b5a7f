"""Tables that hypothesis draws, for what reads JSON, recipes and configurations that somebody else may have written:
each is read, or refused by an error for users. Changed bytes and files: test_fuzz_readers.py.

    python -m pytest tests/unit/test_fuzz_tables.py -m sweep           10,000 tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwright.checkpoint.plain_data import decode
from shardwright.comm.payload import Header, put_together
from shardwright.files.errors import CheckpointError
from shardwright.files.huggingface import HfFiles
from shardwright.plugins.hybrid.config_form import read_config
from shardwright.trainer.reading import build_recipe, keys_of
from shardwright.trainer.recipe import Recipe

REFUSALS = (CheckpointError, ValueError)
_SECTIONS = ("parallel", "hybrid_zero_optimizer", "model", "data", "tensor", "pipeline", "zero1", "size", "mode")
_NAMES = ("__shardwright__", "dtype", "shape", "items", "tensors", "tree", "weight_map", "metadata", "a", *_SECTIONS)
_WORDS = ("F32", "dict", "tensor", "tuple", "auto", "../x", "/etc/passwd", "m-1.safetensors", "1e9", "\0")
_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(_WORDS)
)
_key = st.sampled_from((*_NAMES, *keys_of(Recipe))) | st.text(max_size=4)
TABLES = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_key, inner, max_size=4), max_leaves=12
)


def plain_data(table: Any, directory: Path) -> None:
    decode(table)


def message(table: Any, directory: Path) -> None:
    header = Header.from_bytes(json.dumps(table).encode())
    put_together(header, [torch.empty(0) for _ in header.tensors])


def huggingface(table: Any, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))
    files = HfFiles(directory)
    for key in files.keys:
        files.tensor(key)


def config(table: Any, directory: Path) -> None:
    read_config(table)


def recipe(table: Any, directory: Path) -> None:
    if isinstance(table, Mapping):
        build_recipe(table)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=[pytest.mark.sweep, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("read", [plain_data, message, huggingface, config, recipe])
def test_any_table_is_read_or_refused(read: Callable[[Any, Path], None], count: int, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 2)}, tmp_path / "m-1.safetensors")

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(TABLES)
    def run(table: Any) -> None:
        with suppress(*REFUSALS):
            read(table, tmp_path)

    run()
