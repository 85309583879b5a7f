"""What the demo prints, from one rank only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .records import History, told_apart


class ProgressLine:
    """Shows the newest step: as a bar in a terminal, as a line now and then in a log."""

    def __init__(self, bar: Progress | None, console: RichConsole, steps: int) -> None:
        self.bar, self.console, self.steps = bar, console, steps
        self.task = bar.add_task("training", total=steps, numbers="") if bar else None

    def advance(self, history: History) -> None:
        newest = history.steps[-1]
        held_out = history.evaluations[-1].eval_loss
        numbers = f"loss {newest.loss:.3f}  held out {held_out:.3f}  {newest.tokens_per_second:,.0f} tokens/s  "
        numbers += f"{newest.memory_gib:.1f} GiB"
        if self.bar and self.task is not None:
            self.bar.update(self.task, advance=1, numbers=numbers)
        elif newest.step == 1 or newest.step % max(1, self.steps // 10) == 0 or newest.step == self.steps:
            self.console.print(f"  step {newest.step:>5} of {self.steps}  {numbers}", highlight=False)


class Console:
    """All output of the demo; silent on every rank but one."""

    def __init__(self, enabled: bool) -> None:
        self.rich = RichConsole(quiet=not enabled, highlight=False, soft_wrap=False)
        self.enabled = enabled

    def introduce(self, history: History) -> None:
        self.rich.print(f"\n[bold]A Llama with {history.parameters / 1e6:.2f} million random weights[/]")
        self.rich.print(f"on {history.layout}")
        self.rich.print(
            f"{history.settings.steps} steps of {history.settings.tokens_per_step:,} tokens of an invented language,"
        )
        self.rich.print(f"whose entropy, and so the best possible loss, is {history.lowest_loss:.3f}\n")

    @contextmanager
    def progress(self, steps: int) -> Iterator[ProgressLine]:
        if not (self.enabled and self.rich.is_terminal):
            yield ProgressLine(None, self.rich, steps)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.rich) as bar:
            yield ProgressLine(bar, self.rich, steps)

    def conclude(self, history: History) -> None:
        """What happened, where to look, what to try next."""
        self.rich.print()
        self.rich.print(Panel(_outcome(history), title="What happened", title_align="left", box=box.ROUNDED))
        self.rich.print(
            Panel("\n".join(history.sample), title="What the model writes now", title_align="left", box=box.ROUNDED)
        )
        self.rich.print(Panel(_places(history), title="Where to look", title_align="left", box=box.ROUNDED))
        self.rich.print(Panel(_next(history), title="What to try next", title_align="left", box=box.ROUNDED))


def _outcome(history: History) -> Table:
    first, last = history.evaluations[0].eval_loss, history.evaluations[-1].eval_loss
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
