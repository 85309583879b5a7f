"""`LiveBytes`, with which a step's memory is measured; it is also what the planner replays steps under."""

from ..planner.live_bytes import LiveBytes

__all__ = ["LiveBytes"]
