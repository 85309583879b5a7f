"""Guards over the source tree itself: what must be there, what must not, and how long a file may be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

import shardwright

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardwright"
CODE = ("shardwright", "tests", "examples", "benchmarks")
TOP_LEVEL_TEXT = ("*.md", "*.py", "*.toml", "*.txt")
LONGEST, LONG, LONGEST_POLICY = 600, 400, 250


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    found = python_files(*CODE)
    found += [path for pattern in TOP_LEVEL_TEXT for path in ROOT.glob(pattern)]
    found += [path for folder in ("docs", "scripts", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def lines_where(pattern: str, files: list[Path]) -> list[str]:
    regex = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if regex.search(line)
    ]


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in python_files(*CODE)}
    too_long = [
        f"{name}: {length} lines, the most is {LONGEST}" for name, length in lengths.items() if length > LONGEST
    ]
    getting_long = [f"{name}: {length} lines" for name, length in lengths.items() if LONG < length <= LONGEST]
    assert not too_long, "\n".join([*too_long, "split them; also getting long:", *getting_long])


def test_no_policy_is_too_long() -> None:
    """Families state only what they differ in."""
    files = python_files("shardwright/shardformer/policies")
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > LONGEST_POLICY} == {}


def test_files_are_ascii() -> None:
    wrong = lines_where(r"[^\x00-\x7f]", text_files())
    assert not wrong, "\n".join(wrong)


def test_files_of_tests_have_names_of_their_own() -> None:
    """Folders without __init__.py share one room of names, in which pytest takes the second for the first."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_file_of_tests_is_taken_for_one_of_python() -> None:
    """pytest puts the folders of tests on the path, and a process that a test starts finds them before Python's own."""
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if path.stem in sys.stdlib_module_names] == []


def test_no_paths_of_one_machine() -> None:
    wrong = lines_where(r"(?<![\w.~}/-])/(home|root|opt|work|mnt|Users)/\w", text_files())
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do() -> None:
    wrong = lines_where(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", text_files())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "LICENSE",
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "constraints.txt",
            "setup.py",
            "pyproject.toml",
        ),
        *("docs/architecture.md", "docs/getting_started.md", "docs/performance.md", "shardwright/py.typed"),
    ],
)
def test_the_repository_has(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("name", ["scripts/demo", "scripts/docs", "scripts/test", "scripts/gpu-check", ".ci/run"])
def test_scripts_can_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK), f"chmod +x {name}"
    assert subprocess.run(["bash", "-n", ROOT / name], check=False).returncode == 0


@pytest.mark.parametrize("found", ["3.9.1", None])
def test_a_machine_without_a_new_enough_python_gets_one_clear_line(tmp_path: Path, found: str | None) -> None:
    """A PATH with the few tools that the scripts use, and an old python3 or none."""
    for tool in ("bash", "dirname", "cat", "cut", "cksum", "rm"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool} here"))
    if found:
        (tmp_path / "python3").write_text(f'#!/usr/bin/env bash\n[ "$1" = --version ] && echo "Python {found}"\n')
        (tmp_path / "python3").chmod(0o755)
        (tmp_path / "env").symlink_to(shutil.which("env") or pytest.fail("no env here"))
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    done = subprocess.run(
        ["bash", clone / "scripts" / "demo"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"shardwright: python3 is {found or 'not in PATH'}")
    assert "Python 3.11 or newer" in lines[0]


def test_the_version_is_in_one_place() -> None:
    holders = [
        path.relative_to(ROOT).as_posix() for path in text_files() if f'"{shardwright.__version__}"' in path.read_text()
    ]
    assert holders == ["shardwright/_version.py"]


def test_every_sub_package_is_a_package() -> None:
    """A folder without __init__.py would work from the tree and be missing in the wheel."""
    folders = {path.parent for path in python_files("shardwright")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_wheel_is_pure_python_and_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "shardwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wheel = tmp_path / f"shardwright-{shardwright.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 2e6
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "shardwright").rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert expected <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_every_test_file_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest passes over folders of some names by default, "dist" and "build" among them."""
    passed_over = pytestconfig.getini("norecursedirs")
    parts = {part for path in (ROOT / "tests").rglob("test_*.py") for part in path.relative_to(ROOT).parts[:-1]}
    assert not [part for part in parts if any(fnmatch(part, pattern) for pattern in passed_over)]


@pytest.mark.parametrize("name", ["quick.txt", "sweep.txt"])
def test_lines_of_the_choices_exist(name: str) -> None:
    """Values of parameters are not looked at: pytest names those that do not exist when they are asked for."""
    lines = [line for line in (ROOT / "tests" / name).read_text().splitlines() if line and line[0] != "#"]
    assert lines
    for line in lines:
        file, _, test = line.partition("::")
        code = (ROOT / file).read_text()
        assert not test or f"\ndef {test.partition('[')[0]}(" in code, line


WITH_LIMITS = """
import time
import pytest

def test_within_the_limit_of_the_command_line():
    time.sleep(1)

@pytest.fixture
def endless():
    yield
    time.sleep(100)

@pytest.mark.timeout(timeout=0.5)
def test_that_fails_before_what_never_ends(endless):
    assert False
"""


def test_time_limits_are_those_that_were_said(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(re.sub(r"(?m)^BEYOND_THE_LIMIT = \S+", "BEYOND_THE_LIMIT = 0.1", conftest))
    (tmp_path / "sweep.txt").touch()
    (tmp_path / "test_limits.py").write_text(WITH_LIMITS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-o",
        "timeout=0.1",
        "-o",
        "timeout_method=signal",
        "--timeout=30",
        str(tmp_path),
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "test_within_the_limit_of_the_command_line PASSED" in run.stdout
    assert "in endless" in run.stderr, "ended, with the place where it was"
