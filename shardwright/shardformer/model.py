"""The root of a sharded model: its loss is the whole vocabulary's, and it generates from whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from ..ops.vocab_mode import as_scripts_see, vocab_parallel_loss
from ..ops.vocab_shard import VocabShard
from ..utils.tensors import map_tensors
from .layer.embedding import LogitsParallel
from .layer.parallel_module import ParallelModule


class ShardedModel(ParallelModule):
    """A model with a head over a sharded vocabulary.

    Called, it returns this rank's columns of the logits (all of them, without padding, with `parallel_output=False`),
    and the loss that its forward computes from them is exact.

    for_scripts     whether a script calls it, which may read anything off the logits (see
                    `ops.vocab_mode.ShardedLogits`)
    """

    for_scripts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with vocab_parallel_loss():
            outputs = super().__call__(*args, **kwargs)
        return map_tensors(as_scripts_see, outputs) if self.for_scripts else outputs


class GeneratingModel(ShardedModel):
    """The same for models that generate: every rank sees whole logits and chooses the same tokens."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with gathered_logits(self):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


def split_heads(model: nn.Module) -> dict[str, VocabShard]:
    """Modules, by name, that return this rank's columns of the logits."""
    return {
        name: module.vocabulary
        for name, module in model.named_modules()
        if isinstance(module, LogitsParallel) and not module.gather_output
    }


@contextmanager
def gathered_logits(model: nn.Module) -> Iterator[None]:
    """Inside, heads over a sharded vocabulary return the logits of the whole vocabulary on every rank."""
    heads = [module for module in model.modules() if isinstance(module, LogitsParallel) and not module.gather_output]
    for head in heads:
        head.gather_output = True
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = False
