"""Whether ranks that are about to share a model were given the same one.

A few elements of every parameter stand for all of it, since models from different seeds differ everywhere.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from ..lazy.context import notes_of

_SAMPLED = 16  # elements per parameter


def require_same_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError on all ranks of `group` where they have different weights: each would keep its part of its own.
    Collective.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    facts = facts_of_weights(model)
    found: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(found, facts, group=group)
    for rank, other in enumerate(found):
        name = next((name for name in found[0] if other.get(name) != found[0][name]), None)
        if name is not None:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"ranks that share one model have different weights: {name} is {found[0][name]} on rank {ranks[0]} and "
                f"{other.get(name)} on rank {ranks[rank]}. Seed all ranks alike before the model is built "
                "(launch_from_torch(seed=...) does, torch.manual_seed(seed + rank) does not), or load the same "
                "checkpoint on all of them"
            )


def facts_of_weights(model: nn.Module) -> dict[str, str]:
    """A digest of a few elements of every parameter; the seed of one that is yet to be made."""
    facts: dict[str, str] = {}
    sampled: list[tuple[str, torch.Tensor]] = []
    for name, param in model.named_parameters():
        notes = notes_of(param) if param.is_meta else None
        if notes is not None:
            facts[name] = f"made from seed {notes.seed}"
        elif not param.is_meta and type(param.data) is torch.Tensor and param.numel():
            flat = param.detach().flatten() if not param.is_contiguous() else param.detach().view(-1)
            sampled.append((name, flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].float()))
    for device in {values.device for _, values in sampled}:
        here = [(name, values) for name, values in sampled if values.device == device]
        numbers = torch.cat([values for _, values in here]).cpu()
        for (name, _), values in zip(here, numbers.split([len(values) for _, values in here]), strict=True):
            facts[name] = (
                f"[{', '.join(f'{value:.6g}' for value in values[:3].tolist())}, ...] (digest {hash_of(values)})"
            )
    return facts


def hash_of(tensor: torch.Tensor) -> str:
    """Of the contents of a tensor, on the host."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.blake2b(content, digest_size=6).hexdigest()
