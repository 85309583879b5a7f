"""What errors of foreign code are shown with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from shardwright.utils.errors import said_in_model


def test_the_line_of_a_models_code_is_named(tmp_path: Path) -> None:
    file = tmp_path / "modeling_toy.py"
    file.write_text("def forward(x, mask):\n    return x.add(mask)\n")
    spec = importlib.util.spec_from_file_location("modeling_toy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RuntimeError) as caught:
        module.forward(torch.ones(2, 3), torch.ones(2, 4))
    said = said_in_model(caught.value)
    assert said.startswith("RuntimeError: The size of tensor a (3)")
    assert said.endswith(", at return x.add(mask) (modeling_toy.py, line 2)")


def test_errors_without_a_place_are_shown_by_their_first_line() -> None:
    assert said_in_model(ValueError("too short; use a longer one\nand more")) == "ValueError: too short"
    assert said_in_model(KeyError()) == "KeyError: "
