"""Options of command lines: what they are read as, and the line that a wrong one gets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.utils.options import count, number, pretrained, rate, refused_in_a_line, share


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        (count, {"1": 1, "12": 12}, ["0", "-1", "1.5", "x", ""]),
        (number, {"0": 0, "12": 12}, ["-1", "1.5", "x", ""]),
        (rate, {"1": 1.0, "2e-5": 2e-5}, ["0", "-1", "nan", "inf", "x", ""]),
        (share, {"0": 0.0, "0.86": 0.86, "1": 1.0}, ["86", "-0.1", "nan", "x"]),
        (
            pretrained,
            {"gpt2": "gpt2", "org/model": "org/model"},
            ["/nowhere/model", "./nowhere", "../no", "~/nowhere"],
        ),
    ],
)
def test_values(kind: Callable[[str], Any], good: dict[str, Any], wrong: list[str]) -> None:
    assert {text: kind(text) for text in good} == good
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=r"is no|has no config.json"):
            kind(text)


def test_a_directory_of_a_model_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert pretrained(str(tmp_path)) == str(tmp_path)


def test_what_ranks_refuse_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/train.py"])
    with pytest.raises(SystemExit) as ended, refused_in_a_line():
        raise ValueError("tp_size=3; use tp_size=2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "train.py: error: tp_size=3; use tp_size=2\n"
