"""The verb: an engine, and its file on standard output or where --output says. Nothing is started."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..parser import HelpFormatter
from . import ray, skypilot, slurm
from .job import LaunchError, read_job
from .job import add_arguments as add_common

HELP = "write the file with which SLURM, Ray or SkyPilot starts a training run on many nodes"

ENGINES = {"slurm": slurm, "ray": ray, "skypilot": skypilot}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines = parser.add_subparsers(dest="engine", metavar="ENGINE", required=True)
    for name, module in ENGINES.items():
        engine = engines.add_parser(name, help=module.HELP, description=module.HELP, formatter_class=HelpFormatter)
        add_common(engine)
        module.add_arguments(engine)


def run(args: argparse.Namespace) -> int:
    engine = ENGINES[args.engine]
    try:
        text = engine.text(read_job(args), args)
        output: Path | None = getattr(args, "output", None)
        if output is None:
            print(text, end="")
            return 0
        if output.exists() and not args.force:
            raise LaunchError(f"--output {output} exists; name another file, or add --force")
        output.write_text(text)
    except LaunchError as error:
        print(f"shardwright launch {args.engine}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"shardwright launch {args.engine}: --output {output} cannot be written ({error.strerror})", file=sys.stderr
        )
        return 2
    print(f"wrote {output}; start it with: {engine.START.format(file=output)}")
    return 0
