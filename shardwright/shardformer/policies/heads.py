"""One policy serves all task heads of a family, under the names that scripts of other frameworks have for each."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..._moved import missing_name
from .base import Policy


def policies_of_heads(module: str, **families: type[Policy]) -> Callable[[str], type[Policy]]:
    """A module's `__getattr__`: `LlamaForCausalLMPolicy` is the policy that goes with the prefix `Llama`, and so on."""

    def find(name: str) -> type[Policy]:
        for prefix, policy in families.items():
            if re.fullmatch(
                rf"{prefix}(Model|LMHeadModel|DoubleHeadsModel|EncoderModel|EncoderPolicy|For\w+)?Policy", name
            ):
                return policy
        raise missing_name(module, name)

    return find
