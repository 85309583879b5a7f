"""Means and sums that functions of torch compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .model import CLASSES, VOCABULARY, right, shifted, token_losses


@right
def cross_entropy(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs))


@right
def cross_entropy_module(outputs, inputs):
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    return loss(
        outputs["logits"][..., :-1, :].contiguous().view(-1, VOCABULARY),
        inputs["labels"][..., 1:].contiguous().view(-1),
    )


@right
def cross_entropy_by_class_dim(outputs, inputs):
    return F.cross_entropy(outputs["logits"].transpose(1, 2), inputs["labels"])


@right
def smoothed(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs), label_smoothing=0.1)


@right
def weighted_classes(outputs, inputs):
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)
    return F.cross_entropy(*shifted(outputs, inputs), weight=weight)


@right
def summed(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs), reduction="sum")


@right
def summed_by_hand(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return losses[mask].sum()


@right
def classification(outputs, inputs):
    return F.cross_entropy(outputs["classes"], inputs["kinds"])


@right
def multi_label(outputs, inputs):
    return F.binary_cross_entropy_with_logits(outputs["classes"], inputs["flags"])


@right
def multi_label_with_counted_weights(outputs, inputs):
    flags = inputs["flags"]
    positive = flags.sum(0)
    return F.binary_cross_entropy_with_logits(
        outputs["classes"], flags, pos_weight=(len(flags) - positive) / positive.clamp(min=1)
    )


@right
def regression(outputs, inputs):
    return F.mse_loss(outputs["score"], inputs["targets"])


@right
def regression_by_hand(outputs, inputs):
    return ((outputs["score"] - inputs["targets"]) ** 2).mean()


@right
def huber_of_hidden_states(outputs, inputs):
    return F.smooth_l1_loss(outputs["hidden"], torch.zeros_like(outputs["hidden"]))


@right
def nll_of_log_probabilities(outputs, inputs):
    return F.nll_loss(F.log_softmax(outputs["classes"], dim=-1), inputs["kinds"])


@right
def masked_lm_and_next_sentence(outputs, inputs):
    first = F.cross_entropy(outputs["logits"].view(-1, VOCABULARY), inputs["labels"].view(-1))
    return first + F.cross_entropy(outputs["classes"].view(-1, CLASSES), inputs["kinds"].view(-1))


@right
def several_denominators(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    regression = 0.3 * F.l1_loss(outputs["score"], inputs["targets"])
    return (
        (losses * mask).sum() / mask.sum() + regression + losses.mean() / 7 - outputs["hidden"].square().mean() * 0.01
    )


@right
def z_loss(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    lse = logits.logsumexp(-1)
    valid = labels != -100
    return F.cross_entropy(logits, labels) + 1e-2 * (lse.square() * valid).sum() / valid.sum().clamp(min=1)


@right
def z_loss_over_all_tokens(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    return F.cross_entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, dim=-1).pow(2).mean()


@right
def distillation(outputs, inputs):
    student = F.log_softmax(outputs["logits"].view(-1, VOCABULARY) / 2.0, dim=-1)
    teacher = F.softmax(inputs["teacher"].view(-1, VOCABULARY) / 2.0, dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean") * 2.0**2


@right
def distillation_per_sample(outputs, inputs):
    return F.kl_div(
        outputs["logits"].log_softmax(-1), inputs["teacher"].log_softmax(-1), reduction="batchmean", log_target=True
    )


@right
def soft_targets(outputs, inputs):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), inputs["teacher"].softmax(-1).flatten(0, 1))


@right
def margin(outputs, inputs):
    return F.multi_margin_loss(outputs["classes"], inputs["kinds"])


@right
def balanced_classes(outputs, inputs):
    counts = F.one_hot(inputs["kinds"], CLASSES).sum(0)
    weight = counts.sum() / (CLASSES * counts.clamp(min=1).double())
    return F.cross_entropy(outputs["classes"], inputs["kinds"], weight=weight)


@right
def class_weighted_sum_over_weights(outputs, inputs):
    weight = torch.linspace(1, 2, CLASSES, dtype=torch.float64)
    losses = F.cross_entropy(outputs["classes"], inputs["kinds"], weight=weight, reduction="none")
    return losses.sum() / weight[inputs["kinds"]].sum()


@right
def triplets(outputs, inputs):
    return F.triplet_margin_loss(outputs["logits"][:, 0], inputs["teacher"][:, 0], inputs["teacher"][:, 1], margin=3.0)


@right
def triplets_of_tokens(outputs, inputs):
    logits = outputs["logits"]
    return F.triplet_margin_loss(logits, logits.flip(1), logits.roll(1, 1))


@right
def weighted_squares(outputs, inputs):
    return F.mse_loss(outputs["score"], inputs["targets"], weight=inputs["sample_weight"])


@right
def weighted_distances(outputs, inputs):
    """torch hands the weight on to nobody who watches."""
    return F.l1_loss(outputs["score"], inputs["targets"], weight=inputs["sample_weight"])


@right
def quantiles_of_samples(outputs, inputs):
    asked = torch.tensor([0.25, 0.5], dtype=outputs["logits"].dtype)
    return torch.quantile(outputs["logits"][..., 0], asked, dim=1).square().mean()
