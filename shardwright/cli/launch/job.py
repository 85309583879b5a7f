"""What is started, on how many nodes: the part that all engines have in common."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ...utils.errors import nearest_file
from ...utils.nccl import NCCL

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


class LaunchError(ValueError):
    """An option that cannot be, in a sentence with what can."""


@dataclass(frozen=True)
class Job:
    """
    name         of the job
    nodes        machines
    ranks        of every machine: one per GPU, or as many as are said where there are none
    gpus         of every machine
    command      what torchrun gets: a script or -m module, and its arguments
    environment  variables that the job is started with
    setup        lines of shell that run first
    grace        seconds in which ranks save a checkpoint when the job must end
    """

    name: str
    nodes: int
    ranks: int
    gpus: int
    command: tuple[str, ...]
    environment: dict[str, str]
    setup: tuple[str, ...]
    grace: int

    def torchrun(self, *options: str) -> list[str]:
        """torchrun's own arguments; `options` say how ranks meet."""
        return [f"--nnodes={self.nodes}", f"--nproc-per-node={self.ranks}", *options, *self.command]

    @property
    def exports(self) -> list[str]:
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a machine; 0: CPUs alone")
    parser.add_argument(
        "--ranks-per-node", type=int, default=argparse.SUPPRESS, metavar="N", help="ranks of a machine without GPUs"
    )
    parser.add_argument("--name", default="shardwright", help="of the job")
    parser.add_argument(
        "--env",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME=VALUE",
        help="a variable of the job; repeatable",
    )
    parser.add_argument(
        "--setup", action="append", default=argparse.SUPPRESS, metavar="LINE", help="shell before it; repeatable"
    )
    parser.add_argument(
        "--grace", type=int, default=300, metavar="SECONDS", help="for a checkpoint, when the job has to end"
    )
    parser.add_argument(
        "--output", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write it there (default: print it)"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that exists")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="shardwright train R.yaml, or script.py"
    )


def read_job(args: argparse.Namespace) -> Job:
    """The job that the options say; LaunchError for what cannot be."""
    for option, least in (("nodes", 1), ("gpus_per_node", 0), ("grace", 30)):
        at_least(args, option, least)
    ranks = getattr(args, "ranks_per_node", None)
    if ranks is not None and args.gpus_per_node:
        raise LaunchError(f"--ranks-per-node {ranks}: there is a rank per GPU; leave it out, or say --gpus-per-node 0")
    if ranks is None and not args.gpus_per_node:
        raise LaunchError("--gpus-per-node 0 needs --ranks-per-node N, the ranks of a machine")
    if ranks is not None:
        at_least(args, "ranks_per_node", 1)
    if not _NAME.fullmatch(args.name):
        raise LaunchError(f"--name {args.name!r}: letters, digits, dots, dashes and underscores, 63 at most")
    environment = {**NCCL, "NCCL_DEBUG": "WARN"} if args.gpus_per_node else {}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(args.grace)  # torchrun would kill ranks after 30 s
    for given in getattr(args, "env", ()):
        if not _VARIABLE.fullmatch(given):
            raise LaunchError(f"--env {given!r} is not NAME=VALUE, such as HF_HOME=/data/hf")
        name, _, value = given.partition("=")
        environment[name] = value
    command = _command(args.command)
    setup = tuple(getattr(args, "setup", ()))
    return Job(
        args.name, args.nodes, ranks or args.gpus_per_node, args.gpus_per_node, command, environment, setup, args.grace
    )


def at_least(args: argparse.Namespace, option: str, least: int) -> None:
    value = getattr(args, option)
    if value < least:
        raise LaunchError(f"--{option.replace('_', '-')} {value} is too small, the least is {least}")


def _command(words: list[str]) -> tuple[str, ...]:
    """What torchrun is to run. A training run goes on from its newest checkpoint when it is started again."""
    words = words[1:] if words[:1] == ["--"] else words
    if words[:1] in (["python"], ["python3"]):
        words = words[1:]
    if not words:
        raise LaunchError("there is nothing to start; end with -- shardwright train recipe.yaml, or -- script.py")
    if words[0] == "shardwright":
        if words[1:2] != ["train"] or len(words) < 3:
            raise LaunchError(f"{shlex.join(words)}: of the verbs, train RECIPE.yaml is the one that a job can run")
        _check_file(words[2])
        again = (
            []
            if any(word.lstrip("-").partition("=")[0] in ("resume", "resume_from_checkpoint") for word in words)
            else ["resume=true"]
        )
        return ("-m", "shardwright.cli", *words[1:], *again)
    if words[0] == "-m" and len(words) > 1:
        return tuple(words)
    if words[0].endswith((".yaml", ".yml", ".json")):
        raise LaunchError(f"{words[0]}: for a recipe say -- shardwright train {shlex.join(words)}")
    if not words[0].endswith(".py"):
        raise LaunchError(
            f"{words[0]}: it is neither shardwright train RECIPE.yaml, nor a script that ends in .py, nor -m module; "
            "torchrun starts one of these on every rank"
        )
    _check_file(words[0])
    return tuple(words)


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise LaunchError(f"{name}: there is no such file{nearest_file(path)}")
