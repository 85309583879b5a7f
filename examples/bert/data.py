"""Sentence pairs to classify: those of GLUE, from the hub, or pairs of the same shape that are made up."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shardwright.plugins import Plugin

FIELDS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
}


class MadeUpPairs(Dataset[dict[str, torch.Tensor]]):
    """Pairs of word lists, labelled 1 where the second one is of the words in the lower half of the vocabulary; padded
    to one length, as GLUE is here.
    """

    def __init__(self, split: str, pairs: int, length: int, vocabulary: int) -> None:
        self.rows = [self._row(random.Random(f"{split} {index}"), length, vocabulary) for index in range(pairs)]

    @staticmethod
    def _row(source: random.Random, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
        half, label, middle = length // 2 - 2, source.randrange(2), vocabulary // 2
        first = [source.randrange(4, vocabulary) for _ in range(source.randint(half // 2, half))]
        lowest, behind = (4, middle) if label else (middle, vocabulary)
        second = [source.randrange(lowest, behind) for _ in range(source.randint(half // 2, half))]
        words = [1, *first, 2, *second, 2]
        padding = [0] * (length - len(words))
        return {
            "input_ids": torch.tensor(words + padding),
            "attention_mask": torch.tensor([1] * len(words) + padding),
            "token_type_ids": torch.tensor([0] * (len(first) + 2) + [1] * (len(second) + 1) + padding),
            "labels": torch.tensor(label),
        }

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Evened(Dataset[dict[str, torch.Tensor]]):
    """A dataset that is filled up to whole batches of all ranks with samples whose label, -100, does not count."""

    def __init__(self, rows: Any, multiple: int) -> None:
        self.rows, self.multiple = rows, multiple

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < len(self.rows):
            return self.rows[index]
        return {**self.rows[0], "labels": torch.tensor(-100)}


class GlueDataBuilder:
    """Loaders of one task's train and validation parts, laid out by `plugin`; `batch_size` is that of one rank."""

    num_labels = 2

    def __init__(
        self,
        plugin: Plugin,
        task: str,
        batch_size: int,
        length: int = 128,
        tokenizer: str | None = None,
        pairs: int = 512,
        vocabulary: int = 1000,
    ) -> None:
        if task not in FIELDS:
            raise ValueError(f"task={task!r} is not one of {', '.join(FIELDS)}")
        self.plugin, self.task, self.batch_size, self.length = plugin, task, batch_size, length
        self.tokenizer, self.pairs, self.vocabulary = tokenizer, pairs, vocabulary

    def train_dataloader(self) -> DataLoader:
        return self.plugin.prepare_dataloader(
            self._dataset("train"), batch_size=self.batch_size, shuffle=True, drop_last=True
        )

    def validation_dataloader(self) -> DataLoader:
        replicas, _ = self.plugin.data_parallel
        rows = Evened(self._dataset("validation"), replicas * self.batch_size)
        return self.plugin.prepare_dataloader(rows, batch_size=self.batch_size)

    def _dataset(self, split: str) -> Any:
        if self.tokenizer is None:
            return MadeUpPairs(split, self.pairs if split == "train" else self.pairs // 4, self.length, self.vocabulary)
        import datasets
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)

        def encode(rows: dict[str, Any]) -> dict[str, Any]:
            texts = [rows[field] for field in FIELDS[self.task]]
            return {
                **tokenizer(*texts, max_length=self.length, padding="max_length", truncation=True),
                "labels": rows["label"],
            }

        raw = datasets.load_dataset("glue", self.task, split=split)
        encoded = raw.map(encode, batched=True, remove_columns=raw.column_names)
        encoded.set_format("torch")
        return encoded
