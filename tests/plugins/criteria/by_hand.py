"""Means and sums written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .model import CLASSES, VOCABULARY, logps, right, shifted, token_losses


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
def nonzero_as_one_tensor(outputs, inputs):
    rows, columns = (inputs["labels"] != -100).nonzero().T
    picked = outputs["logits"][rows, columns]
    return F.cross_entropy(picked, inputs["labels"][rows, columns]) + 0.1 * (picked.sum(-1) * columns).mean()


@right
def nonzero_column_by_column(outputs, inputs):
    found = (inputs["labels"] != -100).nonzero().long()
    return outputs["logits"][found[:, 0], found[:, 1]].square().mean()


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
def weights_by_position(outputs, inputs):
    """One row for all samples of the batch."""
    losses, _ = token_losses(outputs, inputs)
    weights = inputs["shared"][:, 1:]
    return (losses.view(-1, 6) * weights).sum() / (weights.sum() * inputs["input_ids"].shape[0])


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
def grid_of_samples_and_places(outputs, inputs):
    """As transformers' masks index: samples [n, 1] beside places [1, 3]."""
    rows = torch.arange(outputs["logits"].shape[0], device=outputs["logits"].device)[:, None]
    places = torch.arange(3, device=rows.device)[None, :]
    return F.cross_entropy(outputs["logits"][rows, places][:, -1], inputs["kinds"])


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
def gathered_where_labelled(outputs, inputs):
    """As DeBERTa leaves out samples without a label."""
    where = (inputs["sample_weight"] > 0.4).nonzero()
    classes = torch.gather(outputs["classes"], 0, where.expand(where.size(0), outputs["classes"].size(1)))
    return F.cross_entropy(classes.view(-1, classes.size(1)), torch.gather(inputs["kinds"], 0, where.view(-1)))


@right
def one_column_of_every_token(outputs, inputs):
    """Several rows of each sample, numbered all together."""
    found = outputs["logits"].flatten(0, 1)
    rows = torch.arange(found.shape[0], device=found.device)
    return found[rows, inputs["input_ids"].flatten()].square().mean()


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
