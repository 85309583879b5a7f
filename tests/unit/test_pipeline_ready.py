"""Ready-made microbatches of unequal lengths in one process: every kind of count, and how objects are shared and
copied.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwright
from shardwright.pipeline.batch.ready import Microbatches, as_microbatches
from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import keep_float64, zoo

NAME = "llama-causal-lm"
CLASS_WEIGHTS = torch.linspace(0.5, 2, 101, dtype=torch.float64)


def made() -> list[dict[str, Any]]:
    return [zoo.inputs(NAME, batch_size=b, seq_len=s, seed=b) for b, s in ((2, 13), (3, 9), (1, 17), (3, 9))]


def of_the_model(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss


def masked(outputs: Any, inputs: Any) -> torch.Tensor:
    counted = inputs["labels"][:, 1:] != -100
    losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none")
    return losses[counted].mean()


def weighted_by_class(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), weight=CLASS_WEIGHTS
    )


def over_everything(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.logits.square().mean()


def by_length(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.logits.square().sum() / (outputs.logits.shape[0] * outputs.logits.shape[1])


def label_tokens(inputs: Any) -> float:
    return float((inputs["labels"][:, 1:] != -100).sum())


def label_weights(inputs: Any) -> float:
    labels = inputs["labels"][:, 1:]
    return float(CLASS_WEIGHTS[labels[labels != -100]].sum())


def tokens(inputs: Any) -> float:
    return float(inputs["input_ids"].numel())


def compare(criterion: Any, count: Any, **settings: Any) -> None:
    reference, model = zoo.build(NAME), zoo.build(NAME)
    chosen = PipelineSettings(**settings)
    executor = PipelineExecutor(cut_model(model, chosen), chosen)
    loss, total = 0.0, sum(count(microbatch) for microbatch in made())
    for microbatch in made():
        part = criterion(reference(**microbatch), microbatch) * count(microbatch) / total
        part.backward()
        loss += part.item()
    found = executor.execute(iter([Microbatches(made())]), criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    assert abs(float(found["loss"]) - loss) < 1e-12
    for (name, there), here in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("criterion", "count"),
    [
        (of_the_model, label_tokens),
        (masked, label_tokens),
        (weighted_by_class, label_weights),
        (over_everything, tokens),
        (by_length, tokens),
    ],
)
@keep_float64()
def test_counts(criterion: Any, count: Any) -> None:
    compare(criterion, count, microbatch_size=3)
    compare(criterion, count)  # nobody was told that there would be several


@keep_float64()
def test_class_weights_of_the_step_are_counted_with() -> None:
    """What is known of a criterion is kept from step to step; the numbers of the tensors that it holds are not."""
    model = zoo.build(NAME)
    executor = PipelineExecutor(cut_model(model, PipelineSettings()), PipelineSettings())
    losses = []
    for weights in (CLASS_WEIGHTS, CLASS_WEIGHTS.flip(0)):

        def criterion(outputs: Any, inputs: Any, weights: torch.Tensor = weights) -> torch.Tensor:
            return F.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), weight=weights
            )

        given = made()
        losses.append(float(executor.execute(iter([Microbatches(given)]), criterion)["loss"]))
        labels = [microbatch["labels"][:, 1:] for microbatch in given]
        counts = [float(weights[each[each != -100]].sum()) for each in labels]
        expected = sum(
            criterion(model(**microbatch), microbatch) * count for microbatch, count in zip(given, counts, strict=True)
        )
        assert abs(losses[-1] - expected.item() / sum(counts)) < 1e-12
    assert abs(losses[0] - losses[1]) > 1e-3


def test_what_several_hold_stays_one_object_and_the_users_tensors_are_not_written_to() -> None:
    common = torch.ones(1, 4)
    given = Microbatches(
        [{"input_ids": torch.zeros(2, 4), "row": common}, {"input_ids": torch.zeros(1, 6), "row": common}]
    )
    batch, parts = as_microbatches(given, None, None, torch.device("cpu"))
    assert parts[0]["row"] is parts[1]["row"]
    parts[0]["input_ids"].fill_(1)
    assert not given[0]["input_ids"].any()
    assert not batch[0]["input_ids"].any()


def test_a_loader_may_make_them() -> None:
    given = Microbatches(made())
    for other in (copy.copy(given), pickle.loads(pickle.dumps(given))):  # as worker processes and pinning do
        assert type(other) is shardwright.Microbatches
        assert len(other) == 4
