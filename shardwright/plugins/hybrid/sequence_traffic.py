"""What ranks that share sequences send in one step, by the closed forms.

all_to_all  a layer's forward has four all-to-alls (query, key, value, output), its backward as many; each sends
            (n - 1) / n of what a rank holds, keys once for every rank whose query heads look at them
ring_attn   n - 1 times a rank's keys and values forward, twice as often backward, with their gradients
"""

from __future__ import annotations

from torch import nn

from ...attention.heads import share_heads
from ...models.config import HIDDEN, KEY_VALUE_HEADS, LAYERS, QUERY_HEADS, first_int, text_config
from ..settings import HybridSettings
from .resolved import Traffic
from .traffic import Tokens


def part_length(settings: HybridSettings, length: int) -> int:
    """Tokens of a sequence that one rank holds, padding included."""
    ranks = settings.layout.sp_size or 1
    pieces = 2 * ranks if settings.sharding.sequence_parallelism_mode == "ring_attn" and ranks > 1 else ranks
    return -(-length // pieces) * pieces // ranks


def sequence_traffic(settings: HybridSettings, model: nn.Module, tokens: Tokens, recomputes: bool) -> list[Traffic]:
    """Of the layers of one pipeline position; `tokens` are those of one rank."""
    ranks, config = settings.layout.sp_size or 1, text_config(model)
    heads, layers = first_int(config, QUERY_HEADS), first_int(config, LAYERS)
    if ranks == 1 or heads is None or layers is None:
        return []
    keys = first_int(config, KEY_VALUE_HEADS) or heads
    try:
        size = first_int(config, ("head_dim",))
    except Exception:  # of a config whose layers differ, which refuses to be asked
        return []
    size = size or (first_int(config, HIDDEN) or 0) // heads
    heads, keys = (max(1, -(-number // settings.layout.tp_size)) for number in (heads, keys))
    layers = -(-layers // settings.layout.pp_size)
    if settings.sharding.sequence_parallelism_mode == "all_to_all":
        calls, what = 8, "queries, keys, values, outputs and their gradients, all-to-all"
        features = 2 * (2 * heads + 2 * sum(share_heads(heads, keys, ranks).key_sizes)) * size
        sent = tokens.bytes(features)
        sent = None if sent is None else sent * (ranks - 1) // ranks
    else:
        calls, what = 3 * (ranks - 1), "keys, values and their gradients, sent to the next rank"
        sent = tokens.bytes(3 * (ranks - 1) * 2 * keys * size)
    what += " (without those that are recomputed)" if recomputes else ""
    count = None if tokens.microbatches is None else calls * layers * tokens.microbatches
    return [Traffic("sp", what, count, None if sent is None else sent * layers)]
