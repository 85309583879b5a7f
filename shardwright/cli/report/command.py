"""The verb: which runs, where the page goes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "draw a run, or compare two, as one HTML page that needs no other file"

AXES = ("step", "tokens", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="what a run left: its output_dir")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="a run that it is compared with")
    parser.add_argument(
        "--output",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="the page (default: report.html in RUN, comparison.html for two runs)",
    )
    parser.add_argument("--x", choices=AXES, default="step", help="what the curves are drawn over")


def run(args: argparse.Namespace) -> int:
    from .page import page  # imports torch, for which `--help` does not wait
    from .runs import read_run

    try:
        runs = [read_run(path) for path in (args.run_directory, args.other) if path is not None]
        text = page(runs, args.x)
    except ValueError as error:
        print(f"shardwright report: {error}", file=sys.stderr)
        return 2
    output = getattr(args, "output", runs[0].folder / ("comparison.html" if args.other else "report.html"))
    try:
        output.write_text(text)
    except OSError as error:
        print(f"shardwright report: --output {output} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0
