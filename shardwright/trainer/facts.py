"""run.json: what a run is, for `shardwright report`. Written at the start, so that a run that goes on can be drawn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..utils.versions import versions

COMMAND_LINE = "SHARDWRIGHT_COMMAND_LINE"  # what the user has typed, where the command started these ranks itself


class RunFacts:
    """Listener that keeps what it is told at the start and at the end, with versions and the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: dict[str, Any] = {}

    def started(self, facts: Mapping[str, Any]) -> None:
        made_with = {"command": os.environ.get(COMMAND_LINE), **versions(), "started": time.strftime("%F %T %Z")}
        self.told = {"facts": dict(facts), "made with": {name: value for name, value in made_with.items() if value}}
        self._write()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Steps are in metrics.jsonl."""

    evaluated = step

    def finished(self, facts: Mapping[str, Any]) -> None:
        self.told["finished"] = dict(facts)
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.told, indent=1) + "\n")
