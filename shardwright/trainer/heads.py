"""Samples of tasks that are no causal language modelling: what a row becomes, and how an evaluation counts.

Labels that do not count are -100 in all of them; transformers' own losses leave these out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..utils.errors import counted, nearest
from .errors import RecipeError
from .samples import IGNORED
from .spans import places
from .trainer import Batch, Trainer

_KEPT, _RANDOM = 0.1, 0.1  # of the tokens that masked language models have to tell: as BERT has it


@dataclass(frozen=True)
class Features:
    """Entries of a batch for one sample: a list of numbers for each that is padded, a number for each that is not.

    offsets, nowhere   of a window over a text: the characters of each token, None for those of something else, and the
                       token that stands for no answer
    """

    values: Mapping[str, Any]
    offsets: tuple[tuple[int, int] | None, ...] | None = None
    nowhere: int = 0

    @property
    def learned(self) -> int:
        """Labels that count."""
        labels = self.values["labels"] if "labels" in self.values else self.values["start_positions"]
        return sum(label != IGNORED for label in (labels if isinstance(labels, list) else [labels]))


class HeadEncoder:
    """Rows as features of at most `max_length` tokens, with the special tokens that the tokenizer adds.

    types   whether the model takes token_type_ids, which say which of two texts a token is of
    """

    def __init__(self, tokenizer: Any, max_length: int, types: bool = False) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.types = types and "token_type_ids" in tokenizer.model_input_names

    def one(self, row: Mapping[str, Any]) -> Features:
        raise NotImplementedError

    def nothing(self, padding: int) -> Features:
        """A sample of which nothing counts."""
        types = {"token_type_ids": [0, 0]} if self.types else {}
        return Features({"input_ids": [padding] * 2, **types, "labels": self.no_labels()})

    def no_labels(self) -> Any:
        return [IGNORED] * 2

    def encode(self, *texts: Any, **options: Any) -> Any:
        """What the tokenizer makes of it, cut off behind max_length."""
        try:
            found = self.tokenizer(*texts, truncation=True, max_length=self.max_length, verbose=False, **options)
        except Exception as error:  # half of a character, and what else tokenizers do not take
            raise RecipeError(f"the tokenizer cannot read {texts[0]!r:.60} ({type(error).__name__})") from error
        if not found["input_ids"]:
            raise RecipeError(f"there is not a single token in {texts[0]!r:.60}")
        return found

    def inputs(self, found: Any) -> dict[str, list[int]]:
        names = ("input_ids", "token_type_ids") if self.types else ("input_ids",)
        return {name: list(found[name]) for name in names}


class Labels:
    """Names and numbers of labels -> numbers."""

    def __init__(self, config: Any) -> None:
        self.numbers = {str(name): int(number) for name, number in config.label2id.items()}
        self.count = config.num_labels

    def number(self, label: Any) -> int:
        if isinstance(label, str) and label in self.numbers:
            return self.numbers[label]
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < self.count:
            return label
        known = ", ".join(self.numbers)
        if isinstance(label, str):
            raise RecipeError(
                f"the label {label!r} is not one of the model's {known}{nearest(label, self.numbers)}; name all of "
                "them as labels: [...], in their order"
            )
        raise RecipeError(
            f"the label {label!r} is no number from 0 to {self.count - 1}, and no name of {known}; name all of them as "
            "labels: [...], in their order"
        )


class ClassifiedText(HeadEncoder):
    """A text, or a pair of texts, and the label of it."""

    def __init__(self, tokenizer: Any, max_length: int, types: bool, labels: Any) -> None:
        super().__init__(tokenizer, max_length, types)
        self.labels = labels

    def one(self, row: Mapping[str, Any]) -> Features:
        texts = [_text(row, part) for part in ("text", "text_pair") if part in row]
        found = self.encode(*texts)
        if len(texts) == 2:
            apart = [token for text in texts for token in self.encode(text)["input_ids"]]
            if list(found["input_ids"]) == apart and not self.types:
                raise RecipeError(
                    "text_pair, and the tokenizer writes two texts without anything between them; join them in one "
                    "column with a word of your own between them"
                )
        return Features({**self.inputs(found), "labels": self.labels.number(row["label"])})

    def no_labels(self) -> Any:
        return IGNORED


class TaggedWords(HeadEncoder):
    """Words, and a tag for each, which its first token has; spaces part them, as in the text that they come from."""

    def __init__(self, tokenizer: Any, max_length: int, types: bool, labels: Labels) -> None:
        super().__init__(tokenizer, max_length, types)
        self.labels = labels
        if not tokenizer.is_fast:
            raise RecipeError("token-classification needs a fast tokenizer, which knows the word of each token")

    def one(self, row: Mapping[str, Any]) -> Features:
        words, tags = row["words"], row["tags"]
        if not _are_texts(words):
            raise RecipeError(f"a row's words are {words!r:.60}; a list of texts is needed")
        if not isinstance(tags, Sequence) or isinstance(tags, str) or len(tags) != len(words):
            raise RecipeError(
                f"a row has {counted(len(words), 'word')} and the tags {tags!r:.60}; a tag for each word is needed"
            )
        text = " ".join(words)
        found = self.encode(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        starts = np.cumsum([0, *(len(word) + 1 for word in words)])
        labels, before = [], -1
        for start, end in places(found, text):
            word = int(np.searchsorted(starts, start, side="right")) - 1
            begins = word > before and bool(text[start:end].strip())
            labels.append(self.labels.number(tags[word]) if begins else IGNORED)
            before = word if begins else before
        return Features({**self.inputs(found), "labels": labels})


class MaskedText(HeadEncoder):
    """A text in which some tokens are to be told: 8 of 10 masked, one replaced, one left as it is.

    Which they are depends on the text and the seed alone, so it is the same at every pass and at every layout.
    """

    def __init__(self, tokenizer: Any, max_length: int, types: bool, probability: float, seed: int, words: int) -> None:
        super().__init__(tokenizer, max_length, types)
        self.probability, self.seed, self.words = probability, seed, words
        self.mask = tokenizer.mask_token_id
        if self.mask is None:
            raise RecipeError("masked-lm, and the tokenizer has no mask token; take another tokenizer, or causal-lm")

    def one(self, row: Mapping[str, Any]) -> Features:
        found = self.encode(_text(row, "text"), return_special_tokens_mask=True)
        inputs = self.inputs(found)
        ids = inputs["input_ids"]
        draw = random.Random(f"{self.seed}-{ids}")
        open_to = [at for at, special in enumerate(found["special_tokens_mask"]) if not special]
        chosen = [at for at in open_to if draw.random() < self.probability] or open_to[:1]
        labels = [IGNORED] * len(ids)
        for at in chosen:
            labels[at] = ids[at]
            what = draw.random()
            ids[at] = ids[at] if what < _KEPT else draw.randrange(self.words) if what < _KEPT + _RANDOM else self.mask
        return Features({**inputs, "labels": labels})


class Answered(HeadEncoder):
    """A text and what becomes of it, which ends with the end of a sequence."""

    def one(self, row: Mapping[str, Any]) -> Features:
        inputs = self.inputs(self.encode(_text(row, "prompt")))
        labels = list(self.encode(text_target=_text(row, "completion"))["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and labels[-1] != end and len(labels) < self.max_length:
            labels.append(end)
        return Features({**inputs, "labels": labels})


class HeadTrainer(Trainer):
    """Counts every label of a batch; `causal` models alone predict a label from the token before."""

    def count_labels(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def count_tokens(self, batch: Batch) -> int:
        counted = (batch["labels"] != IGNORED).reshape(len(batch["labels"]), -1).any(dim=1, keepdim=True)
        return int((batch["attention_mask"].bool() & counted).sum())


class Classifier(HeadTrainer):
    """Tells the share of labels that the model meets, too."""

    counts_right = True

    def count_right(self, outputs: Any, batch: Batch) -> int:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
        labels = batch["labels"].to(logits.device)
        assert logits.shape[:-1] == labels.shape, (logits.shape, labels.shape)
        return int(((logits.argmax(-1) == labels) & (labels != IGNORED)).sum())


def _text(row: Mapping[str, Any], part: str) -> str:
    value = row[part]
    if not isinstance(value, str):
        raise RecipeError(f"a row's {part} is {value!r:.60}; text is needed")
    return value


def _are_texts(words: Any) -> bool:
    return isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(word, str) for word in words)
