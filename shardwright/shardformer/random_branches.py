"""Branches that a model leaves out at random in training: whole layers, or layers of single samples.

Ranks that share a sequence would have to leave out the same ones. Those that split it at the first layer and gather it
behind the last need these two in every forward.
"""

from __future__ import annotations

import torch.nn as nn

from ..models.config import config_of, parts


def refuse_branches(model: nn.Module, option: str) -> None:
    """ValueError for a model that leaves out branches, since sequences are split by `option`."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if ("DropPath" in kind or "StochasticDepth" in kind) and _is_positive(getattr(module, "drop_prob", None)):
            raise ValueError(
                f"{option}: {name} ({kind}) drops whole samples, which ranks that hold parts of a sequence do not "
                "agree on; set its probability to 0, or use enable_sequence_parallelism=False"
            )
        for attribute in ("layerdrop", "layer_drop"):
            if _is_positive(getattr(module, attribute, None)):
                raise _skipping(option, f"{name}.{attribute}={getattr(module, attribute)}")
    for part in parts(config_of(model)):
        for attribute, value in getattr(part, "__dict__", {}).items():
            if attribute.endswith("layerdrop") and _is_positive(value):
                raise _skipping(option, f"{attribute}={value} in the config")


def _is_positive(value: object) -> bool:
    return isinstance(value, float | int) and value > 0


def _skipping(option: str, where: str) -> ValueError:
    return ValueError(
        f"{option}: {where} leaves out whole layers at random, which ranks that hold parts of a sequence do not agree "
        "on; set it to 0, or use enable_sequence_parallelism=False"
    )
