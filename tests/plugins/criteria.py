"""Losses as people write them, on a small model whose batch has everything that they ask for.

`RIGHT` are criteria that microbatches and data-parallel ranks must get right, to the last digits, `REFUSED` those that none of them can
compute alone. B is the number of samples, S the length, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, VOCABULARY, CLASSES = 8, 13, 3
Criterion = Callable[[Any, dict[str, Any]], Any]
RIGHT: dict[str, Criterion] = {}
REFUSED: dict[str, Criterion] = {}


def right(criterion: Criterion) -> Criterion:
    RIGHT[criterion.__name__] = criterion
    return criterion


def refused(criterion: Criterion) -> Criterion:
    REFUSED[criterion.__name__] = criterion
    return criterion


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Model(nn.Module):
    """Token logits [B, S, V], class logits [B, C], a score and an embedding per sample; takes whatever else the batch has."""

    _no_split_modules = ["Layer"]
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
        self.classify = nn.Linear(HIDDEN, CLASSES, dtype=torch.float64)
        self.score = nn.Linear(HIDDEN, 1, dtype=torch.float64)

    def forward(self, input_ids: Tensor, **batch: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        pooled = x.mean(1)
        return {
            "logits": self.head(x),
            "classes": self.classify(pooled),
            "score": self.score(pooled).squeeze(-1),
            "hidden": x,
            "pooled": pooled,
        }


def build() -> Model:
    torch.manual_seed(3)
    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7)
    return model


def batch(samples: int, length: int = 7) -> dict[str, Any]:
    """Ragged masks, labels spread unevenly, and rows without any."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (samples, 1), generator=generator)).long()
    labels = torch.where((torch.rand(samples, length, generator=generator) < 0.6) & mask.bool(), ids, -100)
    labels[: samples // 3] = torch.where(torch.arange(length) < 2, ids[: samples // 3], -100)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "weights": torch.rand(samples, length, generator=generator, dtype=torch.float64),
        "sample_weight": torch.rand(samples, generator=generator, dtype=torch.float64),
        "targets": torch.randn(samples, generator=generator, dtype=torch.float64),
        "kinds": torch.randint(0, CLASSES, (samples,), generator=generator),
        "flags": torch.rand(samples, CLASSES, generator=generator, dtype=torch.float64).round(),
        "teacher": torch.randn(samples, length, VOCABULARY, generator=generator, dtype=torch.float64),
        "num_items_in_batch": (labels[:, 1:] != -100).sum(),
    }


def shifted(outputs: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and labels of the next token, flat."""
    return outputs["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()


def token_losses(outputs: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses of all tokens, padding included, and the mask of those that count: [B * (S - 1)]."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="none"), inputs["attention_mask"][:, 1:].flatten().bool()


def logps(outputs: Any, inputs: dict[str, Any]) -> Tensor:
    """Log probability of every sample: [B]."""
    ids, mask = inputs["input_ids"][:, 1:], inputs["attention_mask"][:, 1:]
    each = torch.gather(outputs["logits"][:, :-1].log_softmax(-1), 2, ids.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1)


# Means that torch's functions compute -------------------------------------------------------------------------------------


@right
def cross_entropy(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs))


@right
def cross_entropy_module(outputs, inputs):
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    return loss(outputs["logits"][..., :-1, :].contiguous().view(-1, VOCABULARY), inputs["labels"][..., 1:].contiguous().view(-1))


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
    return F.binary_cross_entropy_with_logits(outputs["classes"], flags, pos_weight=(len(flags) - positive) / positive.clamp(min=1))


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
    return (losses * mask).sum() / mask.sum() + regression + losses.mean() / 7 - outputs["hidden"].square().mean() * 0.01


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
    return F.kl_div(outputs["logits"].log_softmax(-1), inputs["teacher"].log_softmax(-1), reduction="batchmean", log_target=True)


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


# Means by hand --------------------------------------------------------------------------------------------------------------


@right
def selected_mean(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return losses[mask].mean()


@right
def masked_select_mean(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return losses.masked_select(mask).mean()


@right
def selected_sum_over_numel(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    chosen = losses[mask]
    return chosen.sum() / chosen.numel()


@right
def selected_sum_over_len(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    chosen = losses[mask]
    return chosen.sum() / len(chosen)


@right
def selected_sum_over_shape(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    chosen = losses[mask]
    return chosen.sum() / max(chosen.shape[0], 1)


@right
def nonzero_count(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).nonzero().shape[0]


@right
def where_indices(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return losses[torch.where(mask)].mean()


@right
def nonzero_of_two_dims(outputs, inputs):
    rows, columns = (inputs["labels"] != -100).nonzero(as_tuple=True)
    picked = outputs["logits"][rows, columns]
    return F.cross_entropy(picked, inputs["labels"][rows, columns])


@right
def mask_times(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


@right
def mask_times_with_epsilon(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return torch.sum(losses * mask) / (torch.sum(mask) + 1e-8)


@right
def masked_fill(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return losses.masked_fill(~mask, 0.0).sum() / mask.float().sum().double()


@right
def where_mean(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.count_nonzero()


@right
def hand_written_log_softmax(outputs, inputs):
    logps = outputs["logits"][:, :-1].log_softmax(-1)
    targets, mask = inputs["input_ids"][:, 1:], inputs["attention_mask"][:, 1:].bool()
    return -logps.gather(-1, targets[..., None])[..., 0][mask].mean()


@right
def hand_written_from_logsumexp(outputs, inputs):
    logits, labels = outputs["logits"][:, :-1], inputs["labels"][:, 1:]
    safe = labels.clamp(min=0)
    nll = logits.logsumexp(-1) - logits.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    keep = labels.ne(-100)
    return (nll * keep).sum() / keep.sum()


@right
def trainer_label_smoother(outputs, inputs):
    """As the label smoother of transformers' Trainer."""
    logits, labels = outputs["logits"][..., :-1, :].contiguous(), inputs["labels"][..., 1:].contiguous()
    log_probs = -F.log_softmax(logits, dim=-1)
    if labels.dim() == log_probs.dim() - 1:
        labels = labels.unsqueeze(-1)
    padding_mask = labels.eq(-100)
    labels = torch.clamp(labels, min=0)
    nll_loss = log_probs.gather(dim=-1, index=labels)
    smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    nll_loss.masked_fill_(padding_mask, 0.0)
    smoothed_loss.masked_fill_(padding_mask, 0.0)
    num_active_elements = padding_mask.numel() - padding_mask.long().sum()
    nll_loss = nll_loss.sum() / num_active_elements
    smoothed_loss = smoothed_loss.sum() / (num_active_elements * log_probs.shape[-1])
    return (1 - 0.1) * nll_loss + 0.1 * smoothed_loss


@right
def num_items(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs), reduction="sum") / inputs["num_items_in_batch"]


@right
def counted_by_item(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    return F.cross_entropy(logits, labels, reduction="sum") / labels.ne(-100).sum().item()


@right
def counted_by_item_at_least_one(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    return F.cross_entropy(logits, labels, reduction="sum") / max(labels.ne(-100).sum().item(), 1)


@right
def guarded_count(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    valid = (labels != -100).sum()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / valid if valid > 0 else total * 0.0


@right
def token_weights(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    weights = inputs["weights"][:, 1:].flatten()
    return (weights * losses).sum() / weights.sum()


@right
def token_weights_by_dot(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    weights = inputs["weights"][:, 1:].reshape(-1)
    return torch.dot(weights, losses) / weights.sum()


@right
def normalised_weights(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    weights = inputs["weights"][:, 1:].flatten()
    return ((weights / weights.sum()) * losses).sum()


@right
def sample_weights(outputs, inputs):
    losses = F.cross_entropy(outputs["classes"], inputs["kinds"], reduction="none")
    return (losses * inputs["sample_weight"]).mean()


@right
def none_then_mean(outputs, inputs):
    return F.mse_loss(outputs["score"], inputs["targets"], reduction="none").mean()


@right
def per_sample_means(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    losses, mask = losses.view(len(inputs["input_ids"]), -1), mask.view(inputs["input_ids"].shape[0], -1)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


@right
def per_sample_sums_over_batch_size(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return (losses * mask).sum() / inputs["input_ids"].size(0)


@right
def sum_over_numel(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.sum() / losses.numel()


@right
def focal(outputs, inputs):
    losses = F.cross_entropy(outputs["classes"], inputs["kinds"], reduction="none")
    return (0.25 * (1 - torch.exp(-losses)) ** 2 * losses).mean()


@right
def focal_of_tokens(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    active = labels != -100
    return (((1 - (-losses).exp()) ** 2) * losses)[active].mean()


@right
def active_loss(outputs, inputs):
    """Token classification as it was written before -100 was ignored."""
    active = inputs["attention_mask"].view(-1) == 1
    logits = outputs["logits"].view(-1, VOCABULARY)
    labels = torch.where(active, inputs["input_ids"].view(-1), torch.tensor(-100).type_as(inputs["input_ids"]))
    return F.cross_entropy(logits, labels)


@right
def active_logits(outputs, inputs):
    active = inputs["attention_mask"].view(-1) == 1
    return F.cross_entropy(outputs["logits"].view(-1, VOCABULARY)[active], inputs["input_ids"].view(-1)[active])


@right
def labels_changed_in_place(outputs, inputs):
    labels = inputs["input_ids"].clone()
    labels[inputs["attention_mask"] == 0] = -100
    labels[:, 0] = -100
    return F.cross_entropy(outputs["logits"].reshape(-1, VOCABULARY), labels.reshape(-1))


@right
def last_token(outputs, inputs):
    ends = inputs["attention_mask"].sum(-1) - 1
    rows = torch.arange(outputs["logits"].shape[0], device=outputs["logits"].device)
    return F.cross_entropy(outputs["logits"][rows, ends], inputs["kinds"])


@right
def pairs_in_a_sample(outputs, inputs):
    """A reward model's loss where a sample is a pair."""
    chosen, rejected = outputs["classes"][:, 0], outputs["classes"][:, 1]
    return -F.logsigmoid(chosen - rejected).mean()


@right
def policy_gradient(outputs, inputs):
    advantages = inputs["targets"] - inputs["targets"].mean()
    ratio = (logps(outputs, inputs) / 10).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


@right
def einsum_product(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return torch.einsum("bs,bs->", losses.view(-1, 6), inputs["weights"][:, 1:]) / inputs["weights"][:, 1:].sum()


@right
def sum_of_a_list(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return sum([losses[mask].mean(), F.cross_entropy(outputs["classes"], inputs["kinds"])]) / 2


@right
def stack_of_terms(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return torch.stack([losses[mask].mean(), F.mse_loss(outputs["score"], inputs["targets"])]).mean()


@right
def metrics_on_the_side(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).sum().item() / max(1, (labels != -100).sum().item())
    assert isinstance(accuracy, float)
    return loss


@right
def negative_log_of_probabilities(outputs, inputs):
    probabilities = outputs["classes"].softmax(-1)
    return -torch.log(probabilities[torch.arange(len(inputs["kinds"])), inputs["kinds"]] + 1e-9).mean()


@right
def one_hot_targets(outputs, inputs):
    return -(F.one_hot(inputs["kinds"], CLASSES) * outputs["classes"].log_softmax(-1)).sum(-1).mean()


@right
def dice_per_sample(outputs, inputs):
    found, wanted = outputs["classes"].sigmoid(), inputs["flags"]
    return (1 - (2 * (found * wanted).sum(-1) + 1) / (found.sum(-1) + wanted.sum(-1) + 1)).mean()


@right
def cosine_to_a_target(outputs, inputs):
    return (1 - F.cosine_similarity(outputs["logits"].mean(1), inputs["teacher"].mean(1), dim=-1)).mean()


@right
def labels_of_the_batch_changed_in_place(outputs, inputs):
    labels = inputs["labels"]
    labels[:, 0] = 1
    labels += (labels == -100).long() * 99
    return F.cross_entropy(outputs["logits"].reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-1)


@right
def decided_by_a_count(outputs, inputs):
    counted = (inputs["labels"][:, 1:] != -100).sum()
    loss = F.cross_entropy(*shifted(outputs, inputs))
    return 0.5 * loss if counted > 15 and max(counted.item(), 12) > 14 else loss


# What no microbatch can compute -----------------------------------------------------------------------------------------------


@refused
def in_batch_negatives(outputs, inputs):
    embedded = F.normalize(outputs["pooled"], dim=-1)
    scores = embedded @ embedded.T / 0.07
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


@refused
def in_batch_similarity(outputs, inputs):
    one = outputs["pooled"]
    return F.cosine_similarity(one.unsqueeze(1), one.unsqueeze(0), dim=-1).mean()


@refused
def chosen_and_rejected_halves(outputs, inputs):
    chosen, rejected = logps(outputs, inputs).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@refused
def halves_by_slices(outputs, inputs):
    each = logps(outputs, inputs)
    half = each.shape[0] // 2
    return -F.logsigmoid(0.1 * (each[:half] - each[half : 2 * half])).mean()


@refused
def all_pairs_ranking(outputs, inputs):
    difference = outputs["score"][:, None] - outputs["score"][None, :]
    return F.softplus(difference).mean()


@refused
def batch_statistics(outputs, inputs):
    score = outputs["score"]
    return ((score - score.mean()) / score.std()).pow(4).mean()


@refused
def softmax_over_samples(outputs, inputs):
    return -(outputs["score"].log_softmax(0) * inputs["targets"].softmax(0)).sum()


@refused
def correlation(outputs, inputs):
    found, wanted = outputs["score"] - outputs["score"].mean(), inputs["targets"] - inputs["targets"].mean()
    return -(found * wanted).sum() / (found.norm() * wanted.norm())


@refused
def dice_over_the_batch(outputs, inputs):
    found, wanted = outputs["classes"].sigmoid(), inputs["flags"]
    return 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)


@refused
def hardest_tokens(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.topk(5).values.mean()


@refused
def selected_by_the_model(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses[losses > 1.0].mean()


@refused
def weighted_by_the_model(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    weights = torch.exp(-losses.detach())
    return (losses * weights).sum() / weights.sum()


@refused
def computed_targets(outputs, inputs):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), outputs["logits"].argmax(-1).flatten())


@refused
def squared_loss(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)) ** 2


@refused
def perplexity(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)).exp()


@refused
def root_mean_square(outputs, inputs):
    return F.mse_loss(outputs["score"], inputs["targets"]).sqrt()


@refused
def flooded(outputs, inputs):
    return (F.cross_entropy(*shifted(outputs, inputs)) - 0.1).abs() + 0.1


@refused
def worst_sample(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return (losses * mask).view(len(inputs["input_ids"]), -1).sum(1).max()


@refused
def first_sample(outputs, inputs):
    return outputs["score"][0] ** 2


@refused
def loop_over_samples(outputs, inputs):
    return sum(score.square() for score in outputs["score"]) / len(outputs["score"])


@refused
def count_read_by_int(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    return F.cross_entropy(logits, labels, reduction="sum") / int((labels != -100).sum())


@refused
def count_on_the_right_of_a_float(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.sum() * (1.0 / len(losses))


@refused
def count_from_a_size(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.sum() / losses.shape.numel()


@refused
def rolled_samples(outputs, inputs):
    return (outputs["score"] * outputs["score"].roll(1, 0)).mean()


@refused
def windows_over_samples(outputs, inputs):
    return outputs["score"].unfold(0, 2, 1).prod(-1).mean()


@refused
def decided_by_the_loss(outputs, inputs):
    loss = F.cross_entropy(*shifted(outputs, inputs))
    return 0.5 * loss if loss > 2 else loss


@refused
def decided_by_a_number(outputs, inputs):
    loss = F.cross_entropy(*shifted(outputs, inputs))
    return 0.5 * loss if loss.item() > 2 else loss


@refused
def covariance(outputs, inputs):
    centred = outputs["pooled"] - outputs["pooled"].mean(0)
    return (centred.T @ centred / (len(centred) - 1)).square().sum()


@refused
def own_targets_of_the_batch(outputs, inputs):
    scores = torch.cdist(outputs["pooled"], outputs["pooled"])
    return scores.mean()


@refused
def constant_part(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)) + 1.0


@refused
def variance(outputs, inputs):
    return outputs["score"].var()


@refused
def whitened_advantages(outputs, inputs):
    advantages = (inputs["targets"] - inputs["targets"].mean()) / (inputs["targets"].std() + 1e-8)
    return -(logps(outputs, inputs) * advantages).mean()


@refused
def no_outputs(outputs, inputs):
    return inputs["weights"].mean()


@refused
def detached(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)).detach()


@refused
def a_tuple(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)), outputs["logits"]


@refused
def a_python_number(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs)).item()


@refused
def not_a_scalar(outputs, inputs):
    return F.cross_entropy(*shifted(outputs, inputs), reduction="none")


def softmax_over_logits(outputs, inputs):
    return outputs["logits"].log_softmax(0).mean()


# Rows of a batch that belong together in twos: right where no microbatch parts them, else refused.


def interleaved_pairs(outputs, inputs):
    each = logps(outputs, inputs)
    return -F.logsigmoid(0.1 * (each[0::2] - each[1::2])).mean()


def pairs_by_view(outputs, inputs):
    each = logps(outputs, inputs).view(-1, 2)
    return -F.logsigmoid(0.1 * (each[:, 0] - each[:, 1])).mean()


PAIRS = {function.__name__: function for function in (interleaved_pairs, pairs_by_view)}


class Weighted:
    """A loss that cannot be followed, with its weight."""

    def __call__(self, outputs, inputs):
        logits, labels = shifted(outputs, inputs)
        return F.cross_entropy(logits, labels, reduction="sum") / int((labels != -100).sum())

    def weight(self, inputs):
        return (inputs["labels"][:, 1:] != -100).sum()
