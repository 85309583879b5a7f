"""Policies of models whose plan is found from the model itself: all their names lead to the one that finds it."""

from __future__ import annotations

import re

from ...shardformer.policies.base import Policy
from ...shardformer.policies.generic import GenericPolicy

_NAMES = re.compile(r"(Blip2|Command|Cohere|DeepseekV3|Sam|ViT|Whisper)\w*Policy")


def __getattr__(name: str) -> type[Policy]:
    if _NAMES.fullmatch(name):
        return GenericPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
