"""`shardwright models`: which models were compared with one process on which layouts, and a check of any other."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from ..models.verified import Row, Verified, as_json, load

HELP = "show which models are verified on which layouts, or check one here"

_MARKS = {"verified": "yes", "not applicable": "-"}  # others by their own name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="families, types or classes with TEXT, with each where there are several",
    )
    parser.add_argument("--family", "--filter", metavar="TEXT", default=argparse.SUPPRESS, help="the same as TEXT")
    parser.add_argument("--json", action="store_true", help="all results as one JSON document, reasons in full")
    parser.add_argument(
        "--check",
        metavar="NAME",
        help="build the model NAME small and run it on local ranks against one process: a model type or class of "
        "transformers, a directory, a name on the hub, or file.py:function for a function that returns a tiny model "
        "and a batch",
    )
    parser.add_argument(
        "--axes", default="tp,pp,sp", help="what --check tries: tp, pp, sp, all, or columns of the table"
    )
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="of one cell of --check")


def run(args: argparse.Namespace) -> int:
    texts = [text for text in (*args.text, getattr(args, "family", "")) if text]
    if args.check is not None:
        if texts:
            print(
                f"shardwright models: --check {args.check} looks at one model, and {' '.join(texts)} filters the "
                "table; give one of them",
                file=sys.stderr,
            )
            return 2
        # In a process of its own: this one answers without torch.
        command = [sys.executable, "-m", "shardwright.testing.matrix", args.check, "--axes", args.axes]
        return subprocess.call([*command, "--timeout", str(args.timeout)])
    found = load()
    rows = found.matching(*texts)
    if not rows:
        near = list(dict.fromkeys(name for text in [*texts, " ".join(texts)] for name in found.nearest(text)))
        alone = [text for text in texts if found.matching(text)] if len(texts) > 1 else []
        said = f"; {' and '.join(alone)} alone would match" if alone else ""
        said += f"; near are {', '.join(near)}" if near and not alone else ""
        print(
            f"no result for {' '.join(texts)!r}{said}; `shardwright models --check NAME` tries a model here",
            file=sys.stderr,
        )
        return 2
    if args.json:
        print(json.dumps({"versions": dict(found.versions), "models": list(as_json(rows))}, indent=1))
        return 0
    print(table(found, rows))
    return 0


def table(found: Verified, rows: list[Row]) -> str:
    """One line a class, and under it why a column is not "yes"."""
    axes = [name for name, _, _ in found.axes]
    wide = max(len(row.model_class) for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [f"{versions}; of the share of parameters that tp2 shards the last column tells"]
    lines.append(" ".join([" " * wide, *axes, "sharded"]))
    for row in rows:
        marks = []
        for axis in axes:
            cell = row.cells.get(axis)
            mark = "" if cell is None else _MARKS.get(cell.outcome, cell.outcome)
            marks.append(mark[: len(axis)].ljust(len(axis)))
        share = "" if row.share is None else f"{row.share:.0%}"
        lines.append(" ".join([row.model_class.ljust(wide), *marks, share]).rstrip())
    return "\n".join(lines)
