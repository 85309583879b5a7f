"""What is found out about a loss before it runs: when, how often, and what becomes of criteria that cannot be
followed ahead.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.loss import check
from shardwright.pipeline.settings import PipelineSettings
from tests.plugins import criteria as losses


class Loop:
    """A model trained with three microbatches, beside plain torch."""

    def __init__(self, model: Any = None) -> None:
        self.model = losses.build() if model is None else model
        settings = PipelineSettings(num_microbatches=3)
        self.executor = PipelineExecutor(cut_model(self.model, settings), settings)
        self.check = self.executor.cut.loss_check
        self.judged = 0
        judge = self.check._judge

        def counted(*args: Any) -> Any:
            self.judged += 1
            return judge(*args)

        self.check._judge = counted  # type: ignore[method-assign]

    def step(self, criterion: Any, samples: int = 7, length: int = 7, training: bool = True) -> torch.Tensor:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1) if training else None
        self.model.zero_grad()
        with torch.set_grad_enabled(training):
            return self.executor.execute(iter([losses.batch(samples, length)]), criterion, optimizer)["loss"]

    def compare(self, criterion: Any, samples: int = 7) -> None:
        reference, batch = copy.deepcopy(self.model), losses.batch(samples)
        reference.zero_grad()
        expected = criterion(reference(**batch), batch)
        expected.backward()
        torch.testing.assert_close(self.step(criterion, samples), expected.detach(), rtol=1e-12, atol=1e-12)
        for one, other in zip(self.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_shape_is_judged_once() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(lambda outputs, inputs: losses.means.cross_entropy(outputs, inputs))  # a new function in every step
    assert loop.judged == 2, "microbatches of 3 and of 2 samples"
    loop.step(losses.means.cross_entropy)
    assert loop.judged == 4, "another criterion"
    loop.step(losses.means.cross_entropy, length=8)
    assert loop.judged == 6, "another length"
    loop.step(losses.means.cross_entropy, training=False)
    assert loop.judged == 8, "evaluation"


def test_verdicts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_REMEMBERED", 4)
    loop = Loop()
    for length in range(4, 10):
        loop.step(losses.means.cross_entropy, length=length)
    assert len(loop.check._verdicts) == len(loop.check._held) == 4
    assert not loop.check._alike._known


@pytest.mark.parametrize(
    "criterion", [losses.means.cross_entropy, losses.by_hand.selected_mean, losses.by_hand.per_sample_means]
)
def test_a_model_without_layers_is_followed_from_the_start(criterion: Any) -> None:
    model = losses.build()
    model.layers = model.layers[0]
    type(model.layers).__iter__ = lambda self: iter([self])  # type: ignore[attr-defined]
    try:
        loop = Loop(model)
        assert not loop.executor.cut.staged.units
        loop.compare(criterion)
    finally:
        del type(model.layers).__iter__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["weights_by_position", "last_token", "selected_mean", "per_sample_means", "regression", "multi_label"]
)
def test_microbatches_of_one_sample(name: str) -> None:
    Loop().compare(losses.RIGHT[name], samples=3)


class Kept:
    """Counts its calls and keeps what it measures."""

    def __init__(self) -> None:
        self.calls, self.counts, self.sums = 0, [], []

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        self.calls += 1
        count = (inputs["labels"][:, 1:] != -100).sum()
        self.counts.append(count.item())
        self.sums.append(outputs["score"].sum().item())
        return F.cross_entropy(*losses.shifted(outputs, inputs), reduction="sum") / count.item()


def test_a_criterion_with_state_is_not_touched_by_following_it() -> None:
    loop, criterion = Loop(), Kept()
    loop.step(criterion)
    assert criterion.calls == 3
    assert criterion.counts == [int((part != -100).sum()) for part in losses.batch(7)["labels"][:, 1:].split([3, 2, 2])]


def test_numbers_that_a_criterion_keeps_do_not_keep_the_batch() -> None:
    loop, criterion = Loop(), Kept()
    watched: list[Any] = []
    seen = loop.executor.forward

    def forward(stage: int, received: Any, index: int) -> Any:
        assert loop.executor._step is not None
        watched.append(weakref.ref(loop.executor._step.microbatches[index]["input_ids"]))
        return seen(stage, received, index)

    loop.executor.forward = forward  # type: ignore[method-assign]
    loop.step(criterion)
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3
    assert pickle.loads(pickle.dumps(criterion.counts)) == criterion.counts
    assert {type(value) for value in pickle.loads(pickle.dumps(criterion.counts + criterion.sums))} == {int, float}


def measured(outputs: Any, inputs: Any) -> torch.Tensor:
    """Real numbers are needed on the way, for a metric."""
    assert outputs["logits"].detach().numpy().max() < 1e6
    return losses.by_hand.mask_times(outputs, inputs)


def counted_in_numpy(outputs: Any, inputs: Any) -> torch.Tensor:
    total = F.cross_entropy(*losses.shifted(outputs, inputs), reduction="sum")
    return total / float((inputs["labels"][:, 1:].numpy() != -100).sum())


def test_a_criterion_that_needs_numbers_is_followed_while_it_runs() -> None:
    loop = Loop()
    loop.compare(measured)
    with pytest.raises(ValueError, match="numpy"):
        loop.step(counted_in_numpy)
    loop.compare(losses.means.cross_entropy)


class Reads(losses.model.Model):
    def forward(self, input_ids: torch.Tensor, **batch: Any) -> Any:
        assert input_ids.numpy().min() >= 0
        return super().forward(input_ids, **batch)


def test_a_model_that_needs_numbers_is_followed_while_it_runs() -> None:
    torch.manual_seed(0)
    loop = Loop(Reads())
    loop.compare(losses.by_hand.selected_mean)
    with pytest.raises(ValueError, match=r"criterion\.weight"):
        loop.step(losses.refused.in_batch_negatives)


class Locked(losses.model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_followed_while_it_runs() -> None:
    model, settings = Locked(), PipelineSettings(num_microbatches=3)
    executor = PipelineExecutor(cut_model(model, settings), settings)
    assert executor.cut.loss_check is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = losses.batch(7)
    expected = losses.by_hand.selected_mean(model(**batch), batch).detach()
    torch.testing.assert_close(
        executor.execute(iter([batch]), losses.by_hand.selected_mean, optimizer)["loss"], expected
    )
    with pytest.raises(ValueError, match=r"criterion\.weight"):
        executor.execute(iter([batch]), losses.refused.in_batch_negatives, optimizer)


def test_following_a_loss_draws_no_random_numbers() -> None:
    def noisy(outputs: Any, inputs: Any) -> torch.Tensor:
        return (F.dropout(outputs["score"], 0.3) * torch.rand(outputs["score"].shape[0])).mean()

    loop, state = Loop(), torch.get_rng_state()
    batch = losses.batch(3)
    assert loop.check.check(noisy, [batch], ["key"], True, True)[0].followed
    assert torch.equal(torch.get_rng_state(), state)


def test_a_frozen_model_has_no_loss_to_train() -> None:
    model = losses.build().requires_grad_(False)
    loop = Loop(model)
    with pytest.raises(ValueError, match="does not require grad"):
        loop.step(losses.means.cross_entropy)
    assert torch.isfinite(loop.step(losses.means.cross_entropy, training=False))


@pytest.mark.parametrize("name", list(losses.RIGHT))
def test_evaluation_gives_the_same_loss(name: str) -> None:
    loop, criterion = EVALUATED, losses.RIGHT[name]
    with torch.no_grad():
        batch = losses.batch(7)
        expected = criterion(loop.model(**batch), copy.deepcopy(batch))
    loop.check._verdicts.clear()
    torch.testing.assert_close(loop.step(criterion, training=False), expected, rtol=1e-12, atol=1e-12)
    assert all(verdict.followed for verdict in loop.check._verdicts.values())


EVALUATED = Loop()


class Headed(losses.model.Model):
    """Computes its loss itself, in its forward."""

    criterion: Any = None

    def forward(self, input_ids: torch.Tensor, **batch: Any) -> dict[str, torch.Tensor]:
        outputs = super().forward(input_ids, **batch)
        return {"loss": self.criterion(outputs, {"input_ids": input_ids, **batch}), "logits": outputs["logits"]}


def headed(criterion: Any) -> Headed:
    torch.manual_seed(3)
    model = Headed()
    model.criterion = criterion
    return model


@pytest.mark.parametrize(
    "name",
    [
        "weighted_by_number",
        "every_other_sample",
        "numbers_as_targets",
        "diagonal",
        "looked_up_by_number",
        "filters_of_samples",
        "rolled_through_all",
        "turned_round",
        "standardised_by_hand",
        "distances_between_samples",
        "all_products",
        "centred",
        "upside_down",
        "singular_values",
        "looked_up_counts",
        "in_batch_negatives",
        "batch_statistics",
        "covariance",
        "numbers_of_found_places",
        "found_places_as_targets",
        "converted_numbers",
        "column_of_a_length",
        "as_far_as_the_longest",
        "weighed_by_a_longest",
    ],
)
def test_heads_in_which_samples_meet_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be made that of the whole batch"):
        Loop(headed(losses.REFUSED[name])).step(lambda outputs, inputs: outputs["loss"])


def means_of_kinds_that_are_there(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    chosen = [inputs["kinds"] == kind for kind in range(losses.model.CLASSES)]
    return torch.stack([outputs["score"][mask].mean() for mask in chosen if mask.any()]).mean()


@pytest.mark.parametrize("samples", [3, 5, 7])
def test_a_head_does_what_the_whole_batch_makes_it_do(samples: int) -> None:
    Loop(headed(means_of_kinds_that_are_there)).compare(lambda outputs, inputs: outputs["loss"], samples)


def cut_to_the_longest(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs["logits"][:, : int((inputs["labels"] != -100).sum(1).max())].mean()


def capped_by_an_entry(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs["score"].clamp(max=inputs["targets"].max().item()).mean()


def mapped_over_the_selected(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return torch.vmap(lambda row: row.square().sum())(outputs["logits"][inputs["labels"] != -100]).mean()


def mapped_over_features(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return torch.vmap(lambda column: column.mean().square(), in_dims=1)(outputs["pooled"]).mean()


def sum_of_means_of_kinds(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return sum(outputs["score"][inputs["kinds"] == kind].mean() for kind in inputs["kinds"].unique())  # type: ignore


def over_the_number_of_kinds(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs["score"].sum() / len(inputs["kinds"].unique())


@pytest.mark.parametrize("samples", [3, 4, 7])
@pytest.mark.parametrize(
    "criterion",
    [
        cut_to_the_longest,
        capped_by_an_entry,
        mapped_over_the_selected,
        mapped_over_features,
        sum_of_means_of_kinds,
        over_the_number_of_kinds,
    ],
)
def test_heads_that_values_of_a_microbatch_steer_are_refused(criterion: Any, samples: int) -> None:
    with pytest.raises(ValueError, match="cannot be made that of the whole batch"):
        Loop(headed(criterion)).step(lambda outputs, inputs: outputs["loss"], samples)


def test_a_length_that_the_second_run_does_not_have_is_refused_before_the_step() -> None:
    loop = Loop()
    with pytest.raises(ValueError, match=r"enters topk\(\)"):
        loop.step(losses.REFUSED["as_far_as_the_longest"])


def mapped_over_samples(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return torch.vmap(lambda row: row.logsumexp(0))(outputs["classes"]).mean()


def first_places(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return outputs["logits"][:, :3].topk(3, dim=2)[0].mean()


@pytest.mark.parametrize("samples", [3, 4, 7])
@pytest.mark.parametrize("criterion", [mapped_over_samples, first_places])
def test_heads_with_numbers_of_their_own_are_right(criterion: Any, samples: int) -> None:
    Loop(headed(criterion)).compare(lambda outputs, inputs: outputs["loss"], samples)
