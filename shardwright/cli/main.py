"""Entry point of the `shardwright` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from . import calibrate, completion, config, doctor, env, models, plan, train
from .demo import command as demo
from .generate import command as generate
from .launch import command as launch
from .parser import HelpFormatter, Parser
from .report import command as report

# A verb is a module with HELP, add_arguments(parser) and run(args) -> exit status. None of them imports torch at module
# level, so that `--help` and a mistyped option answer at once.
VERBS = {
    "demo": demo,
    "train": train,
    "report": report,
    "generate": generate,
    "launch": launch,
    "plan": plan,
    "calibrate": calibrate,
    "models": models,
    "config": config,
    "env": env,
    "doctor": doctor,
    "completion": completion,
}


_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="shardwright", description="Train unmodified HuggingFace models over many devices.")
    parser.add_argument("--version", action="version", version=f"shardwright {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP, formatter_class=HelpFormatter)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run, fail=verb.error, whole=parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, rest = build_parser().parse_known_args(argv)
    if rest and not hasattr(args, "takes_rest"):
        args.fail(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest  # argparse takes positional arguments in one row only, and options of a verb may stand between
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `shardwright doctor | head -1`
        # or the interpreter would try to flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    return status
