"""One process of a code block of the documents: the block as a script, under the environment that torchrun gives its ranks.

It is forked from a server that has imported torch and transformers already, which takes longer than most blocks do.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.testing.rank_process import end_with_caller, redirect_output


def run_block(script: Path, output: Path, environ: dict[str, str]) -> None:
    threading.Thread(target=end_with_caller, daemon=True).start()
    redirect_output(output)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(script.parent)
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()  # as an interpreter does at its end, and multiprocessing does not
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
