"""Losses that no microbatch can compute alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .model import logps, refused, shifted, token_losses


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


@refused
def rows_counted_in_a_list(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.sum() / torch.tensor([row.shape[0] for row in inputs["labels"]], dtype=torch.float64).sum()


@refused
def another_way_for_small_batches(outputs, inputs):
    losses, _ = token_losses(outputs, inputs)
    return losses.sum() if int(inputs["labels"].shape[0]) > 2 else 2 * losses.sum()


@refused
def as_many_tokens_as_samples(outputs, inputs):
    """The first ones, which are those of the first samples only."""
    found = outputs["logits"].flatten(0, 1)
    return found[torch.arange(len(inputs["kinds"])), inputs["kinds"]].mean()


@refused
def gathered_by_the_places_of_others(outputs, inputs):
    """Places among all tokens, of which the first ones are samples, too."""
    where = (inputs["attention_mask"].flatten()[: len(inputs["kinds"])] > 0).nonzero()
    return torch.gather(outputs["score"], 0, where.view(-1)).mean()


@refused
def weighted_by_number(outputs, inputs):
    """Samples are numbered anew in every microbatch."""
    scores = outputs["score"]
    return (scores * torch.arange(len(scores))).sum()


@refused
def every_other_sample(outputs, inputs):
    return outputs["score"][torch.arange(0, outputs["score"].shape[0]) % 2 == 0].sum()


@refused
def numbers_as_targets(outputs, inputs):
    return F.cross_entropy(outputs["logits"][:, 0], torch.arange(outputs["logits"].shape[0]))


@refused
def diagonal(outputs, inputs):
    numbers = torch.arange(outputs["logits"].shape[0])
    return outputs["logits"][:, 0][numbers, numbers].mean()


@refused
def looked_up_by_number(outputs, inputs):
    return (outputs["score"] * torch.linspace(0, 1, 32)[torch.arange(outputs["score"].shape[0])]).mean()


@refused
def places_of_a_mask_as_values(outputs, inputs):
    chosen = inputs["sample_weight"] > 0.4
    return (outputs["score"][chosen] * chosen.nonzero(as_tuple=True)[0]).sum()


@refused
def spread_over_the_batch(outputs, inputs):
    return (outputs["score"] * torch.linspace(0.0, 1.0, outputs["score"].shape[0])).sum()


@refused
def filters_of_samples(outputs, inputs):
    logits = outputs["logits"]
    return F.conv1d(logits.transpose(1, 2), logits[:, :2].transpose(1, 2)).square().mean()


@refused
def rolled_through_all(outputs, inputs):
    return F.mse_loss(outputs["logits"], outputs["logits"].roll(1))


@refused
def turned_round(outputs, inputs):
    return F.mse_loss(outputs["logits"], outputs["logits"].flip(1, 0))


@refused
def standardised_by_hand(outputs, inputs):
    centred = inputs["targets"] - inputs["targets"].mean()
    return F.mse_loss(outputs["score"], centred / (centred.square().mean().sqrt() + 1e-6))


@refused
def distances_between_samples(outputs, inputs):
    first = outputs["logits"][:, 0]
    return torch.cdist(first, first).square().mean()


@refused
def all_products(outputs, inputs):
    return torch.inner(outputs["logits"][:, 0], outputs["logits"][:, 1]).square().mean()


@refused
def centred(outputs, inputs):
    return (outputs["logits"] - outputs["logits"].mean(0)).square().mean()


@refused
def upside_down(outputs, inputs):
    return F.mse_loss(outputs["score"], torch.flipud(outputs["score"]))


@refused
def singular_values(outputs, inputs):
    return torch.linalg.svdvals(outputs["logits"][:, 0]).sum()


@refused
def looked_up_counts(outputs, inputs):
    counts = torch.stack([(inputs["kinds"] == kind).sum() for kind in range(outputs["classes"].shape[1])])
    return (F.cross_entropy(outputs["classes"], inputs["kinds"], reduction="none") / counts[inputs["kinds"]]).mean()


@refused
def numbers_of_found_places(outputs, inputs):
    found = (inputs["labels"] != -100).nonzero()
    rows, columns = found.unbind(1)
    return (outputs["logits"].sum(-1)[rows, columns] * rows).sum()


@refused
def found_places_as_targets(outputs, inputs):
    mask = inputs["labels"] != -100
    return F.mse_loss(outputs["logits"][mask][:, :2], mask.nonzero().to(outputs["logits"].dtype))


@refused
def converted_numbers(outputs, inputs):
    chosen = inputs["kinds"] != 0
    return (outputs["score"][chosen] * chosen.nonzero().squeeze(1).double()).sum()


@refused
def column_of_a_length(outputs, inputs):
    return outputs["logits"][:, inputs["labels"].max().item() % 3].square().mean()


@refused
def as_far_as_the_longest(outputs, inputs):
    return outputs["logits"].topk(int((inputs["labels"] != -100).sum(1).max()), dim=1)[0].mean()


@refused
def weighed_by_a_longest(outputs, inputs):
    return outputs["score"].mean() * (2.0 if int((inputs["labels"] != -100).sum(1).max()) > 4 else 1.0)
