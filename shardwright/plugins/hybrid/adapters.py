"""Where the LoRA parameters of a whole model are, of which every rank holds a part, and gathering them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...cluster.mesh import ParallelMesh
from ...pipeline.cut.plan import CutPlan
from ...shardformer.layer.parallel_module import full_tensor
from ...utils.tensors import whole_tensor

_MARKS = (".lora_", ".modules_to_save.")  # parts of the names that peft gives to what it trains


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
