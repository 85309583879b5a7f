"""What the plugins share that lay out by ZeRO and set the number format themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..cluster.mesh import ParallelMesh
from ..interface import OptimizerWrapper
from ..zero.optimizer import ZeroOptimizer
from .base import Plugin
from .lora import add_lora
from .settings import PRECISION_NAMES


class ZeroPlugin(Plugin):
    moves_parameters = True
    mesh: ParallelMesh

    @property
    def steps_itself(self) -> bool:
        return True

    def supported_precisions(self) -> list[str]:
        return list(PRECISION_NAMES)

    def control_precision(self) -> bool:
        return True

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> Iterator[None]:
        if optimizer is None or not isinstance(optimizer.sharded, ZeroOptimizer):
            raise ValueError("no_sync needs the optimizer that boost returned: booster.no_sync(model, optimizer)")
        with optimizer.no_sync():
            yield

    def enable_lora(self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
        """See `plugins.lora.add_lora`."""
        return add_lora(model, pretrained_dir, lora_config)
