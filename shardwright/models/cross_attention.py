"""Decoders that are used without their encoder, and read its states as an argument.

encoder_hidden_states   [B, T, H'], with encoder_attention_mask [B, T], of most families
encoder_outputs         the same without a mask, of Whisper's decoder
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from .config import HIDDEN, first_int, is_encoder_decoder, native_model, text_config

STATES, MASK = "encoder_hidden_states", "encoder_attention_mask"
_ACROSS = ("encoder_attn", "cross_attn", "crossattention", "cross_attention")


def states_argument(model: nn.Module) -> str | None:
    """The argument of the forward that attention of this model reads states of an encoder from; None: no attention
    does.
    """
    native = native_model(model)
    if not any(name.endswith(_ACROSS) for name, _ in native.named_modules()):
        return None
    arguments = inspect.signature(native.forward).parameters
    names = (STATES,) if is_encoder_decoder(native) else (STATES, "encoder_outputs")
    return next((name for name in names if name in arguments), None)


def made_up_states(model: nn.Module, samples: int, length: int, generator: torch.Generator) -> Tensor | None:
    """[B, T, H'] for that argument; None where the config does not say how wide they are."""
    width = first_int(text_config(native_model(model)), ("cross_attention_hidden_size", "encoder_hidden_size", *HIDDEN))
    return None if width is None else torch.randn(samples, length, width, generator=generator)
