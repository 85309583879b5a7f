"""The page: what came out, curves, the pipeline's steps, and of two runs what differs. It loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from ...pipeline import timeline_html
from ...utils.errors import counted
from . import curves
from .curves import Curve, Point, chart, running_mean
from .runs import Run

LOOKS = ("a", "b")
_UNCHANGING = ("output_dir", "run_name", "resume")  # settings of which nobody expects that they are alike

STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 0 auto; padding: 1.2em 1em 3em;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5em; margin: .2em 0 }
h2 { font-size: 1.2em; margin: 1.6em 0 .4em } h3 { font-size: 1em; margin: .9em 0 .2em }
table { border-collapse: collapse } td, th { padding: 3px 18px 3px 0; vertical-align: top; text-align: left }
td:first-child, th { color: var(--faint); font-weight: normal } td + td { overflow-wrap: anywhere }
tr + tr > * { border-top: 1px solid var(--grid) }
.wide { overflow-x: auto } .faint { color: var(--faint) } ul { padding: 0; list-style: none }
.grid-of-charts { display: grid; gap: 8px 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr)) }
figure { margin: 0; min-width: 0 } figcaption { display: flex; gap: .8em; flex-wrap: wrap; align-items: baseline }
figcaption b { font-weight: 600 } .told { font-size: .85em; color: var(--faint); min-height: 1.5em }
.chip { border-radius: 3px; color: var(--paper); padding: 1px 7px }
.chip.a { background: var(--a) } .chip.b { background: var(--b) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .9em }
""".strip()

# What the curves of a chart are where the pointer is, in words below it.
SCRIPT = (
    """
const number = v => Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(4));
for (const svg of document.querySelectorAll('svg.curves')) {
  const last = Number(svg.dataset.last);
  const told = svg.parentElement.querySelector('.told'), cursor = svg.querySelector('.cursor');
  const lines = [...svg.querySelectorAll('polyline:not(.raw)')].map(line => {
    const values = line.dataset.values.split(' ').map(Number);
    const places = line.getAttribute('points').split(' ').map(pair => Number(pair.split(',')[0]));
    return {name: line.dataset.name, points: places.map((place, index) => [place, values[index]])};
  });
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * %(width)d;
    const nearest = new Map();
    for (const line of lines) for (const point of line.points) {
      const seen = nearest.get(line.name);
      if (!seen || Math.abs(point[0] - x) < Math.abs(seen[0] - x)) nearest.set(line.name, point);
    }
    if (!nearest.size) return;
    // Of a run that ended long before, or begins long after, there is nothing to tell here.
    const far = ([place]) => Math.abs(place - x), least = Math.min(...[...nearest.values()].map(far));
    const isWithin = name => [-1, 1].every(side =>
      lines.some(line => line.name === name && line.points.some(([place]) => side * (place - x) >= -8)));
    const seen = [...nearest].filter(([name, point]) => isWithin(name) || far(point) === least);
    const [[, at]] = seen;
    const words = seen.map(([name, [, value]]) => name + ' ' + number(value));
    const place = (at[0] - %(left)d) / (%(width)d - %(left)d - %(right)d) * last;
    const over = told.dataset.x === 'seconds' ? number(place) : Math.round(place).toLocaleString('en');
    told.textContent = told.dataset.x + ' ' + over + ': ' + words.join(', ');
    for (const end of ['x1', 'x2']) cursor.setAttribute(end, at[0]);
    cursor.style.visibility = 'visible';
  });
  svg.addEventListener('pointerleave', () => { told.textContent = ''; cursor.style.visibility = 'hidden'; });
}
""".strip()
    % {"width": curves.WIDTH, "left": curves.LEFT, "right": curves.RIGHT}
)

# Column of metrics.jsonl -> what its chart is called, and whether its axis begins at 0.
CHARTS = {
    "loss": ("Loss", False),
    "learning_rate": ("Learning rate", True),
    "grad_norm": ("Gradient norm", True),
    "tokens_per_second": ("Tokens per second", True),
    "step_time": ("Seconds of a step", True),
    "memory_gib": ("Most memory of the first rank, GiB", True),
}


def page(runs: Sequence[Run], x: str = "step", title: str | None = None) -> str:
    """The HTML of one run, or of two that are compared; `x` is step, tokens or seconds."""
    names = _names(runs)
    title = title or " against ".join(names)
    parts = [f"<h1>{escape(title)}</h1>", _state(runs, names)]
    parts += [f"<h2>What came out</h2>{_outcome(runs, names)}"]
    if len(runs) == 2:
        parts.append(_differences(runs, names))
    parts.append(f'<h2>Curves</h2><div class="grid-of-charts">{"".join(_charts(runs, names, x))}</div>')
    timelines = {
        f"{name}, {style}" if len(runs) == 2 else style: timeline
        for name, run in zip(names, runs, strict=True)
        for style, timeline in run.timelines.items()
    }
    if timelines:
        parts.append(f"<h2>What the pipeline did in a step</h2>{timeline_html.figures(timelines)}")
        parts.append(
            '<p class="faint">The bubble is the part of the ranks\' time in which they did not compute. The ideal runs '
            "the same schedule with every action as long as it took on average, without jitter and with free "
            "transfers.</p>"
        )
    for name, run in zip(names, runs, strict=True):
        parts += _told(run, name if len(runs) == 2 else "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/><title>{escape(title)}</title>
<style>
{curves.STYLE}
{STYLE}
{timeline_html.STYLE}
</style></head><body>
{"".join(parts)}
<script>
{SCRIPT}
</script>
</body></html>
"""


def _names(runs: Sequence[Run]) -> list[str]:
    """Their directories' names, with what is around them where these are alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.folder.resolve().parts[-2:]) for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder.resolve()) for run in runs]
    return names if len(set(names)) == len(names) else [f"{name} ({at})" for at, name in enumerate(names, 1)]


def _state(runs: Sequence[Run], names: Sequence[str]) -> str:
    """How far each run is, and what is odd about its files."""
    lines = []
    for look, name, run in zip(LOOKS, names, runs, strict=False):
        total = run.told.get("facts", {}).get("total_steps")
        done, finished = run.steps[-1]["step"], run.told.get("finished")
        far = f"{done} of {counted(total, 'step')}" if total else f"{counted(done, 'step')}"
        state = "" if finished is None else ", interrupted" if finished.get("interrupted") else ", finished"
        chip = f'<span class="chip {look}">{escape(name)}</span> ' if len(runs) == 2 else ""
        notes = "".join(f"; {escape(note)}" for note in run.notes)
        lines.append(f"<p>{chip}{far}{state}{notes}</p>")
    return "".join(lines)


def _outcome(runs: Sequence[Run], names: Sequence[str]) -> str:
    columns = [_facts(run) for run in runs]
    return _table(columns, names)


def _facts(run: Run) -> dict[str, str]:
    """What one wants to know first."""
    told = run.told.get("facts", {})
    found = {key: str(told[key]) for key in ("run", "model", "layout") if key in told}
    if isinstance(told.get("parameters"), int):
        found["parameters"] = f"{told['parameters']:,}"
    loss = [value for value in run.column("loss") if value is not None]
    if loss:
        tail = loss[-max(1, len(loss) // 20) :]
        last = f"in the mean of the last {len(tail)} steps" if len(tail) > 1 else "at last"
        found["loss"] = f"{loss[0]:.4f} at first, {sum(tail) / len(tail):.4f} {last}"
    scores = [row for row in run.evaluations if _number(row.get("eval_loss")) is not None]
    if scores:
        best = min(scores, key=lambda row: float(row["eval_loss"]))
        found["held-out loss"] = f"{scores[-1]['eval_loss']:.4f}, least {best['eval_loss']:.4f} at step {best['step']}"
    for key, name in _scores([run]).items():
        rows = [row for row in run.evaluations if _number(row.get(key)) is not None]
        most = max(rows, key=lambda row: float(row[key]))
        found[name] = f"{rows[-1][key]:.4f}, most {most[key]:.4f} at step {most['step']}"
    numbers: list[tuple[str, str, Callable[[Sequence[float]], float], str]] = [
        ("tokens_per_second", "tokens per second", median, "{:,.0f}, the median"),
        ("step_time", "a step", median, "{:.3f} s, the median"),
        ("memory_gib", "memory of the first rank", max, "{:.2f} GiB at most"),
        ("tokens_seen", "tokens seen", max, "{:,.0f}"),
    ]
    for column, name, of, words in numbers:
        values = [value for value in run.column(column) if value is not None]
        if values:
            found[name] = words.format(of(values))
    seconds = run.seconds()[-1]
    if seconds:
        found["time in steps"] = f"{seconds:,.1f} s"
    for style, timeline in run.timelines.items():
        found[f"bubble, {style}"] = f"{timeline.bubble:.1%} measured, {timeline.ideal().bubble:.1%} ideal"
    return found


def _scores(runs: Sequence[Run]) -> dict[str, str]:
    """Columns of evaluations beside their loss, such as eval_accuracy, and what they are called."""
    keys = dict.fromkeys(
        key for run in runs for row in run.evaluations for key, value in row.items() if _number(value) is not None
    )
    names = {key: f"held-out {key.removeprefix('eval_').replace('_', ' ')}" for key in keys if key.startswith("eval_")}
    return {key: name for key, name in names.items() if key != "eval_loss"}


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Settings and versions that are not alike, and how far the losses of the same steps are apart."""
    columns = []
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in _UNCHANGING}
        columns.append(settings | {f"version of {key}": value for key, value in _versions(run).items()})
    first, second = columns
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    told = [{key: str(column.get(key, "not said")) for key in keys} for column in columns]
    table = _table(told, names) if keys else "<p>Their settings and versions are alike.</p>"
    if not (first and second):
        table = '<p class="faint">One of them has no recipe.yaml and no run.json, so settings cannot be compared.</p>'
    one, other = (
        {row["step"]: loss for row, loss in zip(run.steps, run.column("loss"), strict=True) if loss is not None}
        for run in runs
    )
    apart = {step: abs(loss - other[step]) for step, loss in one.items() if step in other}
    words = "They have no step in common."
    if apart:
        worst = max(apart, key=lambda step: apart[step])
        over = f"Over {counted(len(apart), 'common step')} their losses"
        words = f"{over} are at most {apart[worst]:.3g} apart, at step {worst}."
    return f"<h2>What differs</h2>{table}<p>{words}</p>"


def _versions(run: Run) -> Mapping[str, Any]:
    made = run.told.get("made with", {})
    return {key: value for key, value in made.items() if key not in ("command", "started")}


def _charts(runs: Sequence[Run], names: Sequence[str], x: str) -> list[str]:
    found = []
    places = [_places(run, x) for run in runs]
    for column, (title, zero) in CHARTS.items():
        drawn: list[Curve] = []
        for look, name, run, place in zip(LOOKS, names, runs, places, strict=False):
            points = [Point(*both) for both in zip(place, run.column(column), strict=True)]
            if all(point.y is None for point in points):
                continue
            label = name if len(runs) == 2 else title.lower()
            if column == "loss":
                mean = running_mean(points, max(1, len(points) // 20))
                drawn += [Curve(label, f"raw {look}", points), Curve(label, f"line {look}", mean)]
                drawn.append(Curve(f"{label}, held out", look, _held_out(run, place, "eval_loss"), dots=True))
            else:
                drawn.append(Curve(label, f"line {look}", points))
        if drawn:
            floors = [run.told["floor"] for run in runs if "floor" in run.told] if column == "loss" else []
            floor = floors[0] if floors else None
            legend = _legend(names) if len(runs) == 2 else ""
            note = ", dots: held out" if any(curve.dots and curve.points for curve in drawn) else ""
            note += f", dashed: best possible {floor:.2f}" if floor is not None else ""
            found.append(_figure(title, f'{legend}<span class="faint">{note[2:]}</span>', drawn, x, floor, zero))
    for key, name in _scores(runs).items():
        title = name.capitalize()
        drawn = [
            Curve(called if len(runs) == 2 else name, f"line {look}", _held_out(run, place, key))
            for look, called, run, place in zip(LOOKS, names, runs, places, strict=False)
        ]
        found.append(_figure(title, _legend(names) if len(runs) == 2 else "", drawn, x))
    return found


def _figure(
    title: str, words: str, drawn: Sequence[Curve], x: str, floor: float | None = None, zero: bool = False
) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{words}</figcaption>"
        f'{chart(title, drawn, x, floor, zero)}<div class="told" data-x="{x}"></div></figure>'
    )


def _places(run: Run, x: str) -> list[float]:
    """Where on the x axis every step is."""
    if x == "seconds":
        return run.seconds()
    column = "tokens_seen" if x == "tokens" else "step"
    values = run.column(column)
    if any(value is None for value in values):
        raise ValueError(f"--x {x}: {run.folder} has steps without {column}; draw it over steps")
    return [value for value in values if value is not None]


def _held_out(run: Run, places: Sequence[float], key: str) -> list[Point]:
    at = {row["step"]: place for row, place in zip(run.steps, places, strict=True)}
    return [Point(at.get(row["step"], 0.0), _number(row.get(key))) for row in run.evaluations]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < float("inf") else None


def _legend(names: Sequence[str]) -> str:
    return "".join(f'<span class="chip {look}">{escape(name)}</span>' for look, name in zip(LOOKS, names, strict=False))


def _told(run: Run, name: str) -> list[str]:
    """Tables and texts that the run brought along, and how it was made."""
    of = f" ({escape(name)})" if name else ""
    parts = [f"<h2>{escape(title)}{of}</h2>{_table([rows])}" for title, rows in run.told.get("tables", {}).items()]
    for title, lines in run.told.get("texts", {}).items():
        parts.append(f"<h2>{escape(title)}{of}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")
    if made := run.told.get("made with"):
        parts.append(f"<h2>How it was made{of}</h2>{_table([made])}")
    return parts


def _table(columns: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """One row per key of any column."""
    head = ""
    if len(columns) > 1:
        chips = zip(LOOKS, names, strict=False)
        head = "".join(f'<th><span class="chip {look}">{escape(name)}</span></th>' for look, name in chips)
        head = f"<tr><th></th>{head}</tr>"
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td>"
        + "".join(f"<td>{escape(str(column.get(key, '')))}</td>" for column in columns)
        + "</tr>"
        for key in keys
    )
    return f'<div class="wide"><table>{head}{rows}</table></div>'
