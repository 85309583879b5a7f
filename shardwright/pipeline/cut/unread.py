"""Tensors that layers return and nothing reads (a pooled output beside the hidden states): in one process they get no
gradient, so none travels back for them between stages.
"""

from __future__ import annotations

import torch


def watched(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a stage receives it. Backward raises ValueError where this batch reads it after all."""
    if not tensor.is_floating_point() or not torch.is_grad_enabled():
        return tensor
    leaf = tensor.detach().requires_grad_()
    leaf.register_hook(_refuse)
    return leaf


def _refuse(gradient: torch.Tensor) -> None:
    if gradient.any():
        raise ValueError(
            f"a tensor of shape {tuple(gradient.shape)} that an earlier pipeline stage returned is read by this batch, "
            "but was not by the one from which stages were cut; pass a batch like the real ones as example_inputs"
        )
