"""How the demo's ranks are laid out: the one file to change when the demo should show another kind of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """
    dp      ranks that take different sequences
    device  "cpu" or "cuda"
    """

    dp: int
    device: str
    batch_size: int

    @classmethod
    def for_world(cls, world_size: int, batch_size: int, device: str) -> Layout:
        return cls(dp=world_size, device=device, batch_size=batch_size)

    def plugin(self) -> Any:
        from shardwright.plugins import TorchDDPPlugin

        return TorchDDPPlugin()

    def __str__(self) -> str:
        ranks = f"{self.dp} ranks" if self.dp > 1 else "1 rank"
        return f"{ranks} (data parallel {self.dp}), {self.backend} on the {'GPU' if self.device == 'cuda' else 'CPU'}"

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def describe(self) -> dict[str, str | int]:
        """Every number of the layout, for layout.json and the report."""
        return {
            "plugin": "TorchDDPPlugin",
            "ranks": self.dp,
            "data parallel": self.dp,
            "sequences per rank and step": self.batch_size // self.dp,
            "device": self.device,
            "backend": self.backend,
        }
