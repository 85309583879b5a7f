"""Batches and losses of a model whose layers alone have parts of sequences: all else is whole, on every rank alike.

Gradients are averaged over the ranks as over those of data parallelism with equal batches. What every rank computes
alike has equal gradients; those of a layer are of parts, n times as large, since what was gathered behind it gets the
gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...attention.exchange import Exchange
from ...models.config import config_of, parts, text_config
from ...shardformer.drawing_regions import make_sharded_region
from ...shardformer.rng import synchronize_rng, uses_dropout
from .layer_axis import LayerAxis, LayerFacts


class EnclosedAxis(LayerAxis):
    """Hands batches on as they are."""

    is_whole = True

    def __init__(self, mode: str, exchange: Exchange, model: nn.Module, facts: LayerFacts) -> None:
        super().__init__(mode, exchange, model, facts)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered(), without_caches(self._model):
            yield

    def divide(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            return batch
        for name in self._flags:
            value = batch.get(name)
            if value if value is not None else getattr(text_config(self._model), name, False):
                raise ValueError(
                    f"{name}={True if value is None else value!r} with sequence_parallelism_mode={self.mode!r}: layers "
                    "of every rank return parts of sequences; leave it out"
                    f"{', also of the config' if value is None else ''}"
                )
        for name in ("past_key_values", "use_cache"):
            if batch.get(name):
                raise ValueError(
                    f"{name} with sequence_parallelism_mode={self.mode!r}: a cache belongs to whole sequences, of "
                    "which every rank's layers have a part; leave it out"
                )
        return {**self._defaults, **batch}

    def require_model_loss(self) -> None:
        """Every loss is that of whole sequences."""

    def with_own_loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        return outputs


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Inside, no part of the model fills a cache of its own accord, of parts of sequences."""
    filling = [part for part in parts(config_of(model)) if getattr(part, "use_cache", False)]
    for part in filling:
        part.use_cache = False
    try:
        yield
    finally:
        for part in filling:
            part.use_cache = True


def draw_apart(model: nn.Module, exchange: Exchange, facts: LayerFacts) -> None:
    """Let layers draw other numbers on every rank, and all else the same."""
    layers = [model.get_submodule(name) for stack in facts.plan.stacks for name in stack.layers]
    synchronize_rng(exchange.group)
    for layer in layers:
        if uses_dropout(layer):
            make_sharded_region(layer, exchange.group, opens=[layer])
