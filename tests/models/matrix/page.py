"""The page docs/models.md, from the package's data."""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardwright.models.verified import Cell, Row, Verified
from shardwright.testing.matrix.times import LAYOUTS
from tests.models.matrix.reasons import ENOUGH as NEARLY_ALL
from tests.models.matrix.reasons import reason_of
from tests.models.matrix.rows import KINDS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
# Columns of the summary, each of several cells: what a reader asks first.
SUMMARY: dict[str, tuple[str, ...]] = {
    "tp": ("tp2", "fp32"),
    "pp": ("pp2", "interleaved", "zbv", "tp2_pp2"),
    "sp": ("split_gather", "ring", "overlap", "all_to_all", "ring_attn", "tp2_sp2"),
    "experts": ("ep2", "tp2_ep2"),
    "flash": ("flash", "xformers"),
    "jit": ("jit", "fused_norm"),
    "LoRA": ("lora",),
    "round trip": ("round_trip", "lazy", "generate"),
}
MODES = ("split_gather", "ring", "all_to_all", "ring_attn")  # of split sequences, in the sweep
ENOUGH = 0.75  # share of the parameters
SLOW = 1.5  # times the median ratio of a layout
_MARKS = {"verified": "yes", "not applicable": "-", "refused": "no", "wrong": "**wrong**", "failed": "fails"}


class Notes:
    """Reasons by number, in the order in which the page comes to them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, cell: Cell) -> str:
        """ " (4)", or nothing for a cell that needs no reason."""
        if not cell.why or cell.outcome == "not applicable":
            return ""
        return f" ({self.numbers.setdefault(cell.why, len(self.numbers) + 1)})"

    def mark(self, row: Row, axis: str) -> str:
        cell = row.cells.get(axis)
        return "" if cell is None else _MARKS.get(cell.outcome, cell.outcome) + self(cell)


def page(found: Verified) -> str:
    """The whole of docs/models.md."""
    notes = Notes()
    first = [row for row in found.rows if row.first]
    titles = {name: title for name, title, _ in found.axes}
    lines = [
        *_head(found),
        *_summary(first, titles, notes),
        *_left_whole(first),
        *_sweep(found.rows, titles),
        *_details(found, first, notes),
        *_times(first),
        *_failures(found.rows, titles, notes),
        *_classes(found.rows, notes),
        *("", "## Reasons", ""),
        *(f"{number}. {why.replace('|', '/')}" for why, number in notes.numbers.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _head(found: Verified) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield "# Models"
    yield from _text(
        "Which models train on which layouts, as compared with one process. For a model that is in no table: "
        "`shardwright models --check NAME` tries it on this machine, and [adding a model](adding_a_model.md) says what "
        "helps."
    )
    yield from _text(
        f"Written by `python -m tests.models.matrix --write` with {versions}; `shardwright models` prints the same "
        "data."
    )
    some = f" At most {found.one_step} of the cells that train did so for one step only." if found.one_step else ""
    yield from _text(
        "A cell is one class of transformers at a tiny size, run on rank processes (two, or four where two axes meet) "
        "and compared with the same class in one process: the losses and every gradient of two steps of AdamW and "
        "every weight after them, in float64 to 1e-8 (in the column fp32 in float32 to 1e-5), on samples of different "
        "lengths. `yes`: they are equal; `no`: refused with an error before training; `fails`: it ends in another way; "
        "`-`: it makes no sense for the class; `not built`: no tiny model or batch of it was known when it was tried. "
        "Numbers lead to the [reasons](#reasons). An empty cell was not run." + some
    )
    yield from _text(
        "**flash** is the best kernel of this machine for `enable_flash_attention=True`, which is torch's on a CPU: "
        "for soft caps (Gemma 2) only GPUs have kernels, those of flash-attn 2 and 3 and of flex attention. Of "
        '**xformers** (`attention_backend="xformers"`) the column proves what is handed to it: heads, masks, biases '
        "and scales reach an emulation of its function, which refuses what its documentation does not allow. Its "
        "kernels run on CUDA GPUs only (`pip install xformers`), and are not tried here. **experts** are spread by "
        "`ep_size`."
    )


# --- families ---


def _summary(rows: Sequence[Row], titles: dict[str, str], notes: Notes) -> Iterator[str]:
    yield from _table("Summary", ["model", "class", "sharded", *SUMMARY])
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%}"
        cells = [_together(row, axes, titles, notes) for axes in SUMMARY.values()]
        yield _line(row.family, row.model_class, share, *cells)
    yield from _text("**sharded** is the share of the parameters of which two tensor-parallel ranks have a half each.")


def _left_whole(rows: Sequence[Row]) -> Iterator[str]:
    """Of models of which much is not dealt, the larger parameters that are not, each with the reason."""
    few = [row for row in rows if row.share is not None and row.share < NEARLY_ALL and _is(row, "tp2", "verified")]
    if not few:
        return
    yield from _table(
        f"Less than {NEARLY_ALL:.0%} sharded", ["model", "class", "sharded", "whole on every rank", "why"]
    )
    for row in few:
        reasons: dict[str, list[str]] = defaultdict(list)
        for name in row.whole:
            reasons[reason_of(name)].append(f"`{name}`")
        for place, (why, names) in enumerate(reasons.items()):
            start = ("", "", "") if place else (row.family, row.model_class, f"{row.share:.0%}")
            yield _line(*start, ", ".join(names), why)


def _together(row: Row, axes: Sequence[str], titles: dict[str, str], notes: Notes) -> str:
    """One word for several cells, and which of them are otherwise."""
    cells = {axis: row.cells[axis] for axis in axes if axis in row.cells}
    tried = {axis: cell for axis, cell in cells.items() if cell.outcome != "not applicable"}
    if not tried:
        return next((_MARKS.get(cell.outcome, cell.outcome) for cell in cells.values()), "")
    others = {axis: cell for axis, cell in tried.items() if cell.outcome != "verified"}
    if not others:
        return "yes"
    if len(others) == len(tried):
        numbers = dict.fromkeys(notes(cell) for cell in others.values())
        outcome = next(iter(others.values())).outcome
        return _MARKS.get(outcome, outcome) + "".join(numbers)
    listed = ", ".join(titles.get(axis, axis) + notes(cell) for axis, cell in others.items())
    return f"all but {listed}"


def _details(found: Verified, rows: Sequence[Row], notes: Notes) -> Iterator[str]:
    for group, title in found.groups.items():
        axes = [(name, shown) for name, shown, where in found.axes if where == group]
        yield from _table(title, ["model", "class", *(shown for _, shown in axes)])
        for row in rows:
            yield _line(row.family, row.model_class, *(notes.mark(row, name) for name, _ in axes))


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Ratios of layouts to one process; those far above the median of their layout are marked."""
    timed = [row for row in rows if "one" in row.times]
    if not timed:
        return
    ratios = {
        layout: {row.model_class: row.times[layout][0] / row.times["one"][0] for row in timed if layout in row.times}
        for layout in LAYOUTS
    }
    bounds = {layout: SLOW * statistics.median(found.values()) for layout, found in ratios.items() if found}
    columns = [column for layout in LAYOUTS for column in (f"{layout}, ms", "ratio")]
    yield from _table("Step times", ["model", "class", "one process, ms", *columns])
    for row in timed:
        cells = [f"{row.times['one'][0]:.1f}"]
        for layout in LAYOUTS:
            ratio = ratios[layout].get(row.model_class)
            slow = ratio is not None and ratio > bounds[layout]
            cells += ["", ""] if ratio is None else [f"{row.times[layout][0]:.1f}", f"{ratio:.1f}" + " **slow**" * slow]
        yield _line(row.family, row.model_class, *cells)
    medians = ", ".join(f"{layout} {bound / SLOW:.1f}" for layout, bound in bounds.items())
    yield from _text(
        "CPU time of a training step of the tiny model in float32 with AdamW, median of five after two, of the rank "
        "that has the most of it. The matrices are so small that this is the time around them: launches, hooks, "
        f"messages, not what a layout saves. Medians of the ratios: {medians}. **slow**: more than {SLOW} times the "
        "median."
    )


# --- classes of transformers' auto mappings ---


def _sweep(rows: Sequence[Row], titles: dict[str, str]) -> Iterator[str]:
    yield from _table(
        "Shares of all classes",
        [
            *("classes of transformers", "run", "built", "tp2 verified", f"{ENOUGH:.0%} sharded or more"),
            *("pp2 verified", *(f"{titles.get(mode, mode)} verified" for mode in MODES)),
        ],
    )
    for kind in KINDS:
        own = [row for row in rows if kind in row.kinds]
        built = [row for row in own if any(cell.outcome != "not built" for cell in row.cells.values())]
        shares = [row.share for row in own if row.share is not None and _is(row, "tp2", "verified")]
        cells = [_share(sum(share >= ENOUGH for share in shares), len(shares))]
        modes = [_verified(own, mode) for mode in MODES]
        yield _line(kind, str(len(own)), _share(len(built), len(own)), _verified(own, "tp2"), *cells,
                    _verified(own, "pp2"), *modes)  # fmt: skip
    yield from _text(
        "Classes of transformers' auto mappings, of which the lists further down name those that are not verified. "
        "Shares are of the classes that a tiny config builds."
    )


def _is(row: Row, axis: str, outcome: str) -> bool:
    return axis in row.cells and row.cells[axis].outcome == outcome


def _verified(rows: Iterable[Row], axis: str) -> str:
    outcomes = [row.cells[axis].outcome for row in rows if axis in row.cells]
    tried = [one for one in outcomes if one not in ("not built", "not applicable")]
    return _share(tried.count("verified"), len(tried))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else ""


def _failures(rows: Sequence[Row], titles: dict[str, str], notes: Notes) -> Iterator[str]:
    """By kind and cause, which classes are not verified."""
    axes = ("tp2", "pp2", *MODES)
    for kind in KINDS:
        causes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for row in rows:
            for axis in axes if kind in row.kinds else ():
                cell = row.cells.get(axis)
                if cell is not None and cell.outcome not in ("verified", "not applicable"):
                    word = "not built" if cell.outcome == "not built" else f"{titles.get(axis, axis)} {cell.outcome}"
                    causes[word, notes(cell), cell.outcome].append(row.model_class)
        if causes:
            yield from _table(f"Not verified: {kind}", ["what", "why", "classes"])
        for (word, number, _), names in sorted(causes.items()):
            yield _line(word, number.strip(" ()"), ", ".join(dict.fromkeys(names)))


def _classes(rows: Sequence[Row], notes: Notes) -> Iterator[str]:
    yield from _table("All classes", ["model type", "class", "tp2", "sharded", "whole on every rank", "pp2"])
    for row in sorted(rows, key=lambda row: (row.model_type, row.model_class)):
        share = "" if row.share is None else f"{row.share:.0%}"
        whole = ", ".join(f"`{name}`" for name in row.whole)
        marks = notes.mark(row, "tp2"), notes.mark(row, "pp2")
        yield _line(row.model_type, row.model_class, marks[0], share, whole, marks[1])


# --- tables ---


def _table(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", _line(*columns), "|---" * len(columns) + "|")


def _text(text: str) -> Iterator[str]:
    yield from ("", *textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
