"""Peaks of memory as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plugins.hybrid.resolved import size, table
from .replay import Peak

_SHOWN = 4  # holders named in a line


def as_text(peaks: Sequence[Peak], note: str = "") -> str:
    fullest = max(peaks, key=lambda peak: peak.most)
    rows = [
        (
            f"{peak.rank}{' *' if peak is fullest and len(peaks) > 1 else ''}",
            size(peak.kept),
            size(peak.most),
            peak.during,
            ", ".join(f"{what} {size(amount)}" for what, amount in peak.held[:_SHOWN]),
        )
        for peak in peaks
    ]
    lines = table(("pipeline rank", "between steps", "peak", "reached in", "held by, most first"), rows)
    mark = "; * the fullest rank" if len(peaks) > 1 else ""
    lines.append(f"bytes of tensors, of one step that was replayed{mark}")
    return "\n".join([*lines, *([f"note: {note}"] if note else [])])


def as_data(peaks: Sequence[Peak]) -> list[dict[str, Any]]:
    fullest = max((peak.most for peak in peaks), default=0)  # none where no step was replayed
    return [
        {
            "pipeline_rank": peak.rank,
            "between_steps": peak.kept,
            "peak": peak.most,
            "reached_in": peak.during,
            "held": dict(peak.held),
            "fullest": peak.most == fullest,
        }
        for peak in peaks
    ]
