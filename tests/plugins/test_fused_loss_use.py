"""What scripts and models do to logits between head and loss comes out as in plain torch, fused or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright import Booster
from shardwright.kernels import linear_cross_entropy
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer.layer.norm import FusedRMSNorm, fuse_norms
from shardwright.testing import keep_float64, run_ranks, zoo

NAME = "llama-causal-lm"


class Scaled(torch.autograd.Function):
    """Nothing forward, half of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 0.5


def copied_before_masked(logits: Tensor) -> Tensor:
    kept = logits.clone()
    logits[..., :5] = -1e4
    return kept


def scaled_before_written(logits: Tensor) -> Tensor:
    kept = logits * 2
    logits.mul_(3)
    return kept


def watched(logits: Tensor) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    return logits


class Model(nn.Module):
    """A head, something between it and the loss, the loss."""

    def __init__(self, between: Callable[[Tensor], Tensor], reentrant: bool | None = None) -> None:
        super().__init__()
        self.model, self.between, self.reentrant = zoo.build(NAME), between, reentrant
        self.config = self.model.config

    def get_output_embeddings(self) -> Any:
        return self.model.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.model.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        head = self.model.lm_head
        logits = head(hidden) if self.reentrant is None else checkpoint(head, hidden, use_reentrant=self.reentrant)
        logits = self.between(logits)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def head_hooks(model: Model) -> None:
    model.model.lm_head.register_full_backward_pre_hook(lambda _, grads: (grads[0].clamp(-1e-4, 1e-4),))


CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], None]]] = {
    "nothing": (lambda: Model(lambda logits: logits), lambda _: None),
    "a copy, then a write": (lambda: Model(copied_before_masked), lambda _: None),
    "a scale, then a write": (lambda: Model(scaled_before_written), lambda _: None),
    "a function with a backward of its own": (lambda: Model(Scaled.apply), lambda _: None),
    "a hook on logits": (lambda: Model(watched), lambda _: None),
    "a hook on the head": (lambda: Model(lambda logits: logits), head_hooks),
    "a reentrant checkpoint": (lambda: Model(lambda logits: logits, True), lambda _: None),
    "a checkpoint": (lambda: Model(lambda logits: logits, False), lambda _: None),
}


@keep_float64()
def compare_all(rank: int, world: int) -> None:
    linear_cross_entropy.CHUNK_BYTES["cpu"] = 7 * 4 * 101
    batch = zoo.inputs(NAME, batch_size=4, seq_len=13)
    for case, (build, change) in CASES.items():
        reference, model = build(), build()
        change(reference)
        change(model)
        expected = reference(**batch)["loss"]
        expected.backward()
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = boosted(**batch)["loss"]
        booster.backward(loss, optimizer)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, msg=case)
        gradients = optimizer.gradients()
        for name, param in reference.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-10, atol=1e-14, msg=f"{case}: {name}")
        with torch.inference_mode():
            evaluated = boosted(**batch)
        torch.testing.assert_close(evaluated["loss"].clone(), expected.detach(), rtol=1e-12, atol=1e-12, msg=case)
    criterion_that_writes()


def criterion_that_writes() -> None:
    """In a pipeline's loss, where the way of logits is followed."""

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        kept = logits * 2.0
        logits.mul_(3.0)
        return F.cross_entropy(kept, labels)

    batch = zoo.inputs(NAME, batch_size=4, seq_len=13)
    reference, model = zoo.build(NAME), zoo.build(NAME)
    expected = criterion(reference(**batch), batch)
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=2))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer, return_loss=True)
    torch.testing.assert_close(result["loss"], expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = optimizer.gradients()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.timeout(120)
def test_what_is_done_to_logits_before_the_loss() -> None:
    run_ranks(compare_all, 1, timeout=100)


class OutsideTheRoot(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.eps, self.scale = nn.Parameter(torch.ones(8)), 1e-5, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class LooksLikeRMSNorm(OutsideTheRoot):
    pass


class TwoScalesRMSNorm(OutsideTheRoot):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class DetachedRMSNorm(OutsideTheRoot):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach()


def test_norms_that_compute_something_else_stay() -> None:
    others = [LooksLikeRMSNorm(1.0), DetachedRMSNorm(1.0), nn.RMSNorm(8, eps=1e-5, elementwise_affine=False)]
    model = nn.ModuleList([*others, TwoScalesRMSNorm(1.0), TwoScalesRMSNorm(3.0), nn.RMSNorm(8, eps=1e-5)])
    assert fuse_norms(model) == 2
    assert [isinstance(norm, FusedRMSNorm) for norm in model] == [False, False, False, True, False, True]
