"""Several samples in one sequence.

Each is a document of its own: its positions begin at 0, which is what tells attention where one ends, and nothing of
another is seen or predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from .samples import IGNORED, Sample

_OPEN = 64  # sequences that are being filled at one time


def fill(lengths: Iterable[tuple[int, int]], room: int) -> Iterator[list[int]]:
    """Groups of keys whose lengths are at most `room` together, of (key, length): every one goes to the fullest open
    group that it fits in. Keys of a group come in the order in which they went there.
    """
    opened: list[tuple[int, list[int]]] = []  # what is left, and the keys
    for key, length in lengths:
        fitting = [at for at, (left, _) in enumerate(opened) if left >= length]
        if fitting:
            at = min(fitting, key=lambda each: opened[each][0])
            left, keys = opened.pop(at)
        else:
            if len(opened) == _OPEN:
                yield opened.pop(min(range(_OPEN), key=lambda each: opened[each][0]))[1]
            left, keys = room, []
        keys.append(key)
        if left - length < 2:  # nothing that can be learned from fits
            yield keys
        else:
            opened.append((left - length, keys))
    yield from (keys for _, keys in opened)


def join(samples: Sequence[Sample], length: int, padding: int) -> dict[str, torch.Tensor]:
    """input_ids, labels and position_ids, each [length]. Behind the samples every token is a document of its own, at
    position 0 and without a label.
    """
    ids = torch.full((length,), padding)
    labels = torch.full((length,), IGNORED)
    positions = torch.zeros(length, dtype=torch.long)
    start = 0
    for sample in samples:
        end = start + len(sample)
        ids[start:end] = torch.as_tensor(np.asarray(sample.ids))
        labels[start + 1 : end] = torch.as_tensor(np.asarray(sample.labels[1:]))  # the first is predicted from nothing
        positions[start:end] = torch.arange(len(sample))
        start = end
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


class TokenStore:
    """Samples behind each other in flat arrays: 8 bytes a token instead of Python's 40."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        ids: list[Any] = []
        labels: list[Any] = []
        lengths: list[int] = []
        for sample in samples:
            ids.append(np.asarray(sample.ids, dtype=np.int32))
            labels.append(np.asarray(sample.labels, dtype=np.int32))
            lengths.append(len(sample))
        self.ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
        self.labels = np.concatenate(labels) if labels else np.empty(0, np.int32)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        end = int(self.ends[index])
        start = end - int(self.lengths[index])
        return Sample(cast(Any, self.ids[start:end]), cast(Any, self.labels[start:end]))
