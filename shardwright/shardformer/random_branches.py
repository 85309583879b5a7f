"""Branches that a model leaves out at random in training: whole layers, or layers of single samples.

Ranks that share a sequence would have to leave out the same ones. Those that split it at the first layer and gather it
behind the last need these two in every forward.
"""

from __future__ import annotations

import torch.nn as nn

from ..models.skipped_layers import is_positive, skipping


def refuse_branches(model: nn.Module, option: str) -> None:
    """ValueError for a model that leaves out branches, since sequences are split by `option`."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if ("DropPath" in kind or "StochasticDepth" in kind) and is_positive(getattr(module, "drop_prob", None)):
            raise ValueError(
                f"{option}: {name} ({kind}) drops whole samples, which ranks that hold parts of a sequence do not "
                "agree on; set its probability to 0, or use enable_sequence_parallelism=False"
            )
    if (where := skipping(model)) is not None:
        raise ValueError(
            f"{option}: {where} leaves out whole layers at random, which ranks that hold parts of a sequence do not "
            "agree on; set it to 0, or use enable_sequence_parallelism=False"
        )
