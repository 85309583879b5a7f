"""Write the tables of docs/troubleshooting.md from the table of mistakes: python -m tests.mistakes.write_docs

Text outside of the markers is written by hand and kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.mistakes.table import Mistake, areas, load

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
TITLES = {
    "cuts": "Cutting the model into stages",
    "data": "Data and batches",
    "failures": "Ranks that fail, stall or are stopped",
    "gradients": "Gradients, clipping and optimizers",
    "loss": "Losses and criteria",
    "messages": "Messages between pipeline stages",
    "microbatches": "Microbatches",
    "logits": "Logits that a loss did without",
    "model": "The boosted model",
    "numerics": "Losses that are not numbers",
    "options": "Settings",
    "pairs": "Forwards and backwards at the same time",
    "pipelines": "Pipelines",
    "policies": "Policies, and what is registered by name",
    "selective": "Recomputation",
    "shardformer": "ShardFormer alone",
    "slices": "Sequences in slices",
}
_START, _END = "<!-- table of mistakes -->", "<!-- end of the table -->"


def page(current: str) -> str:
    """The page with its tables as they should be."""
    body = "\n".join(_section(area) for area in sorted(areas(), key=lambda area: TITLES.get(area, area)))
    before, _, rest = current.partition(_START)
    return f"{before}{_START}\n\n{body}\n{_END}{rest.partition(_END)[2]}"


def _section(area: str) -> str:
    lines = [f"## {TITLES[area]}", "", "| you do or see | what happens | what to do |", "|---|---|---|"]
    return "\n".join(lines + [_row(row) for row in load(area)]) + "\n"


def _row(row: Mistake) -> str:
    return (
        "| "
        + " | ".join(re.sub(r"\s+", " ", text).replace("|", "\\|") for text in (row.symptom, row.gets, row.fix))
        + " |"
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
