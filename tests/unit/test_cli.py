"""The command without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import shardwright
from shardwright.cli.doctor import release
from shardwright.cli.main import VERBS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"shardwright {shardwright.__version__}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["trian"], "did you mean 'train'?"),
        (["launch", "slum"], "did you mean 'slurm'?"),
        (["doctor", "--helpp"], "did you mean '--help'?"),
        (["config", "a.json", "--to", "deepsped"], "did you mean 'deepspeed'?"),
    ],
    ids=" ".join,
)
def test_what_is_mistyped_is_answered_with_what_is_near(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert near in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert VERBS[verb].HELP.split()[0] in capsys.readouterr().out


@pytest.mark.parametrize("words", [*([verb] for verb in VERBS), ["launch", "slurm"]], ids=" ".join)
def test_help_answers_at_once(words: list[str]) -> None:
    """It waits for nothing heavy; the seconds are those of the processor, since machines are busy."""
    code = f"""
import sys, time
import shardwright.cli.main as command
try:
    command.main([*{words!r}, "--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {{"torch", "transformers", "numpy", "tokenizers", "datasets"}} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 1, time.process_time()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: shardwright {' '.join(words)}")
    assert "default: None" not in done.stdout
    assert "default: False" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("shardwright re", "report"),
        ("shardwright launch s", "skypilot slurm"),
        ("shardwright launch slurm --max", "--max-turns"),
        ("shardwright demo --device c", "cpu cuda"),
        ("shardwright report out --x ", "seconds step tokens"),
        ("shardwright train recipe.yaml --print", "--print-config"),
        ("shardwright train reci", ""),
    ],
)
def test_bash_completes(typed: str, offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = " ".join(f"'{word}'" for word in typed.split(" "))
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shardwright\n"
    done = subprocess.run(
        ["bash", "-uc", script + 'echo "${COMPREPLY[@]-}"'], capture_output=True, text=True, timeout=60, check=True
    )
    assert " ".join(sorted(done.stdout.split())) == offered, done.stderr


def test_other_shells_know_every_verb_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        for word in (*VERBS, "skypilot", "max-turns", "world-size"):
            assert word in text, (shell, word)


def test_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:

    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["shardwright"] == shardwright.__version__
    assert rows["torch"] == version("torch")


def test_doctor_finds_this_machine_ready() -> None:
    """In a process of its own, because it starts a process group."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "doctor"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ready to train." in done.stdout


def test_doctor_says_how_to_fix_what_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


PLAN = ["plan", "--world-size", "2", "--model"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*PLAN, "lama-8b"], "there is no model 'lama-8b'"),
        ([*PLAN, "lama-8b"], "did you mean 'llama-8b'?"),
        ([*PLAN, ""], "there is no model ''"),
        ([*PLAN, "nothing/here"], "there is no model 'nothing/here'"),
        (
            [*PLAN, "llama-tiny", "--config", "missing.py"],
            "config='missing.py' must be a dict or an existing Python file",
        ),
        ([*PLAN, "llama-tiny", "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["plan", "--model", "llama-tiny", "--world-size", "0"], "--world-size 0 must be at least 1"),
    ],
)
def test_a_question_that_cannot_be_asked_is_no_verdict_on_a_layout(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert words in said.err.splitlines()[-1]
    assert "layout does not work" not in said.out + said.err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 0"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"num_key_value_heads": 3}, "3 heads of keys and values do not divide the 4 of queries"),
        ({"num_attention_heads": 0}, "no config that this transformers knows: ZeroDivisionError"),
        ({"hidden_size": -64}, "no model can be made of this LlamaConfig: RuntimeError: Trying to create tensor with"),
        ({"hidden_act": "nope"}, "no model can be made of this LlamaConfig: KeyError: 'nope'"),
        ({"architectures": ["BertForMaskedLM"]}, "no model can be made of this LlamaConfig: AttributeError"),
    ],
)
def test_a_config_that_no_model_can_be_made_of_is_refused_in_a_sentence(
    setting: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **sizes, **setting}))
    with pytest.raises(SystemExit) as end:
        main([*PLAN, str(file)])
    assert end.value.code == 2
    assert f"--model {file}" in (said := capsys.readouterr().err.splitlines()[-1])
    assert words in said


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    """As `shardwright doctor | head -1` does: the pipe is closed before the last line is written."""
    code = (
        "import sys, time, shardwright.cli.doctor as doctor\n"
        "doctor.checks = lambda: (time.sleep(0.3) or doctor.Check(f'check {n}', True, 'x' * 70000, '') for n in "
        "range(4))\n"
        "from shardwright.cli.main import main\n"
        "sys.exit(main(['doctor']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert said == ""


def test_every_extra_is_for_something_that_is_imported() -> None:
    """A package that an extra installs is imported somewhere, or is a tool of the tests or of the documents."""
    import re

    root = Path(shardwright.__file__).parents[1]
    text = (root / "setup.py").read_text()
    block = re.search(r"^EXTRAS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    extras = {
        name: [re.split(r"[<>=;]", package)[0] for package in packages] for name, packages in eval(block[1]).items()
    }
    del extras["test"], extras["docs"]  # tools, which scripts call
    code = "\n".join(
        path.read_text()
        for folder in ("shardwright", "examples", "benchmarks")
        for path in (root / folder).rglob("*.py")
    )
    for name, packages in extras.items():
        for package in packages:
            module = package.replace("-", "_")
            assert re.search(rf"^\s*(import|from) {module}\b|\"{module}[\".]", code, re.MULTILINE), (
                f"nothing imports {package} of extra {name!r}"
            )
