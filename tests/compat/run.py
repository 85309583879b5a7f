"""Runs scripts one after the other in the processes of one job, each as `python -m shardwright.compat.colossalai` does.

Arguments: the script, and a JSON list with the arguments of each run.
"""

from __future__ import annotations

import json
import sys

from shardwright.compat.colossalai.__main__ import main

script, runs = sys.argv[1:]
for arguments in json.loads(runs):
    assert main([script, *arguments]) == 0
