"""Mistakes with logits that a loss did without."""

from __future__ import annotations

import torch

from shardwright.kernels import linear_cross_entropy

from .model import Job, job
from .table import mistake, refused


def wide() -> Job:
    """A job whose logits are too many to be there at once."""
    linear_cross_entropy.CHUNK_BYTES["cpu"] = 1024
    return job("tp")


@mistake(
    symptom="`outputs.logits` read after `optimizer.step()`, of a forward with `labels` and a large vocabulary",
    gets="refused: the loss was computed without logits, and the weights that they would be computed from are others",
    fix="read them, or take `outputs.logits.detach()`, before the step; or "
    "`HybridParallelPlugin(enable_fused_cross_entropy=False)`",
)
def logits_after_step(rank: int, world: int) -> None:
    run = wide()
    outputs, read = run.model(**run.batch()), run.model(**run.batch()).logits.detach()
    run.booster.backward(outputs.loss, run.optimizer)
    run.optimizer.step()
    with refused("computed without logits", r"read outputs\.logits before optimizer\.step\(\)"):
        outputs.logits.argmax(-1)
    assert read.argmax(-1).shape == (2, 7)


@mistake(
    symptom="`outputs.logits.retain_grad()`, a hook on them, or a gradient with respect to them, of a forward with "
    "`labels`",
    gets="refused: the loss does not go through them",
    fix="`HybridParallelPlugin(enable_fused_cross_entropy=False)`, or a loss of one's own, without `labels`",
)
def gradient_of_logits(rank: int, world: int) -> None:
    run = wide()
    outputs = run.model(**run.batch())
    for ask in (
        lambda: outputs.logits.retain_grad(),
        lambda: outputs.logits.register_hook(print),
        lambda: torch.autograd.grad(outputs.loss, outputs.logits),
    ):
        with refused("loss was computed without them", "enable_fused_cross_entropy=False"):
            ask()
