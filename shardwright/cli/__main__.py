"""`python -m shardwright.cli`, the form in which rank processes are started."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from .main import main

if __name__ == "__main__":
    # `record` leaves the traceback of a rank that fails where the launcher finds it.
    sys.exit(record(main)())
