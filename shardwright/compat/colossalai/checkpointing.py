"""`GradientCheckpointConfig`: the share of layers that are computed again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from ...pipeline.checkpointing import PipelineGradientCheckpointConfig


@dataclass(frozen=True)
class GradientCheckpointConfig(PipelineGradientCheckpointConfig):
    gradient_checkpointing_ratio: float | None = 0.0
