"""Write the pictures of the documents: python tests/unit/write_pictures.py

Schedules are drawn from the lists that the runtime executes, the measured step from a recording.
"""

from __future__ import annotations

from pathlib import Path

import axis_pictures

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.simulate import Costs
from shardwright.pipeline.snapshots import read_timelines
from shardwright.pipeline.timeline import Timeline
from shardwright.pipeline.timeline_html import compared, drawing

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RANKS, MICROBATCHES = 4, 8
CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}


def draw(pp_style: str) -> str:
    """A step of 4 ranks and 8 microbatches; the forward of a rank's layers takes 1 ms, their backward 2 ms."""
    chunks = CHUNKS.get(pp_style, 1)
    one = 0.001 / chunks
    return drawing(Timeline.simulated(schedules.get(pp_style, RANKS, MICROBATCHES, chunks), Costs(one, one, one)))


def measured(scheme: str) -> str:
    """What a run has recorded (docs/pictures/measured.json, which `Trainer` and `shardwright demo` write as
    timeline.json), for a page of one color scheme.
    """
    return compared(read_timelines(PICTURES / "measured.json"), scheme)


def files() -> dict[Path, str]:
    drawn = {name: draw(name) for name, style in schedules.STYLES.items() if not style.own}
    drawn |= {name: axis_pictures.draw(axis) for name, axis in axis_pictures.AXES.items()}
    drawn |= {f"measured-{scheme}": measured(scheme) for scheme in ("light", "dark")}
    return {PICTURES / f"{name}.svg": text for name, text in drawn.items()}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
