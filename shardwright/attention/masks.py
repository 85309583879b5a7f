"""Who sees whom in a whole sequence, and the forms in which attention functions want to be told.

Documents [B, 1, 1, S] say it for every token: 0 is padding, which nobody sees; tokens with the same number are of one
document and see each other; padding sees all documents, as transformers lets it. With padding only, all other tokens
have the number 1. What was added to make a sequence longer is -1: a batch as the script gave it does not have it.

Beside that a token may see only those before it (`causal`), and of these only the last `window`, itself included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class View(NamedTuple):
    causal: bool
    window: int | None

    @property
    def is_whole(self) -> bool:
        return not self.causal and self.window is None


def visible(view: View, documents: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | None:
    """[B or 1, 1, Q, K], True where the query may see the key; None: all see all.

    queries, keys   positions in the whole sequence, [Q] and [K]
    """
    seen = None
    if view.causal:
        seen = (queries[:, None] >= keys[None, :])[None, None]
    if view.window is not None:
        near = (queries[:, None] - keys[None, :] < view.window)[None, None]
        seen = near if seen is None else seen & near
    if documents is not None:
        of_keys = documents.index_select(-1, keys)
        of_queries = documents.index_select(-1, queries).transpose(-1, -2)
        same = (of_keys > 0) & ((of_queries == of_keys) | (of_queries <= 0))
        seen = same if seen is None else seen & same
    return seen


class WholeMasks:
    """Masks of whole sequences [B, 1, S, S], made once for all layers that share one."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def boolean(self, view: View, documents: Tensor | None, length: int, device: torch.device) -> Tensor | None:
        """None where `is_causal` says it all."""
        if documents is None:
            if view.window is None or view.window >= length:
                return None
            positions = torch.arange(length, device=device)
            return visible(view, None, positions, positions)
        if torch.compiler.is_compiling():  # a graph makes them of the documents, and once more in its backward
            positions = torch.arange(length, device=device)
            return visible(view, documents, positions, positions)
        known = self._made.setdefault(documents, {})
        if view not in known:
            positions = torch.arange(length, device=device)
            known[view] = visible(view, documents, positions, positions)
        mask: Tensor | None = known[view]
        return mask

    def additive(
        self, view: View, documents: Tensor | None, length: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor | None:
        """For functions that know no `is_causal`; None where all see all."""
        seen = self.boolean(view, documents, length, device)
        if seen is None:
            positions = torch.arange(length, device=device)
            seen = visible(view._replace(window=None), None, positions, positions)
        if seen is None:
            return None
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        # A query that sees nothing gets the mean of all values, of the keys that the script gave.
        return mask if documents is None else mask.masked_fill(documents < 0, -torch.inf)
