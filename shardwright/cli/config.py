"""`shardwright config FILE --to shardwright|plugin|from_config|deepspeed|accelerate`: configurations, translated."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..utils.errors import counted

HELP = (
    "translate a configuration of Colossal-AI, InternLM, DeepSpeed, Accelerate or FSDP, or a recipe into one of theirs"
)

SOURCES = ("colossalai", "internlm", "deepspeed", "accelerate", "fsdp", "shardwright")
TARGETS = ("shardwright", "plugin", "from_config", "deepspeed", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the configuration: .json, .yaml, .py, or .sh with a command line")
    parser.add_argument("--from", dest="source", choices=SOURCES, help="whose it is, where its keys do not tell")
    parser.add_argument(
        "--to",
        dest="target",
        choices=TARGETS,
        default="shardwright",
        help="a recipe of shardwright, a plugin's call, the dict form that from_config and InternLM take, or a file of "
        "another framework",
    )


def run(args: argparse.Namespace) -> int:
    from ..compat.configs import read_file, write

    try:
        source, found = read_file(args.file, args.source)
        text, notes = write(found, args.target)
    except ValueError as error:
        print(f"shardwright config: {error}", file=sys.stderr)
        return 2
    said = [
        f"# from {source}; {counted(len(notes), 'key') if notes else 'no keys'} without a "
        f"counterpart{':' * bool(notes)}",
        *(f"#   {note}" for note in notes),
    ]
    # JSON has no comments
    print("\n".join(said), file=sys.stderr if args.target == "deepspeed" else sys.stdout, flush=True)
    print(text, end="")
    return 0
