"""Peaks of memory as text and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..plugins.hybrid.resolved import ResolvedLayout, size, table
from .replay import Peak

_SHOWN = 4  # holders named in a line


def as_text(peaks: Sequence[Peak], batch: Mapping[str, Any], note: str = "") -> str:
    """`batch` is what was replayed."""
    most = max(peaks, key=lambda peak: peak.most)
    rows = [
        (
            f"{peak.rank}{' *' if peak is most and len(peaks) > 1 else ''}",
            size(peak.kept),
            size(peak.most),
            peak.during,
            ", ".join(f"{what} {size(amount)}" for what, amount in peak.held[:_SHOWN]),
        )
        for peak in peaks
    ]
    lines = table(("pipeline rank", "between steps", "peak", "reached in", "held by, most first"), rows)
    mark = "; * the fullest rank" if len(peaks) > 1 else ""
    given = ", ".join(f"{name} {shape}" for name, shape in shapes_of(batch).items())
    lines.append(f"bytes of tensors, of one step that was replayed{mark}; its batch: {given}")
    return "\n".join([*lines, *([f"note: {note}"] if note else [])])


def fullest(peaks: Sequence[Peak]) -> str:
    """In a few words."""
    most = max(peaks, key=lambda peak: peak.most)
    return f"peak {size(most.most)}" + (f" on pipeline rank {most.rank}" if len(peaks) > 1 else "")


def shapes_of(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    """By name, of the tensors of a batch."""
    return {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def figures(
    layout: ResolvedLayout, attention: str, peaks: Sequence[Peak], batch: Mapping[str, Any], note: str
) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    replayed = {"peaks": as_data(peaks), "peaks_batch": shapes_of(batch), "peaks_note": note}
    return {**asdict(layout), "attention": attention, **replayed}


def as_data(peaks: Sequence[Peak]) -> list[dict[str, Any]]:
    most = max((peak.most for peak in peaks), default=0)  # none where no step was replayed
    return [
        {
            "pipeline_rank": peak.rank,
            "between_steps": peak.kept,
            "peak": peak.most,
            "reached_in": peak.during,
            "held": dict(peak.held),
            "fullest": peak.most == most,
        }
        for peak in peaks
    ]
