"""A small model whose batch has everything that losses ask for, and the lists that losses as people write them are
entered into.

`RIGHT` are criteria that microbatches and data-parallel ranks must get right, to the last digits, `REFUSED` those that
none of them can compute alone. B is the number of samples, S the length, V the vocabulary.
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
    """Token logits [B, S, V], class logits [B, C], a score and an embedding per sample; takes whatever else the
    batch has.
    """

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
        "shared": torch.rand(1, length, generator=generator, dtype=torch.float64),
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
