"""Rows of a batch that belong together in twos: right where no microbatch parts them, else refused. And a loss with
its weight.
"""

from __future__ import annotations

import torch.nn.functional as F

from .model import logps, shifted


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
