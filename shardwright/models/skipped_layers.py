"""Whether a model leaves out whole layers at random in training (LayerDrop)."""

from __future__ import annotations

from torch import nn

from .config import config_of, parts


def is_positive(value: object) -> bool:
    return isinstance(value, float | int) and value > 0


def skipping(model: nn.Module) -> str | None:
    """Where it says so: "model.decoder.layerdrop=0.2", or "encoder_layerdrop=0.1 in the config"; None: nowhere."""
    for name, module in model.named_modules():
        for attribute in ("layerdrop", "layer_drop"):
            if is_positive(value := getattr(module, attribute, None)):
                return f"{name}.{attribute}={value}".removeprefix(".")
    for part in parts(config_of(model)):
        for attribute, value in getattr(part, "__dict__", {}).items():
            if attribute.endswith("layerdrop") and is_positive(value):
                return f"{attribute}={value} in the config"
    return None
