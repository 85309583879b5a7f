"""What scripts of evaluation, preference learning, distillation and generation do with logits [B, T, V].

Every function gets the logits, those of another model (whole), labels [B, T] of which some are -100, and V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

TEMPERATURE = 0.7


def trainer_smoothing(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=True)


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def preferences(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    mask = labels[:, 1:] != -100
    sums = [
        (token_log_probs(each[:, :-1], labels[:, 1:]) * mask).sum(-1) for each in (logits.float(), reference.float())
    ]
    chosen, rejected = (sums[0] - sums[1]).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def selective_log_softmax(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    chosen = torch.gather(logits, dim=-1, index=labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def clipped_policy(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    ratio = (token_log_probs(logits, labels) - token_log_probs(reference, labels)).exp()
    advantage = torch.linspace(-1, 1, labels.numel()).view_as(labels)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[labels != -100].mean()


def entropy_in_chunks(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    pieces = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(3, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        pieces.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(pieces).reshape(logits.shape[:-1])


def distillation(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    student, teacher = F.log_softmax(logits / TEMPERATURE, -1), F.softmax(reference / TEMPERATURE, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * TEMPERATURE**2


def distillation_by_row(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    student, teacher = F.log_softmax(logits, -1), F.log_softmax(reference, -1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)[labels != -100].mean()


def jensen_shannon(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    student, teacher = logits.log_softmax(-1), reference.log_softmax(-1)
    middle = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0))
    return [
        F.kl_div(middle, one, reduction="none", log_target=True).sum(-1).mean() for one in (student + 0, teacher + 0)
    ]


def reverse_kl(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    student = logits.log_softmax(-1)
    return (student.exp() * (student - reference.log_softmax(-1))).sum(-1)


def by_hand(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    shifted = logits - logits.max(-1, keepdim=True).values
    probabilities = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
    return [(probabilities**2).sum(-1), (logits - logits.logsumexp(-1, keepdim=True)).mean()]


def accuracy(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    mask = labels != -100
    top = logits.topk(3, dim=-1).indices
    return [
        (logits.argmax(-1) == labels)[mask].float().mean(),
        (top == labels.unsqueeze(-1)).any(-1)[mask].float().sum(),
        (logits[mask].argmax(-1) == labels[mask]).sum(),
    ]


def sampling(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    last = logits[:, -1, :] / TEMPERATURE
    kept = last.masked_fill(last < last.topk(4).values[:, -1, None], -torch.inf)
    return [
        torch.multinomial(F.softmax(kept, -1), 1, generator=torch.Generator().manual_seed(3)),
        F.softmax(kept, -1).max(-1).values,
    ]


def nucleus(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    last = logits[:, -1].detach().clone()
    ordered, places = torch.sort(last, descending=True)
    remove = ordered.softmax(-1).cumsum(-1) > 0.6
    remove[:, 1:], remove[:, 0] = remove[:, :-1].clone(), False
    last[remove.scatter(1, places, remove)] = -torch.inf
    return [last.softmax(-1).topk(2).values, last.isinf().sum()]


def minimum_probability(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    probabilities = logits.softmax(-1)
    last = logits.detach().clone()
    last[probabilities < 0.3 * probabilities.amax(-1, keepdim=True)] = -1e9
    return last.softmax(-1)


def padding_columns(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    real = torch.arange(logits.size(-1)) < size - 2
    written = logits.detach().clone()
    written[..., size - 2 :] = torch.finfo(written.dtype).min
    written[:, 0, [1, 3]] = -1e4
    written[0, 1, 5] = 1e4
    return [
        logits.masked_fill(~real, -1e4).log_softmax(-1)[..., 0],
        torch.where(real, logits, torch.full_like(logits, -30.0)).logsumexp(-1),
        F.cross_entropy(written.view(-1, size), labels.view(-1)),
        written.argmax(-1),
        (logits + torch.zeros(logits.shape[-1]).index_fill(0, torch.tensor([2]), -5.0)).softmax(-1),
    ]


def beam_search(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    scores = F.log_softmax(logits[:, -1], dim=-1) + torch.tensor([[0.0], [-1.0], [-3.0], [-9.0]]).to(logits)
    best, tokens = scores.topk(2, dim=1)
    return [best, tokens, scores.max(), scores.argmax() // size, scores.argmax() % size]


def single_tokens(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    yes_no = logits[:, -1, [2, size - 1]].softmax(-1)
    rows = torch.arange(len(labels))
    return [
        yes_no,
        logits[..., 3],
        logits[:, -1, -1],
        logits[:, :, 1:4].sum(-1),
        logits.log_softmax(-1)[rows, -1, labels[:, -1].clamp_min(0)],
        logits[rows[:, None], torch.arange(labels.shape[1]), labels.clamp_min(0)],
        logits[1, 2, torch.tensor([0, size - 1, -2])],
        logits[:, 0, torch.arange(size) % 2 == 0].mean(),
        logits[1, 2][torch.tensor(4)],
    ]


def last_tokens(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    ends = (labels != -100).sum(1).clamp_min(1) - 1
    return [
        logits.gather(1, ends[:, None, None].expand(-1, 1, logits.size(-1))).squeeze(1).argmax(-1),
        logits[torch.arange(len(ends)), ends].log_softmax(-1),
        logits.index_select(1, torch.tensor([2, 0])).logsumexp(-1),
        torch.take_along_dim(logits, labels.clamp_min(0)[..., None], dim=-1),
    ]


def perplexity(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    mask = labels[:, 1:] != -100
    return [torch.exp((losses * mask).sum(1) / mask.sum(1).clamp_min(1)), losses]


def losses_by_hand(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    flat, target = logits.reshape(-1, size), labels.reshape(-1)
    log_probs = F.log_softmax(flat, dim=-1)
    weight = torch.linspace(0.5, 1.5, size).to(log_probs)
    return [
        F.nll_loss(log_probs, target),
        F.nll_loss(log_probs, target, weight=weight, reduction="sum"),
        torch.nn.NLLLoss(weight)(log_probs, target),
        F.nll_loss(logits.log_softmax(-1).permute(0, 2, 1), labels, reduction="none"),
        F.cross_entropy(flat, target, label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")(flat, target),
        F.cross_entropy(logits.view(-1, logits.size(-1)), target),
    ]


def columns_of_two_models(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    return [
        F.mse_loss(logits, reference),
        F.mse_loss(logits.softmax(-1), reference.softmax(-1), reduction="sum"),
        F.smooth_l1_loss(logits, reference),
        F.l1_loss(reference, logits),
        F.binary_cross_entropy_with_logits(logits, reference.sigmoid()),
        (logits - reference).square().mean(),
        (logits - reference).abs().amax(),
    ]


def mixtures(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    guided = reference + 1.5 * (logits - reference)
    return [
        torch.lerp(logits, reference.to(logits), 0.3).softmax(-1),
        guided.argmax(-1),
        torch.maximum(logits, reference),
    ]


def gradients_through_statistics(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    centred = logits - logits.mean(-1, keepdim=True)
    return (centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()).pow(3).sum((1, 2))


def confidence(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    best = logits.softmax(-1).topk(2).values
    return [best[..., 0] - best[..., 1], logits.softmax(-1).max(-1)[0].mean(), -logits.logsumexp(-1), logits.std(-1)]


def shapes(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    samples, length, width = logits.shape
    moved = logits.permute(2, 0, 1).reshape
    del moved
    return [
        torch.tensor(
            [*logits.shape, logits.numel(), logits.nelement(), len(logits), logits.size(2), logits[0, 0].numel()]
        ),
        logits.view(samples * length, width).argmax(-1),
        logits.flatten(0, 1).view(samples, -1, width).softmax(-1),
        logits.unsqueeze(1).expand(-1, 2, -1, -1).reshape(-1, length, width).sum(-1),
        logits.transpose(0, 1).contiguous().view(length, samples, -1),
        logits.reshape(2, samples // 2, length, width).log_softmax(-1).sum((0, 1)),
        logits.unflatten(0, (2, -1)).logsumexp(-1),
        torch.ones(samples, length, 1).to(logits).expand_as(logits).sum() + 0 * logits.sum(),
        torch.zeros(logits.shape).to(logits) + logits,
        F.one_hot(labels.clamp_min(0), logits.shape[-1]).to(logits) * logits,
        logits.new_ones(logits.size()).sum() + logits.sum(),
    ]


def batches(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    joined = torch.cat([logits[:1], logits[1:]], dim=0)
    stacked = torch.stack(list(logits))
    return [joined[:, :-1].argmax(-1), stacked[labels != -100].log_softmax(-1), torch.cat(logits.split(1)).sum(-1)]


def categorical(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    policy = Categorical(logits=logits)
    return [policy.log_prob(labels.clamp_min(0)), policy.entropy(), Categorical(logits=logits[:, -1]).mode]


def trained_temperature(logits: Tensor, reference: Tensor, labels: Tensor, size: int) -> Any:
    scale, bias = torch.tensor(1.3, requires_grad=True), torch.linspace(-1, 1, size).requires_grad_()
    loss = F.cross_entropy((logits * scale + bias).view(-1, size), labels.view(-1))
    return [loss, *torch.autograd.grad(loss, (scale, bias), retain_graph=True)]


IDIOMS: dict[str, Any] = {
    name: value
    for name, value in globals().items()
    if getattr(value, "__module__", None) == __name__ and callable(value) and name != "token_log_probs"
}
