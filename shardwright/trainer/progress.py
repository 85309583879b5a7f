"""What a run tells while it goes: a live line or plain ones, and metrics.jsonl. On one rank alone."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..logging import get_dist_logger


class Listener(Protocol):
    """Told what happens, on the first rank."""

    def started(self, facts: Mapping[str, Any]) -> None:
        """Before the first step; `facts` are parameters, layout, total steps, the step that training goes on from."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """After every step."""

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """After every evaluation."""

    def finished(self, facts: Mapping[str, Any]) -> None:
        """Behind the last step: `step`, `total_steps`, `tokens_seen`, and whether a signal `interrupted` the run,
        whether the last save is on disk (`saved`)."""


class Log:
    """A bar with the newest numbers in a terminal; elsewhere a line every `every` steps."""

    def __init__(self, every: int = 1, console: Console | None = None) -> None:
        self.every = every
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._total = 0

    def started(self, facts: Mapping[str, Any]) -> None:
        self._total = facts["total_steps"]
        self.console.print(f"{facts['model']} with {facts['parameters'] / 1e6:,.2f} million parameters")
        self.console.print(f"on {facts['layout']}")
        if facts["step"]:
            self.console.print(f"going on after step {facts['step']}")
        if self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
            )
            self._bar = Progress(*columns, console=self.console)
            self._bar.add_task("steps", total=self._total, completed=facts["step"], numbers="")
            self._bar.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        numbers = _numbers(metrics)
        step = metrics["step"]
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, numbers=numbers)
        elif step % self.every == 0 or step in (1, self._total):
            self.console.print(f"step {step:>{len(str(self._total))}} of {self._total}  {numbers}")

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        told = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("eval_"))
        self.console.print(f"step {metrics['step']}  {told}")

    def finished(self, facts: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._bar.stop()
        if facts["interrupted"]:
            kept = "is written, which resume=true goes on from" if facts["saved"] else "could not be written"
            text = f"interrupted after step {facts['step']}; a checkpoint {kept}"
        else:
            early = facts["step"] < facts["total_steps"]
            why = ", after which the evaluation's loss did not fall any more" if early else ""
            text = f"trained {facts['step']} steps on {facts['tokens_seen']:,} tokens{why}"
        self.console.print(text)


class JsonLines:
    """One object per step or evaluation. A run that goes on, or back, takes out what is written of later steps. A disk
    that fails costs lines, and not the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = 0  # step that was told
        self._has_failed = False

    def started(self, facts: Mapping[str, Any]) -> None:
        self._keep_until(facts["step"])

    def _keep_until(self, step: int) -> None:
        kept = []
        if step and self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._write(metrics, goes_back=metrics["step"] <= self._last)
        self._last = metrics["step"]

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._write(metrics)

    def _write(self, metrics: Mapping[str, Any], goes_back: bool = False) -> None:
        try:
            if goes_back:
                self._keep_until(metrics["step"] - 1)
            with self.path.open("a") as lines:
                lines.write(json.dumps(dict(metrics)) + "\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                get_dist_logger().warning(f"step {metrics['step']}: its line is missing in {self.path}: {error}")

    def finished(self, facts: Mapping[str, Any]) -> None:
        """Every line is written already."""


class Clock:
    """Seconds between steps; those of evaluations and checkpoints are left out by `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return max(seconds, 1e-9)


def peak_memory() -> int:
    """Bytes of this rank's GPU that were in use at most; without one, of the host's memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was cut off


def _numbers(metrics: Mapping[str, Any]) -> str:
    parts = [f"loss {metrics['loss']:.4f}", f"lr {metrics['learning_rate']:.2e}"]
    if metrics.get("grad_norm") is not None:
        parts.append(f"grad norm {metrics['grad_norm']:.3f}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"{1000 * metrics['step_time']:,.0f} ms")
    if metrics.get("memory_gib") is not None:
        parts.append(f"{metrics['memory_gib']:.1f} GiB")
    return "  ".join(parts)
