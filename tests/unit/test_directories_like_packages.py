"""A directory with the name of a package, where a script is started, is no installed package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.kernels import backends
from shardwright.ops import layer_graphs
from shardwright.plugins.deepspeed import _import_deepspeed
from shardwright.plugins.lora import add_lora
from shardwright.testing.matrix import axes


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named after packages here comes from directories without files alone."""
    names = ("triton", "liger_kernel", "peft", "deepspeed")
    for name in names:
        (tmp_path / name).mkdir()
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
    has_any = [path for path in sys.path if any((Path(path) / name).exists() for name in names)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if path not in has_any)])
    backends.has_triton.cache_clear()
    backends.liger.cache_clear()


@pytest.fixture(autouse=True)
def _forgets(directories: None) -> Any:
    yield
    backends.has_triton.cache_clear()
    backends.liger.cache_clear()


def test_kernels_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not backends.has_triton()
    assert backends.liger("rms_norm") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.source("rms_norm") == "torch"
    monkeypatch.setattr(layer_graphs, "get_current_device", lambda: torch.device("cuda"))
    with pytest.raises(ValueError, match="needs Triton on a CUDA device, and it is not installed"):
        layer_graphs.require_compiler()


def test_what_needs_a_package_says_how_to_install_it() -> None:
    with pytest.raises(ValueError, match="needs peft, which is not installed: pip install peft"):
        add_lora(nn.Linear(2, 2), lora_config=object())
    with pytest.raises(ValueError, match="DeepSpeedPlugin needs deepspeed, which is not installed: pip install"):
        _import_deepspeed()
    built: Any = SimpleNamespace(model=None)
    assert axes.not_applicable(axes.AXES["lora"], built) == "peft is not installed"
