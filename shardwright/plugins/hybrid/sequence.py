"""The modes of sequence parallelism: which settings each can be had with.

split_gather    along tensor parallelism: regions gather and scatter (`sequence_tensor`)
ring            the same, collectives in parts beside the products
"""

from __future__ import annotations

from ..settings import HybridSettings
from .sequence_tensor import TENSOR_MODES, check_along_tensor


def check_sequence(settings: HybridSettings) -> None:
    """ValueError for settings that contradict each other, or that nothing serves."""
    options = settings.sharding
    if not options.enable_sequence_parallelism:
        if options.enable_sequence_overlap:
            raise ValueError(
                "enable_sequence_overlap=True needs enable_sequence_parallelism=True, with tp_size of at least 2; set "
                "both or neither"
            )
        return
    mode = options.sequence_parallelism_mode
    if mode is None and settings.layout.tp_size == 1:
        raise ValueError(
            "enable_sequence_parallelism=True with tp_size=1: sequences are split over the ranks of tensor "
            "parallelism; use tp_size=2 or more, or leave it out"
        )
    mode = mode or "split_gather"
    if mode not in TENSOR_MODES:
        raise ValueError(
            f"sequence_parallelism_mode={mode!r}: this version does not cut sequences over an axis of their own yet; "
            f"use {' or '.join(map(repr, TENSOR_MODES))} with tp_size=2 or more"
        )
    check_along_tensor(settings, mode)
