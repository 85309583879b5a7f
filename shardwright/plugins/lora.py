"""LoRA adapters through peft."""

from __future__ import annotations

from typing import Any

from torch import nn


def add_lora(model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
    """`model` with adapters: new ones by `lora_config` (a peft LoraConfig), or those saved in `pretrained_dir`. Call before boost.

    The model's own weights are frozen; build the optimizer on the parameters of the result that require gradients.
    """
    if pretrained_dir is None and lora_config is None:
        raise ValueError("enable_lora needs lora_config=peft.LoraConfig(...) for new adapters, or pretrained_dir=... for saved ones")
    try:
        import peft
    except ImportError as error:
        raise ValueError("enable_lora needs peft, which is not installed: pip install peft") from error
    if pretrained_dir is None:
        return peft.get_peft_model(model, lora_config)
    return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, config=lora_config)
