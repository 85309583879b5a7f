"""What ranks that share sequences send in one step, by the closed forms.

all_to_all  a layer's forward has four all-to-alls (query, key, value, output), its backward as many; each sends
            (n - 1) / n of what a rank holds, keys once for every rank whose query heads look at them
ring_attn   n - 1 times a rank's keys and values forward, twice as often backward, with their gradients
            with ulysses_size=u: the all-to-alls of u ranks, and around n / u places goes what these hold afterwards:
            the tokens of u ranks, the heads of one
            keys that have a term of alibi each bring it as features
"""

from __future__ import annotations

from torch import nn

from ...attention.extra_terms import padded_width
from ...attention.heads import share_heads
from ...attention.zigzag import Share
from ...models.config import HIDDEN, KEY_VALUE_HEADS, LAYERS, QUERY_HEADS, first_int, text_config
from ...shardformer.adapters import native_model
from ...shardformer.attention_routes import has_alibi
from ..settings import HybridSettings
from .resolved import Traffic
from .traffic import Tokens


def traded_by(settings: HybridSettings) -> int:
    """Ranks that trade sequences for heads around attention; 1: none do."""
    if settings.sequence_mode == "all_to_all":
        return settings.layout.sp_size or 1
    return settings.layout.ulysses_size or 1 if settings.sequence_mode == "ring_attn" else 1


def part_length(settings: HybridSettings, length: int) -> int:
    """Tokens of a sequence that one rank holds, padding included."""
    ranks, among = settings.layout.sp_size or 1, traded_by(settings)
    share = Share(0, ranks // among, zigzag=ranks > 1 and settings.sequence_mode == "ring_attn").shared_by(among, 0)
    return -(-length // share.multiple) * share.multiple // ranks


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
    size = of_values = size or (first_int(config, HIDDEN) or 0) // heads
    latent = first_int(config, ("qk_nope_head_dim",))
    if latent is not None:  # keys and values are made for every head of queries, a part of each key for all of them
        size, keys = latent + (first_int(config, ("qk_rope_head_dim",)) or 0), heads
        of_values = first_int(config, ("v_head_dim",)) or size
    heads, keys = (max(1, -(-number // settings.layout.tp_size)) for number in (heads, keys))
    layers = -(-layers // settings.layout.pp_size)
    among = traded_by(settings)
    if among == 1 and keys == heads and has_alibi(native_model(model)):
        size = of_values = padded_width(size + 2)  # a term for each key travels with it, in two features
    places, shares = ranks // among, share_heads(heads, keys, among)

    def row(what: str, calls: int, features: int, divided: int = 1) -> Traffic:
        """`features` of every token of this rank, in one layer; nothing of it is rounded."""
        sent = tokens.bytes(features, exact=features)
        count = None if tokens.microbatches is None else calls * layers * tokens.microbatches
        what += " (without those that are recomputed)" if recomputes else ""
        return Traffic("sp", what, count, None if sent is None else sent // divided * layers)

    found = []
    if among > 1:
        features = 2 * (heads + sum(shares.key_sizes)) * (size + of_values) * (among - 1)
        found.append(row("queries, keys, values, outputs and their gradients, all-to-all", 8, features, among))
    if places > 1:
        travels = 3 * (places - 1)
        features = travels * max(shares.key_sizes) * (size + of_values) * among
        found.append(row("keys, values and their gradients, sent to the next rank", travels, features))
    return found
