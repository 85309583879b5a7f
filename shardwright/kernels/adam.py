"""Adam and AdamW over flat pieces of memory, in one pass: gradient, weight and moments are read once, and written with
them is the weight in the dtype that the model works in.

    g = factor grad          (-factor where it maximizes; + weight_decay w where the decay is not decoupled)
    w = w (1 - lr weight_decay)                        decoupled alone
    m = m + (1 - beta1) (g - m)                        v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

torch's own step needs the gradient scaled in memory, and somebody to copy the weights behind it. Kernels, by name:

    triton     on CUDA: one launch for a rule's pieces and one for their numbers (`triton.adam`)
    compiled   on a CPU: by inductor, with a C++ compiler (`compiled_adam`)

Nothing here waits for the device: how many steps were taken, the factor and whether to skip are tensors on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Piece(NamedTuple):
    """
    master, exp_avg, exp_avg_sq   [n] fp32, contiguous, written
    grad                          [n], only read
    step                          [] fp32, how many steps were taken before; written
    weight                        [n], written with the master in its dtype; None where nobody wants it
    """

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    weight: Tensor | None


class Rule(NamedTuple):
    """Hyperparameters of a param group; `lr` may lie on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rule:
        """Of a group of `torch.optim.Adam` or `AdamW`. A rate in host memory is a number here."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        kind = group["decoupled_weight_decay"], group["maximize"]
        return cls(lr, beta1, beta2, group["eps"], group["weight_decay"], *kind)


class Kernel(Protocol):
    def __call__(self, number: int, pieces: Sequence[Piece], rule: Rule, factor: Tensor, skip: Tensor | None) -> None:
        """Take a step of `pieces`; call it without gradients being recorded.

        number   of the rule, under which a kernel may remember what it has worked out about the pieces
        factor   [] on the device: what gradients are multiplied by
        skip     [] fp32 on the device: nothing changes where it is 1
        """
