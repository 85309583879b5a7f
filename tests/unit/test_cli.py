"""The command without ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardwright
from shardwright.cli.doctor import release
from shardwright.cli.main import VERBS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"shardwright {shardwright.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert VERBS[verb].HELP.split()[0] in capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    code = "import sys, shardwright.cli.main as m; m.build_parser(); assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["shardwright"] == shardwright.__version__
    assert rows["torch"] == torch.__version__


def test_doctor_finds_this_machine_ready() -> None:
    """In a process of its own, because it starts a process group."""
    done = subprocess.run([sys.executable, "-m", "shardwright.cli", "doctor"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready to train." in done.stdout


def test_doctor_says_how_to_fix_what_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.cli import doctor

    versions = {"torch": None, "transformers": "4.51.3", "safetensors": "0.8.0"}
    monkeypatch.setattr(doctor, "package_version", versions.get)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "-> pip install 'transformers>=5.17'" in printed
    assert "-> pip install 'torch>=2.11'" in printed
    assert "2 problem(s) to fix." in printed


@pytest.mark.parametrize(("version", "expected"), [("2.13.0+cpu", (2, 13)), ("5.17.0.dev0", (5, 17)), ("0.5", (0, 5))])
def test_release(version: str, expected: tuple[int, int]) -> None:
    assert release(version) == expected
