"""LoRA adapters through peft: put on before boosting, trained like any parameters, written as files that peft reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..cluster.mesh import ParallelMesh
from ..pipeline.cut.plan import CutPlan
from ..shardformer.layer.parallel_module import full_tensor

_MARKS = (".lora_", ".modules_to_save.")  # parts of the names that peft gives to what it trains


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
        return peft.get_peft_model(model, lora_config)
    return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True, config=lora_config)


@dataclass(frozen=True)
class Home:
    """Where one adapter parameter of the whole model is to be found: pipeline position, full shape."""

    rank: int
    shape: tuple[int, ...]


def adapter_homes(model: nn.Module, plan: CutPlan) -> dict[str, Home]:
    """Every adapter parameter of a whole model, by full name: the same on every rank; empty for a model without
    adapters.
    """
    if not hasattr(model, "peft_config"):
        return {}
    homes: dict[str, Home] = {}
    for name, param in model.named_parameters():
        if any(mark in name for mark in _MARKS):
            rank = 0
            if plan.survey is not None:
                stages = (
                    stage for stage in range(len(plan.stages)) if name in plan.survey.parameters(plan.stages, stage)
                )
                rank = plan.placement.rank_of(next(stages))
            homes[name] = Home(rank, tuple(param.shape))
    return homes


@torch.no_grad()
def gather_adapters(model: nn.Module, homes: Mapping[str, Home], mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Whole adapter parameters of the whole model on every rank, on the CPU. A collective over all ranks."""
    params = dict(model.named_parameters())
    dtype, device = next((param.dtype, param.device) for param in params.values())
    gathered = {}
    for name, home in homes.items():
        if mesh.coordinate("pp") == home.rank:
            whole = full_tensor(whole_tensor(params[name]), mesh.group("tp")).to(dtype)
        else:
            whole = torch.empty(home.shape, dtype=dtype, device=device)
        if mesh.size("pp") > 1:
            dist.broadcast(whole, group=mesh.group("pp"), group_src=home.rank)
        gathered[name] = whole.cpu()
    return gathered


def whole_tensor(param: torch.Tensor) -> torch.Tensor:
    """The parameter without the sharding of ZeRO-3 or FSDP (a collective where it has one); its spec stays on it."""
    gather = getattr(param, "full_tensor", None)  # of a DTensor
    if gather is None:
        return param
    whole: torch.Tensor = gather()
    whole.__dict__.update(param.__dict__)
    return whole


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
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"{caller} needs peft, which is not installed: pip install peft") from error
    return peft
