"""Write the pictures of docs/pipelines.md, drawn from the schedules themselves: python tests/unit/write_pictures.py"""

from __future__ import annotations

from pathlib import Path

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.simulate import Costs
from shardwright.pipeline.timeline import Timeline
from shardwright.pipeline.timeline_html import drawing

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RANKS, MICROBATCHES = 4, 8
CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}


def draw(pp_style: str) -> str:
    """A step of 4 ranks and 8 microbatches; the forward of a rank's layers takes 1 ms, their backward 2 ms."""
    chunks = CHUNKS.get(pp_style, 1)
    one = 0.001 / chunks
    return drawing(Timeline.simulated(schedules.get(pp_style, RANKS, MICROBATCHES, chunks), Costs(one, one, one)))


def files() -> dict[Path, str]:
    return {PICTURES / f"{name}.svg": draw(name) for name, style in schedules.STYLES.items() if not style.own}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
