"""What a model does with a row of tokens, tried on a small copy of it before anything is trained."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..shardformer.documents import DocumentProbe
from ..shardformer.small_copy import build_small
from .errors import RecipeError

_TOKENS = 8


def check_order(model: Any) -> None:
    """RecipeError where tokens see those behind them, which they are to predict."""
    small = build_small(
        type(model), copy.deepcopy(model.config), sum(param.numel() for param in model.parameters()), ranks=1
    )
    if small is None:
        return
    row = torch.arange(3, 3 + _TOKENS)[None]
    changed = row.clone()
    changed[0, -1] = 2
    try:
        with torch.no_grad():
            before, after = (small(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (row, changed))
    except Exception:  # the model's own code, which may want more than tokens
        return
    if (before - after).abs().max() > 1e-6:
        kind = model.config.model_type
        hint = "say is_decoder: true in its config, or " if hasattr(model.config, "is_decoder") else ""
        raise RecipeError(
            f"model: a {kind} with this config reads a text in both directions, so that every token would see the one "
            f"that it is to predict; {hint}take a causal model"
        )


def check_packing(model: Any) -> None:
    """RecipeError where a document of a packed sequence changes what the model makes of the next."""
    if not DocumentProbe(model)():
        raise RecipeError(
            f"packing: true, and a {model.config.model_type} of transformers does not keep the samples of one sequence "
            "apart by their positions, so that they would see each other; say packing: false"
        )
