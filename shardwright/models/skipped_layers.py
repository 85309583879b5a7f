"""Whether a model leaves out whole layers at random in training (LayerDrop)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .config import config_of, parts

_ATTRIBUTES = ("layerdrop", "layer_drop")


def is_positive(value: object) -> bool:
    return isinstance(value, float | int) and value > 0


def skipping(model: nn.Module) -> str | None:
    """Where it says so: "model.decoder.layerdrop=0.2", or "encoder_layerdrop=0.1 in the config"; None: nowhere."""
    for name, module in model.named_modules():
        for attribute in _ATTRIBUTES:
            if is_positive(value := getattr(module, attribute, None)):
                return f"{name}.{attribute}={value}".removeprefix(".")
    for part in parts(config_of(model)):
        for attribute, value in getattr(part, "__dict__", {}).items():
            if attribute.endswith("layerdrop") and is_positive(value):
                return f"{attribute}={value} in the config"
    return None


def that_skip(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that leave out what is in their lists. Where the config alone says that layers are left out, any
    module with a list may do it.
    """
    if skipping(model) is None:
        return
    saying = [module for module in model.modules() if _says_so(module)]
    for owner in saying or model.modules():
        has_lists = any(isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) for child in owner.children())
        if has_lists and not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            yield owner


def _says_so(module: nn.Module) -> bool:
    return any(is_positive(getattr(module, attribute, None)) for attribute in _ATTRIBUTES)
