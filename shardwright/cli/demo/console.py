"""What the demo prints beside the Trainer's log, on the first rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table

from ...utils.errors import counted
from .records import History, told_apart


class Language:
    """A listener of the Trainer that says, under what its log says, what the model is to learn."""

    def __init__(self, history: History, console: Console) -> None:
        self.history, self.console = history, console

    def started(self, facts: Mapping[str, Any]) -> None:
        settings = self.history.settings
        self.console.print(
            f"{counted(settings.steps, 'step')} of {settings.tokens_per_step:,} tokens of an invented language,"
        )
        self.console.print(f"whose entropy, and so the best possible loss, is {self.history.lowest_loss:.3f}\n")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The log shows it."""

    evaluated = finished = step


def conclude(history: History, console: Console) -> None:
    """What happened, where to look, what to try next."""
    panels: dict[str, RenderableType] = {
        "What happened": _outcome(history),
        "What the model writes now": "\n".join(history.sample),
        "Where to look": _places(history),
        "What to try next": _next(history),
    }
    console.print()
    for title, inside in panels.items():
        console.print(Panel(inside, title=title, title_align="left", box=box.ROUNDED))


def _outcome(history: History) -> Table:
    first, last = history.evaluations[0]["eval_loss"], history.evaluations[-1]["eval_loss"]
    table = _two_columns()
    table.add_row("held-out loss", f"{first:.3f} -> [bold]{last:.3f}[/]   (best possible {history.lowest_loss:.3f})")
    table.add_row(
        "speed",
        f"{history.tokens_per_second:,.0f} tokens/s, {history.seconds:.1f} s in all, on "
        f"{history.settings.world_size} rank(s)",
    )
    for style, timeline in history.timelines.items():
        table.add_row(
            f"bubble, {style}",
            f"{timeline.bubble:.0%} measured, {timeline.ideal().bubble:.0%} ideal   (a step of "
            f"{1000 * timeline.makespan:.0f} ms)",
        )
    for style, apart in history.apart.items():
        table.add_row(f"losses, {style}", f"{told_apart(apart)} those of {history.settings.styles[0]}")
    for kind, score in history.scores.items():
        table.add_row(kind, f"{score} questions answered right")
    return table


def _places(history: History) -> Table:
    output = history.settings.output
    table = _two_columns()
    table.add_row(f"{output}/report.html", "loss, throughput, memory, the pipeline's steps, and all of the above")
    if history.timelines:
        table.add_row(f"{output}/timeline.html", "what every pipeline rank did in one step, against the ideal")
        table.add_row(f"{output}/trace.json", "the same for ui.perfetto.dev or chrome://tracing")
    table.add_row(f"{output}/metrics.jsonl", "loss, gradient norm and speed of every step")
    table.add_row(f"{output}/layout.json", "how the ranks were laid out")
    table.add_row(f"{output}/model", "the trained model, for AutoModelForCausalLM")
    return table


def _next(history: History) -> Table:
    command = os.environ.get("SHARDWRIGHT_COMMAND", "shardwright")
    other = 1 if history.settings.world_size > 1 else 2
    table = _two_columns()
    table.add_row(f"{command} demo --world-size {other}", "other ranks, the same loss")
    table.add_row(f"{command} demo --steps {2 * history.settings.steps}", "closer to the best possible")
    table.add_row(f"{command} demo --pp 2 --pp-style 1f1b,zb,zbv", "schedules side by side")
    table.add_row(f"{command} report {history.settings.output} OTHER", "two runs, one over the other")
    table.add_row(f"{command} doctor", "what this machine has and lacks")
    table.add_row("docs/getting_started.md", "your own training script")
    return table


def _two_columns() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    return table
