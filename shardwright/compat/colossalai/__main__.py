"""`python -m shardwright.compat.colossalai [-m] SCRIPT [arguments]`: run a script of Colossal-AI's users as it is."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

_USAGE = "usage: python -m shardwright.compat.colossalai SCRIPT.py [arguments], or -m MODULE [arguments]"


def main(arguments: Sequence[str]) -> int:
    """Run the script as `__main__`, with its arguments and its directory as python would give them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr if not arguments else sys.stdout)
        return 0 if arguments else 2
    as_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if as_module else arguments
    sys.argv = [target, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    if not Path(target).is_file():
        print(f"there is no script {target!r} in {os.getcwd()}; {_USAGE}", file=sys.stderr)
        return 2
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    # `record` leaves the traceback of a rank that fails where torchrun finds it.
    sys.exit(record(main)(sys.argv[1:]))
