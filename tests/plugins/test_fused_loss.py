"""Losses without logits, as `HybridParallelPlugin` has them by default: against one process, in layouts that differ in
who holds the head and when its gradients are computed; what becomes of logits that somebody reads; and the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_ranks import Layout, run_layout
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright import Booster
from shardwright.kernels import lazy_logits, linear_cross_entropy
from shardwright.kernels.lazy_logits import LazyLogits
from shardwright.ops.vocab_mode import whole_logits
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import keep_float64, run_ranks, zoo
from shardwright.testing.live_bytes import LiveBytes
from shardwright.utils.device import planning_for

NAME = "llama-causal-lm"
WIDE = 4096  # words of a vocabulary that makes logits the largest tensor of a step
LAYOUTS = [  # vocabularies of 101, which no number of ranks divides
    Layout(NAME, 2, {"tp_size": 2}, calls=True),
    Layout("gpt2-causal-lm", 2, {"tp_size": 2}, steps=2),
    Layout("llama-tied-causal-lm", 2, {"pp_size": 2, "num_microbatches": 3, "pp_style": "zb"}, steps=2),
    Layout(NAME, 2, {"zero_stage": 3}, calls=True, steps=2),
    Layout("llama-biased-causal-lm", 2, {"pp_size": 2, "num_microbatches": 2, "zero_stage": 2}, steps=2),
]


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many tokens every loss without logits was of, seven at a time."""
    found: list[int] = []
    usual = linear_cross_entropy.CHUNK_BYTES.copy()
    linear_cross_entropy.CHUNK_BYTES.update(dict.fromkeys(usual, 7 * 4 * 101))
    plain = lazy_logits.linear_cross_entropy

    def count(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(len(x))
        return plain(x, *args, **kwargs)

    lazy_logits.linear_cross_entropy = count
    try:
        yield found
    finally:
        lazy_logits.linear_cross_entropy = plain
        linear_cross_entropy.CHUNK_BYTES.update(usual)


def train_all(rank: int, world: int, device_type: str, layouts: list[Layout]) -> list[int]:
    losses = []
    for layout in layouts:
        with counted() as found, planning_for(device_type):
            run_layout(rank, world, layout)
        losses.append(len(found))
    return losses


@pytest.mark.parametrize(
    ("device_type", "layouts"),
    [("cpu", LAYOUTS), ("cuda", LAYOUTS[2:])],
    ids=["as they are", "heads with more rows, as on a GPU"],
)
def test_layouts_equal_one_process(device_type: str, layouts: list[Layout]) -> None:
    first, last = run_ranks(train_all, 2, device_type, layouts, timeout=120)
    pipelined = [layout.plugin.get("pp_size", 1) > 1 for layout in layouts]
    assert all(last)
    assert [not number for number in first] == pipelined, "losses of stages that have no head"


class Smoothed:
    """A criterion of a script's own, for which the logits are computed."""

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        logits = outputs.logits[..., :-1, :].contiguous()
        labels = inputs["labels"][..., 1:].contiguous()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), label_smoothing=0.1)


class Capped(nn.Module):
    """A head with a soft cap and a scale, as Gemma2's and Cohere's are, after the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def get_output_embeddings(self) -> Any:
        return self.model.lm_head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden = self.model.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        logits = self.model.lm_head(hidden) * 0.7
        logits = torch.tanh(logits / 0.5) * 0.5
        kept = labels != -100
        return {"loss": F.cross_entropy(logits[kept].float(), labels[kept], reduction="sum"), "logits": logits}


@keep_float64()
def other_losses(rank: int, world: int) -> None:
    for case, build in {
        "a criterion": lambda: zoo.build(NAME),
        "capped": lambda: Capped(zoo.build(NAME)),
    }.items():
        batch = zoo.inputs(NAME, batch_size=4, seq_len=13)
        reference, model = build(), build()
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=2))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        criterion = Smoothed() if case == "a criterion" else lambda outputs, inputs: outputs["loss"]
        expected = criterion(reference(**batch), batch)
        expected.backward()
        with counted() as found, pytest.MonkeyPatch.context() as patch:
            if case == "capped":
                patch.setattr(lazy_logits._Source, "computed", None)
            result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        assert len(found) == 2, "of both microbatches, by the model"
        torch.testing.assert_close(result["loss"], expected.detach(), rtol=1e-12, atol=1e-12)
        gradients = optimizer.gradients()
        for name, param in reference.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-10, atol=1e-12, msg=f"{case}: {name}")


def test_a_criterion_of_logits_and_a_capped_head() -> None:
    run_ranks(other_losses, 1)


@keep_float64()
def read_logits(rank: int, world: int, settings: dict[str, Any]) -> None:
    reference, model = zoo.build(NAME), zoo.build(NAME)
    batch = zoo.inputs(NAME, batch_size=4, seq_len=13)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **settings))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    linear_cross_entropy.CHUNK_BYTES["cpu"] = 7 * 4 * 101

    def loss_of(outputs: Any) -> torch.Tensor:
        """With a term of the logits, which have been left out of the loss."""
        return outputs.loss + outputs.logits.logsumexp(-1).square().mean()

    expected = reference(**batch)
    loss_of(expected).backward()
    outputs = model(**batch)
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits.shape == expected.logits.shape
    assert outputs.logits.requires_grad
    loss = loss_of(outputs)
    booster.backward(loss, optimizer)
    torch.testing.assert_close(loss.detach(), loss_of(expected).detach(), rtol=1e-10, atol=1e-10)
    gradients = optimizer.gradients()
    if not settings.get("tp_size"):
        for name, param in reference.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-10, atol=1e-10)
    kept = model(**batch).logits.detach()
    late = model(**batch)
    watched = model(**batch)
    with pytest.raises(ValueError, match=r"retain_grad\(\) of logits whose loss was computed without them"):
        watched.logits.retain_grad()
    with pytest.raises(ValueError, match="enable_fused_cross_entropy=False"):
        torch.autograd.grad(watched.loss, watched.logits)
    assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))
    optimizer.step()
    torch.testing.assert_close(whole_logits(kept), expected.logits.detach(), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"read outputs.logits before optimizer.step\(\), or enable_fused"):
        late.logits.argmax(-1)
    unlabelled = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    assert not isinstance(unlabelled, LazyLogits)
    off = Booster(plugin=HybridParallelPlugin(precision="fp32", enable_fused_cross_entropy=False, **settings))
    plain = zoo.build(NAME)
    boosted, *_ = off.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert not isinstance(boosted(**batch).logits, LazyLogits)
    linear_cross_entropy.CHUNK_BYTES["cpu"] = 4 * 13 * 4 * 101
    assert not isinstance(model(**batch).logits, LazyLogits), "there is nothing to gain"


@pytest.mark.parametrize("settings", [{}, {"tp_size": 2}], ids=["alone", "tp2"])
def test_logits_are_there_for_those_who_read_them(settings: dict[str, Any]) -> None:
    run_ranks(read_logits, settings.get("tp_size", 1), settings)


class Largest(LiveBytes):
    """Also the most bytes of any one tensor that an operator has returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        sizes = [leaf.nbytes for leaf in made if not leaf.is_meta and not isinstance(leaf, LazyLogits)]
        self.largest = max([self.largest, *sizes])
        return result


def measure(rank: int, world: int, fused: bool) -> tuple[int, int]:
    """(most bytes of a step beyond what lasts, those of the largest tensor), under fp32."""
    model = zoo.build(NAME, dtype=torch.float32, vocab_size=WIDE)
    batch = zoo.inputs(NAME, batch_size=8, seq_len=64, vocab_size=WIDE)
    plugin = HybridParallelPlugin(precision="fp32", tp_size=world, enable_fused_cross_entropy=fused)
    booster = Booster(plugin=plugin)
    with Largest() as live, pytest.MonkeyPatch.context() as patch:
        patch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 16 * WIDE * 4 // world)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            live.largest = 0
            booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()

        kept, most = live.of_steps(step)
    return most - kept, live.largest


@pytest.mark.parametrize("world", [1, 2])
def test_no_rank_ever_holds_logits(world: int) -> None:
    logits = 8 * 64 * WIDE * 4 // world
    plain, fused = (run_ranks(measure, world, wanted)[0] for wanted in (False, True))
    assert plain[1] >= logits
    assert fused[1] < logits / 4, (fused, logits)
    assert plain[0] - fused[0] > 1.5 * logits, (plain, fused, logits)
