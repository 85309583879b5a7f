"""Mistakes in losses and criteria that only show when a batch is split over microbatches, stages or data-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from tests.plugins import criteria as losses

from .table import mistake, refused

HOW = r"criterion\.weight\(inputs\) -> number"


def job(world: int, **options: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """step(criterion) on this number of ranks with two microbatches, and the batch of this rank."""
    plugin = HybridParallelPlugin(precision="fp32", pp_size=min(world, 2), num_microbatches=2)
    booster = Booster(plugin=plugin)
    model = losses.build().float()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {key: value.float() if value.is_floating_point() else value for key, value in losses.batch(4).items()}

    def step(criterion: Any, **arguments: Any) -> Any:
        found = booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer, **arguments)["loss"]
        optimizer.zero_grad()
        return found

    return step, batch


def answers(step: Callable[..., Any], criterion: Any) -> None:
    """The fix works."""
    found = step(criterion)
    assert found is None or torch.isfinite(found)


class InBatch:
    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return losses.refused.in_batch_negatives(outputs, inputs)

    def weight(self, inputs: Any) -> int:
        return len(inputs["input_ids"])


@mistake(
    symptom="a contrastive loss whose negatives are the other samples of the batch, with microbatches or data-parallel "
    "ranks",
    gets="refused on every rank before the step: no microbatch sees all samples",
    fix="give the criterion `weight(inputs)` if negatives of the microbatch alone will do; else one microbatch on one "
    "data-parallel rank",
)
def in_batch_negatives(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("brings samples of the batch together", HOW):
        step(losses.refused.in_batch_negatives)
    answers(step, InBatch())


@mistake(
    symptom="DPO or a reward loss on a batch whose first half is chosen and whose second half is rejected",
    gets="refused on every rank: the halves of a microbatch are not those of the batch",
    fix="make a pair one sample, `[pairs, 2, length]`, or let pairs be neighbours (`x[0::2]`, `x[1::2]`) in "
    "microbatches of even size",
)
def halves_of_a_batch(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("halves, pairs", HOW):
        step(losses.refused.chosen_and_rejected_halves)
    answers(step, losses.pairs.interleaved_pairs)


@mistake(
    symptom="the criterion returns `(loss, metrics)`",
    gets="refused on every rank before anything is sent",
    fix="return the loss alone; keep metrics on the side, or ask for them with `return_outputs=True`",
)
def tuple_from_the_criterion(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("no loss: the criterion returned tuple", "only thing"):
        step(losses.refused.a_tuple)
    answers(step, losses.by_hand.metrics_on_the_side)


@mistake(
    symptom="the criterion returns `loss.item()`",
    gets="refused on every rank: a number has no gradient",
    fix="return the tensor",
)
def number_from_the_criterion(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("no loss: the criterion returned float"):
        step(losses.refused.a_python_number)


@mistake(
    symptom="`execute_pipeline` without a criterion, and a batch without labels",
    gets="refused on every rank: the model has computed no loss",
    fix="put `labels` into the batch, pass a criterion, or evaluate with `return_loss=False`",
)
def no_labels(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("no loss: the model returned NoneType", "labels"):
        step(None)


@mistake(
    symptom="the criterion returns one loss per token or sample (`reduction='none'`)",
    gets="refused on every rank with the shape",
    fix="end it with `.mean()` or `.sum()`",
)
def loss_of_several_elements(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("must be a scalar", r"\.mean\(\)"):
        step(losses.refused.not_a_scalar)
    answers(step, losses.by_hand.none_then_mean)


@mistake(
    symptom="the criterion computes under `torch.no_grad()` or detaches the loss",
    gets="refused on every rank before the step",
    fix="return the loss with its gradient; leave the optimizer out of `execute_pipeline` to evaluate",
)
def loss_without_gradient(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("does not require grad|the same number for every batch|without the model's outputs"):
        step(losses.refused.detached)


@mistake(
    symptom="a masked mean written by hand: `(losses * mask).sum() / mask.sum()`, `losses[mask].mean()`",
    gets="the mean over the tokens of the whole batch, whatever microbatches hold",
    fix="nothing to do",
)
def masked_mean_by_hand(rank: int, world: int) -> None:
    step, batch = job(world)
    whole = losses.build().float()
    for criterion in (
        losses.by_hand.mask_times,
        losses.by_hand.selected_mean,
        losses.by_hand.masked_select_mean,
        losses.by_hand.selected_sum_over_numel,
    ):
        found = step(criterion)
        if found is not None:
            expected = criterion(whole(**batch), batch).detach()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@mistake(
    symptom="a mean over tokens that the model's own outputs select or weigh (`losses[losses > 1].mean()`)",
    gets="refused on every rank: how many there are in other microbatches cannot be known ahead",
    fix="select by something in the batch, divide by a number that is the same everywhere, or give the criterion "
    "`weight(inputs)`",
)
def selected_by_the_model(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("number in other microbatches is unknown", HOW):
        step(losses.refused.selected_by_the_model)


@mistake(
    symptom="a loss that is no sum over samples: `loss ** 2`, `loss.exp()`, `mse.sqrt()`, `(loss - b).abs() + b`",
    gets="refused on every rank with the function that is to blame",
    fix="give the criterion `weight(inputs)`: then microbatches are averaged after that function",
)
def not_a_sum_over_samples(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("exp of a sum over samples", HOW):
        step(losses.refused.perplexity)


@mistake(
    symptom="a penalty on parameters added to the loss",
    gets="refused on every rank: it would count once per microbatch; a constant is shared by the samples of the batch",
    fix="use the optimizer's `weight_decay`, or give the criterion `weight(inputs)`",
)
def penalty_on_parameters(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("adds a parameter to the loss", HOW):
        step(losses.loops.learned_part)
    answers(step, losses.loops.constant_part)


@mistake(
    symptom="a criterion that cuts at the longest sequence (`x[:, : int(lengths.max())]`), or divides by "
    "`len(labels.unique())`",
    gets="refused on every rank: the number is another one in every microbatch",
    fix="leave the padding in, and mask it; take a count from the whole batch with `torch.bincount(labels, "
    "minlength=n)`",
)
def number_of_a_microbatch(rank: int, world: int) -> None:
    step, _ = job(world)
    for criterion in (losses.loops.cut_at_the_longest, losses.loops.over_the_number_of_classes_seen):
        with refused("Python number that depends on the batch", HOW):
            step(criterion)
    answers(step, losses.loops.balanced_by_bincount)


@mistake(
    symptom="a mean inside `torch.utils.checkpoint` in the criterion",
    gets="refused on every rank: the second run in backward would divide by the count of the microbatch",
    fix='return the sum (`reduction="sum"`) from the checkpointed function, and divide outside',
)
def mean_under_checkpoint(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("divide outside", HOW):
        step(losses.loops.checkpointed_mean)
    answers(step, losses.loops.checkpointed_sum)


@mistake(
    symptom="a token count that the criterion reads with `int(...)`, or `total * (1.0 / n)`",
    gets="refused on every rank: what becomes of the number cannot be followed",
    fix="divide by the tensor, by `.item()`, by `x.shape[0]` or by `len(x)`: `total / labels.ne(-100).sum()`",
)
def count_read_by_int(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("Python number that depends on the batch", r"\.item\(\)"):
        step(losses.refused.count_read_by_int)
    with refused("Python number that depends on the batch"):
        step(losses.refused.count_on_the_right_of_a_float)
    answers(step, losses.by_hand.counted_by_item)
    answers(step, losses.by_hand.selected_sum_over_len)


class BadWeight:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return F.cross_entropy(*losses.shifted(outputs, inputs))

    def weight(self, inputs: Any) -> Any:
        return self.value


@mistake(
    symptom="`criterion.weight(inputs)` returns a negative number, NaN, a tensor of several elements, or nothing",
    gets="refused on every rank with what it returned",
    fix="return one number per microbatch, such as `(inputs['labels'] != -100).sum()`",
)
def weight_that_is_none(rank: int, world: int) -> None:
    step, _ = job(world)
    for value in (-1, float("nan"), torch.tensor(float("inf")), torch.tensor([1.0, 2.0]), None, "3", True):
        with refused(r"criterion\.weight\(inputs\) returned"):
            step(BadWeight(value))


@mistake(
    symptom="`criterion.weight(inputs)` returns 0 for every microbatch",
    gets="refused: a mean over nothing",
    fix="leave such a batch out",
    worlds=(1, 2),
)
def weights_of_zero(rank: int, world: int) -> None:
    step, _ = job(world)
    with refused("0 for every microbatch"):
        step(BadWeight(0))


@mistake(
    symptom="neighbouring rows of the batch are pairs, and a microbatch has an odd number of them",
    gets="refused on every rank before the step",
    fix="choose `microbatch_size` or `num_microbatches` so that microbatches have an even number of samples",
)
def odd_pairs(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", pp_size=min(world, 2), microbatch_size=3))
    model = losses.build()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for criterion, text in (
        (losses.pairs.interleaved_pairs, "groups of 2"),
        (losses.pairs.pairs_by_view, "parts them"),
    ):
        with refused(text):
            booster.execute_pipeline(iter([losses.batch(6)]), boosted, criterion, optimizer)
