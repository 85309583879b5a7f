"""Modules whose backward reads no weight: at stage 3 they are gathered for the forward alone.

Nothing but rows of a table comes out of an embedding, and its backward adds gradients up. Classes of embeddings that do
more to the rows (scale them by a constant) are asked with one id of a table that takes no memory: what their graph
keeps shows whether a weight is among it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .call_values import tensors_in


def only_looks_up(module: nn.Module) -> bool:
    """Whether a backward through a call of it reads no weight, whoever else looks at the call."""
    declared: bool | None = getattr(module, "only_looks_up", None)  # sharded ones, whose calls communicate
    if declared is not None:
        return declared
    if not isinstance(module, nn.Embedding) or list(module._parameters) != ["weight"] or module.max_norm is not None:
        return False
    return type(module).forward is nn.Embedding.forward or _keeps_no_weight(module)


def looks_up(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether this call of one that only looks up is one with ids. Ovis2's table multiplies what is not."""
    return not is_watched(module) and not any(
        tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in((args, kwargs))
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a call of it runs code that is not its own, which may read weights."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return "forward" in vars(module) or not all(map(_reads_no_weight, hooks))


def _keeps_no_weight(module: nn.Embedding) -> bool:
    weight: Any = module.weight
    row = torch.zeros(1, 1, dtype=weight.dtype, device=weight.device)
    module._parameters["weight"] = table = nn.Parameter(row.expand(weight.shape))
    kept: list[torch.Tensor] = []
    memory = table.untyped_storage()._cdata

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata == memory:
            kept.append(tensor)
        return tensor

    modes = [(part, part.training) for part in module.modules()]
    devices = [weight.device] if weight.is_cuda else []
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices),
            torch.autograd.graph.saved_tensors_hooks(keep, keep),
        ):
            for mode in (False, True):  # models are boosted in either
                module.train(mode)
                module.forward(torch.zeros(1, 1, dtype=torch.long, device=weight.device))
    except Exception:
        return False  # it is called with something else than ids
    finally:
        module._parameters["weight"] = weight
        for part, mode in modes:
            part.training = mode
    return not kept


def _reads_no_weight(hook: Any) -> bool:
    """A hook of the layout, or what transformers asks the embeddings of checkpointed layers for gradients with."""
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "of_layout", False) or name.startswith("PreTrainedModel.enable_input_require_grads.")
