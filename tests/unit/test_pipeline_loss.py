"""The loss of the whole batch from microbatches, on one process: every head, every kind of loss, and what is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import keep_float64, loss_of, zoo

WITHOUT_LOSS = ("base", "encoder", "seq2seq_base", "image_base")
WITH_LOSS = [name for name in zoo.names() if zoo.entry(name).task not in WITHOUT_LOSS]


def build(name: str) -> torch.nn.Module:
    model = zoo.build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def gradients_match(
    name: str, criterion: Callable[..., torch.Tensor] | None, batch: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    reference, model = build(name), build(name)
    executor = PipelineExecutor(cut := cut_model(model, chosen := PipelineSettings(**settings)), chosen)
    assert cut.holds_last_stage
    with keep_float64():
        outputs = reference(**batch)
        loss = outputs.loss if criterion is None else criterion(outputs, batch)
        loss.backward()
        found = executor.execute(
            iter([batch]), criterion, torch.optim.SGD(model.parameters(), lr=0.1), return_outputs=True
        )
    assert abs(float(found["loss"]) - loss.item()) < 1e-12 * max(1.0, abs(loss.item()))
    assert cut.loss_check is not None
    assert all(verdict.followed for verdict in cut.loss_check._verdicts.values()), "not followed before the step"
    for (parameter_name, there), here in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (there.grad is None) == (here.grad is None), parameter_name
        if there.grad is not None:
            torch.testing.assert_close(here.grad, there.grad, rtol=1e-10, atol=1e-12, msg=parameter_name)
    return found


@pytest.mark.parametrize("name", WITH_LOSS)
def test_every_head(name: str) -> None:
    gradients_match(name, lambda outputs, inputs: loss_of(outputs), zoo.inputs(name, batch_size=5), num_microbatches=3)


def test_a_microbatch_without_labels() -> None:
    batch = zoo.inputs("llama-causal-lm", batch_size=4)
    batch["labels"][2:] = -100
    found = gradients_match("llama-causal-lm", None, batch, microbatch_size=2)
    assert found["outputs"].logits.shape[0] == 4
    assert torch.isfinite(found["loss"])


def criteria() -> dict[str, Callable[[Any, Any], torch.Tensor]]:
    def weighted(outputs: Any, inputs: Any) -> torch.Tensor:
        weight = torch.linspace(0.5, 2, outputs.logits.shape[-1], dtype=outputs.logits.dtype)
        return F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), weight=weight, label_smoothing=0.1
        )

    def several(outputs: Any, inputs: Any) -> torch.Tensor:
        logits = outputs.logits
        first = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        second = F.mse_loss(logits, torch.zeros_like(logits))
        third = F.nll_loss(F.log_softmax(logits[:, 0], -1), inputs["input_ids"][:, 0])
        total = torch.stack([first, 0.5 * second]).mean() + third / 3
        total += first
        return total

    def masked(outputs: Any, inputs: Any) -> torch.Tensor:
        active = inputs["attention_mask"].bool()
        return F.binary_cross_entropy_with_logits(
            outputs.logits[..., 0][active], inputs["labels"][active].clamp(0, 1).double()
        )

    def partly(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss + outputs.logits.square().mean()

    def by_hand(outputs: Any, inputs: Any) -> torch.Tensor:
        return OwnWeight()(outputs, inputs)

    return {"weighted": weighted, "several": several, "masked": masked, "partly": partly, "by_hand": by_hand}


@pytest.mark.parametrize("which", list(criteria()))
def test_criteria_of_means(which: str) -> None:
    gradients_match(
        "llama-causal-lm", criteria()[which], zoo.inputs("llama-causal-lm", batch_size=5), num_microbatches=3
    )


def test_without_labels_microbatches_weigh_by_samples() -> None:
    batch = {name: value for name, value in zoo.inputs("llama-causal-lm", batch_size=5).items() if name != "labels"}
    gradients_match(
        "llama-causal-lm", lambda outputs, inputs: outputs.logits.square().mean(), batch, num_microbatches=3
    )


class OwnWeight:
    """A mean written by hand, which says itself how microbatches weigh."""

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        keep = (inputs["labels"] != -100).to(outputs.logits.dtype)
        return (outputs.logits.logsumexp(-1) * keep).sum() / keep.sum()

    def weight(self, inputs: Any) -> torch.Tensor:
        return (inputs["labels"] != -100).sum()


def test_a_criterion_may_bring_its_weight() -> None:
    gradients_match("llama-causal-lm", OwnWeight(), zoo.inputs("llama-causal-lm", batch_size=5), num_microbatches=3)


def run(criterion: Any, name: str = "llama-causal-lm", **settings: Any) -> Any:
    model = build(name)
    chosen = PipelineSettings(**settings)
    executor = PipelineExecutor(cut_model(model, chosen), chosen)
    return executor.execute(
        iter([zoo.inputs(name, batch_size=4)]), criterion, torch.optim.SGD(model.parameters(), lr=0.1)
    )


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs, inputs: outputs.loss**2,  # not linear
        lambda outputs, inputs: outputs.loss.log() + 1.0,
        # computed targets
        lambda outputs, inputs: F.cross_entropy(outputs.logits.flatten(0, 1), outputs.logits.argmax(-1).flatten()),
    ],
)
def test_losses_that_cannot_be_put_together_are_refused(criterion: Any) -> None:
    with pytest.raises(ValueError, match=r"criterion\.weight"):
        run(criterion, num_microbatches=2)
    run(criterion, num_microbatches=1)  # one microbatch is the whole batch


@pytest.mark.parametrize(("samples", "length"), [(64, 9), (320, 3)])
def test_bfloat16_logits_give_the_loss_of_a_reference_in_float32(samples: int, length: int) -> None:
    """Divisors, parts and totals of many microbatches are not rounded to 8 bits."""
    model, reference = (zoo.build("llama-causal-lm", num_hidden_layers=1).to(torch.bfloat16).eval() for _ in range(2))
    batch = {"input_ids": torch.randint(0, 60, (samples, length), generator=torch.Generator().manual_seed(0))}

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())

    def by_hand(outputs: Any, inputs: Any) -> torch.Tensor:
        logps = outputs.logits[:, :-1].float().log_softmax(-1)
        return -logps.gather(-1, inputs["input_ids"][:, 1:, None]).mean()

    expected, count = 0.0, samples * (length - 1)
    for ids in batch["input_ids"].split(1):
        logits = reference(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
        part = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / count
        part.backward()
        expected += part.item()
    there = reference.lm_head.weight.grad.float()
    for each in (criterion, by_hand):
        copied, chosen = copy.deepcopy(model), PipelineSettings(num_microbatches=samples)
        executor = PipelineExecutor(cut_model(copied, chosen), chosen)
        found = executor.execute(iter([batch]), each, torch.optim.SGD(copied.parameters(), lr=0.1))
        assert found["loss"].dtype == torch.float32
        assert abs(float(found["loss"]) - expected) < 1e-5 * expected
        here = copied.lm_head.weight.grad.float()
        assert abs(float((here * there).sum() / there.square().sum()) - 1) < 1e-3


def test_a_criterion_must_return_a_scalar() -> None:
    with pytest.raises(ValueError, match="scalar"):
        run(lambda outputs, inputs: outputs.logits.mean(-1), num_microbatches=1)
    with pytest.raises(ValueError, match="no loss"):
        run(lambda outputs, inputs: None, num_microbatches=1)


def count_call(calls: list[int], index: int, module: torch.nn.Module, args: Any) -> None:
    calls[index] += 1


def test_each_layer_is_recomputed_once() -> None:
    for ratio, expected in ((None, 1), (0.5, 2), (1.0, 2)):
        model = build("llama-causal-lm")
        config = PipelineGradientCheckpointConfig(ratio) if ratio is not None else None
        chosen = PipelineSettings(num_microbatches=2, gradient_checkpoint_config=config)
        calls = [0] * 4
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(partial(count_call, calls, index))
        executor = PipelineExecutor(cut_model(model, chosen), chosen)
        executor.execute(iter([zoo.inputs("llama-causal-lm")]), None, torch.optim.SGD(model.parameters(), lr=0.1))
        recomputed = int((ratio or 0) * 4)
        assert calls == [2 * expected] * recomputed + [2] * (4 - recomputed)


def test_the_models_own_checkpointing_switch_is_honoured() -> None:
    model = build("llama-causal-lm")
    model.gradient_checkpointing_enable()
    cut = cut_model(model, PipelineSettings())
    assert cut.staged.checkpointed.whole == {0: 4}
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
