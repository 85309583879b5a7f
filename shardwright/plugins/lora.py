"""LoRA adapters through peft: put on before boosting, trained like any parameters, written as files that peft reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..utils.versions import is_installed

_READ_BY_KERNELS = ("out_proj", "conv1d")  # of mamba layers, as peft's own check names them


def add_lora(model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
    """`model` with adapters: new ones by `lora_config` (a peft LoraConfig), or those saved in `pretrained_dir`. Call
    before boost.

    The model's own weights are frozen; build the optimizer on the parameters of the result that require gradients.
    """
    if pretrained_dir is None and lora_config is None:
        raise ValueError(
            "enable_lora needs lora_config=peft.LoraConfig(...) for new adapters, or pretrained_dir=... for saved ones"
        )
    peft = _peft("enable_lora")
    if pretrained_dir is None:
        return _with_new(model, lora_config, peft)
    return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, config=lora_config)


def _with_new(model: nn.Module, lora_config: Any, peft: Any) -> nn.Module:
    try:
        return peft.get_peft_model(model, lora_config)  # type: ignore[no-any-return]
    except ValueError as error:
        if "Incompatible modules" not in str(error):
            raise
        raise ValueError(
            f"enable_lora: LoraConfig(target_modules={lora_config.target_modules!r}) names linears of "
            f"{type(model).__name__} whose weights kernels read past any adapter ({', '.join(_READ_BY_KERNELS)}), and "
            f"peft refuses them; leave them out with LoraConfig(..., exclude_modules={list(_READ_BY_KERNELS)}), on a "
            "model that is made anew: this one has some adapters already"
        ) from error


def write_adapters(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """The directory that `peft.PeftModel.from_pretrained` reads: adapter_model.safetensors, adapter_config.json."""
    from safetensors.torch import save_file

    peft = _peft("save_lora_as_pretrained")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = peft.get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
    partial = directory / "adapter_model.safetensors.partial"
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"}
    )
    config: Any = model.peft_config["default"]  # type: ignore[index]
    before, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(directory))
    finally:
        config.inference_mode = before
    os.replace(partial, directory / "adapter_model.safetensors")


def require_adapters(model: nn.Module) -> None:
    if not hasattr(model, "peft_config"):
        raise ValueError(
            f"save_lora_as_pretrained: {type(model).__name__} carries no adapters; call "
            "booster.enable_lora(model, lora_config=...) before boost"
        )


def _peft(caller: str) -> Any:
    if not is_installed("peft"):
        raise ValueError(f"{caller} needs peft, which is not installed: pip install peft")
    import peft

    return peft
