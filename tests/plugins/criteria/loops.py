"""Losses that are put together one by one: by loops over samples, and by sums that begin with something."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .model import CLASSES, refused, right, shifted, token_losses


@right
def loop_over_samples(outputs, inputs):
    return sum(score.square() for score in outputs["score"]) / len(outputs["score"])


@right
def loop_over_indices(outputs, inputs):
    each = []
    for index in range(outputs["logits"].shape[0]):
        active = inputs["labels"][index] != -100
        each.append(F.cross_entropy(outputs["logits"][index][active], inputs["labels"][index][active]))
    return torch.stack(each).mean() + 0.5


@right
def loop_over_pairs(outputs, inputs):
    loss = 0.0
    for found, wanted in zip(outputs["classes"], inputs["kinds"], strict=True):
        loss += F.cross_entropy(found, wanted)
    return loss / outputs["classes"].shape[0]


@right
def selective_log_softmax(outputs, inputs):
    """One sample after another, to hold less memory at its peak, as in TRL."""
    logits, ids, mask = outputs["logits"][:, :-1], inputs["input_ids"][:, 1:], inputs["attention_mask"][:, 1:]
    selected = torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1)
    normalizers = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return -((selected - normalizers) * mask).sum() / mask.sum()


@right
def up_to_the_end_of_each(outputs, inputs):
    ends = inputs["attention_mask"].sum(1)
    return torch.stack([row[:end].mean() for row, end in zip(outputs["hidden"], ends, strict=True)]).mean()


@right
def accumulated_from_zeros(outputs, inputs):
    loss = torch.zeros(1, dtype=torch.float64)
    loss += F.cross_entropy(*shifted(outputs, inputs))
    other = outputs["score"].new_zeros(()) + 0.1 * F.mse_loss(outputs["score"], inputs["targets"])
    return (loss + (torch.zeros_like(other) + other)).squeeze()


@right
def constant_part(outputs, inputs):
    return (
        1
        - F.cosine_similarity(outputs["pooled"], outputs["hidden"][:, 0]).mean()
        + torch.tensor(2.0, dtype=torch.float64)
    )


@right
def tasks_weighed_by_dot(outputs, inputs):
    tasks = torch.stack([F.cross_entropy(*shifted(outputs, inputs)), F.mse_loss(outputs["score"], inputs["targets"])])
    return torch.tensor([0.3, 0.7], dtype=torch.float64) @ tasks


@right
def weights_filled_in(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    losses, weights = losses.view(-1, 6), torch.ones_like(losses.view(-1, 6))
    weights[inputs["input_ids"][:, 1:] == 3] = 5.0
    weights = weights * mask.view(-1, 6)
    return (losses * weights).sum() / weights.sum()


@right
def balanced_by_bincount(outputs, inputs):
    counts = torch.bincount(inputs["kinds"], minlength=CLASSES).to(outputs["classes"].dtype)
    return F.cross_entropy(outputs["classes"], inputs["kinds"], weight=1 / counts.clamp(min=1))


@right
def selected_by_index_select(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    kept = (labels != -100).nonzero().squeeze(-1)
    return F.cross_entropy(logits.index_select(0, kept), labels.index_select(0, kept))


@right
def weighted_out_of_a_table(outputs, inputs):
    table = torch.linspace(0.5, 2.0, 384, dtype=outputs["logits"].dtype).view(3, 128)
    weights = table.index_select(1, inputs["input_ids"].view(-1)).view(3, *inputs["input_ids"].shape)[1]
    return (outputs["logits"].square().mean(-1) * weights).mean()


@right
def connectionist(outputs, inputs):
    """Targets of their own lengths, whose mean is one over targets, then over samples."""
    log_probs = outputs["logits"].log_softmax(-1).transpose(0, 1)
    lengths = (inputs["labels"][:, :3] > 0).sum(-1).clamp(min=1)
    frames = inputs["attention_mask"].sum(1).clamp(min=6)
    losses = [
        F.ctc_loss(log_probs, inputs["input_ids"][:, :3], frames, lengths, reduction=reduction, zero_infinity=True)
        for reduction in ("mean", "sum", "none")
    ]
    return losses[0] + losses[1] / 7 + losses[2].mean()


@right
def checkpointed_sum(outputs, inputs):
    logits, labels = shifted(outputs, inputs)
    total = checkpoint(lambda x, y: F.cross_entropy(x, y, reduction="sum"), logits, labels, use_reentrant=False)
    return total / (labels != -100).sum()


@right
def guarded_against_nothing(outputs, inputs):
    """Some microbatches have none: all of them do what the whole batch makes them do."""
    kept = (inputs["kinds"] == 1) & (inputs["sample_weight"] > 0.4)
    if not kept.any():
        return outputs["classes"].sum() * 0
    chosen = outputs["score"][kept]
    if chosen.numel() == 0 or not chosen.shape[0]:
        return outputs["score"].sum() * 0
    return F.cross_entropy(outputs["classes"][kept], inputs["kinds"][kept]) + chosen.mean()


@right
def lists_for_metrics(outputs, inputs):
    """What is read for a metric changes nothing."""
    assert len(set(inputs["kinds"].tolist())) < 1000
    return F.cross_entropy(outputs["classes"], inputs["kinds"])


@refused
def checkpointed_mean(outputs, inputs):
    losses, mask = token_losses(outputs, inputs)
    return checkpoint(lambda x, y: (x * y).sum() / y.sum(), losses, mask, use_reentrant=False)


@refused
def cut_at_the_longest(outputs, inputs):
    longest = int(inputs["attention_mask"].sum(1).max())
    return F.cross_entropy(outputs["logits"][:, : longest - 1].flatten(0, 1), inputs["labels"][:, 1:longest].flatten())


@refused
def masked_up_to_the_longest(outputs, inputs):
    mask = torch.arange(7) < int(inputs["attention_mask"].sum(1).max())
    return (outputs["hidden"].mean(-1) * mask).sum() / (mask.sum() * len(outputs["hidden"]))


@refused
def over_the_number_of_classes_seen(outputs, inputs):
    return F.cross_entropy(outputs["classes"], inputs["kinds"]) / len(inputs["kinds"].unique())


@refused
def over_the_size_of_a_set(outputs, inputs):
    return F.cross_entropy(outputs["classes"], inputs["kinds"]) / len(set(inputs["kinds"].tolist()))


@refused
def first_sample_counts_twice(outputs, inputs):
    return sum(score.square() * (2 if index == 0 else 1) for index, score in enumerate(outputs["score"]))


@refused
def begun_with_a_constant(outputs, inputs):
    return sum((score.square() for score in outputs["score"]), start=3.0)


@refused
def all_but_the_first(outputs, inputs):
    return sum(list(outputs["score"].square())[1:])


@refused
def neighbouring_samples(outputs, inputs):
    each = list(outputs["score"])
    return sum(one * other for one, other in zip(each[1:], each[:-1], strict=True))


@refused
def learned_part(outputs, inputs):
    return F.cross_entropy(outputs["classes"], inputs["kinds"]) + LEARNED.square().sum()


LEARNED = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
