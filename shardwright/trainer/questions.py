"""Questions whose answers are parts of a text: windows over long texts, and how answers are compared with the right
ones.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..utils.errors import counted
from .errors import RecipeError
from .heads import Features, HeadEncoder, HeadTrainer, _text
from .samples import IGNORED
from .trainer import Batch

_LONGEST = 30  # tokens of an answer that the model gives
_SHARED = 128  # tokens that two windows share, where nothing is said


class Questions(HeadEncoder):
    """A question and a context as windows of at most `max_length` tokens, two of which share `stride` tokens of the
    context, so that an answer which one cuts is whole in another. Its first and last token are learned; of windows
    without the whole answer, the token that stands for none (the first special one).
    """

    def __init__(self, tokenizer: Any, max_length: int, types: bool, stride: int | None) -> None:
        super().__init__(tokenizer, max_length, types)
        self.stride = min(_SHARED, max_length // 4) if stride is None else stride
        if not tokenizer.is_fast:
            raise RecipeError("question-answering needs a fast tokenizer, which knows the place of each token")

    def one(self, row: Mapping[str, Any]) -> Features:
        return self.many(row)[0]

    def many(self, row: Mapping[str, Any]) -> list[Features]:
        question, context = _text(row, "question"), _text(row, "context")
        answers = read_answers(row["answers"], context)
        found = self._windows(question, context)
        return [self._window(found, at, answers[:1]) for at in range(len(found["input_ids"]))]

    def nothing(self, padding: int) -> Features:
        inputs = super().nothing(padding).values
        kept = {name: value for name, value in inputs.items() if name != "labels"}
        return Features({**kept, "start_positions": IGNORED, "end_positions": IGNORED})

    def _windows(self, question: str, context: str) -> Any:
        asked = self.encode_whole(question)
        pair = self.encode_whole(question, "")
        room = self.max_length - max(len(asked), len(pair))
        if room <= self.stride:
            raise RecipeError(
                f"a question of {counted(len(asked), 'token')} leaves {max(room, 0)} of max_length={self.max_length} "
                "to "
                f"its context, and windows share stride={self.stride}; give a larger max_length or a smaller stride"
            )
        if len(pair) == len(asked) and not self.types:
            raise RecipeError(
                "question-answering, and the tokenizer writes a question and its context without anything between "
                "them; take one with a token that parts two texts"
            )
        return self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )

    def encode_whole(self, *texts: str) -> list[int]:
        try:
            return list(self.tokenizer(*texts, verbose=False)["input_ids"])
        except Exception as error:  # half of a character, and what else tokenizers do not take
            raise RecipeError(f"the tokenizer cannot read {texts[0]!r:.60} ({type(error).__name__})") from error

    def _window(self, found: Any, at: int, answers: Sequence[tuple[int, int]]) -> Features:
        ids = list(found["input_ids"][at])
        sides = found.sequence_ids(at)
        offsets = [span if side == 1 else None for span, side in zip(found["offset_mapping"][at], sides, strict=True)]
        nowhere = next((index for index, side in enumerate(sides) if side is None), 0)
        start, end = next((_tokens_of(offsets, *answer) for answer in answers), None) or (nowhere, nowhere)
        types = {"token_type_ids": list(found["token_type_ids"][at])} if self.types else {}
        values = {"input_ids": ids, **types, "start_positions": start, "end_positions": end}
        return Features(values, tuple(offsets), nowhere)


def _tokens_of(offsets: Sequence[tuple[int, int] | None], start: int, end: int) -> tuple[int, int] | None:
    """The first and the last token of the characters from `start` to `end`; None where not all of them are there."""
    known = [(at, span) for at, span in enumerate(offsets) if span is not None and span[0] < span[1]]
    inside = [at for at, (first, last) in known if first < end and last > start]
    if not inside or known[0][1][0] > start or known[-1][1][1] < end:
        return None
    return inside[0], inside[-1]


def read_answers(answers: Any, context: str) -> list[tuple[int, int]]:
    """Characters of the answers; none where the context has none. As SQuAD has them, or a list of {text, answer_start};
    without `answer_start` the first place where the text stands.
    """
    if isinstance(answers, Mapping) and isinstance(answers.get("text"), Sequence) and "answer_start" in answers:
        texts, starts = answers["text"], answers["answer_start"]
        texts, starts = ([texts], [starts]) if isinstance(texts, str) else (texts, starts)
        if not isinstance(starts, Sequence) or len(starts) != len(texts):
            raise RecipeError(f"a row's answers are {answers!r:.60}; an answer_start is needed for each text")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    answers = [answers] if isinstance(answers, str | Mapping) else answers
    if not isinstance(answers, Sequence):
        raise RecipeError(f"a row's answers are {answers!r:.60}; {{text: [...], answer_start: [...]}} is needed")
    return [_read_answer(one, context) for one in answers]


def _read_answer(one: Any, context: str) -> tuple[int, int]:
    one = {"text": one} if isinstance(one, str) else one
    text = one.get("text") if isinstance(one, Mapping) else None
    if not isinstance(text, str) or not text:
        raise RecipeError(f"a row has the answer {one!r:.60}; a text is needed, and none at all where there is none")
    start = one.get("answer_start")
    if start is None:
        start = context.find(text)
        if start < 0:
            raise RecipeError(f"the answer {text!r:.60} does not stand in the context; answers are parts of it")
    if not isinstance(start, int) or context[start : start + len(text)] != text or start < 0:
        there = context[start : start + len(text)] if isinstance(start, int) and start >= 0 else ""
        raise RecipeError(
            f"the answer {text!r:.60} does not stand at answer_start={start} of the context, where {there!r:.60} is; "
            "characters are counted from 0"
        )
    return start, start + len(text)


class Answering(HeadTrainer):
    """Learns the first and the last token of the answer. An evaluation tells exact_match and f1 as SQuAD counts them:
    of each question the best span of all windows, against the best of its answers, in percent.
    """

    columns = 4

    def criterion(self, outputs: Any, inputs: Batch) -> torch.Tensor:
        first = F.cross_entropy(outputs.start_logits.float(), inputs["start_positions"], ignore_index=IGNORED)
        last = F.cross_entropy(outputs.end_logits.float(), inputs["end_positions"], ignore_index=IGNORED)
        return (first + last) / 2

    def count_labels(self, batch: Batch) -> int:
        return int((batch["start_positions"] != IGNORED).sum())

    def count_tokens(self, batch: Batch) -> int:
        return int((batch["attention_mask"].bool() & (batch["start_positions"] != IGNORED)[:, None]).sum())

    def measure(self, outputs: Any, batch: Batch, samples: range) -> torch.Tensor:
        """Of each window the first and the last character of its best answer, its score, and that of no answer."""
        found = outputs if isinstance(outputs, Mapping) else vars(outputs)
        starts, ends = found["start_logits"].float().cpu(), found["end_logits"].float().cpu()
        rows = torch.zeros(len(samples), self.columns, dtype=torch.float64)
        for at, sample in enumerate(samples):
            if sample < len(self.measured):
                rows[at] = torch.tensor(best_span(starts[at], ends[at], self.measured.features[sample]))
        return rows

    def figures(self, rows: torch.Tensor) -> dict[str, float]:
        windows = self.measured
        found: dict[int, list[list[float]]] = collections.defaultdict(list)
        for row, one in zip(windows.row_of, rows.tolist(), strict=False):
            found[row].append(one)
        exact, overlap = 0.0, 0.0
        right = {row: _right(windows.rows[row]) for row in found}
        may_be_none = any(answers == [""] for _, answers in right.values())
        for row, spans in found.items():
            start, end, score, _ = max(spans, key=lambda span: span[2])
            context, answers = right[row]
            none = may_be_none and min(span[3] for span in spans) > score
            said = "" if none else context[int(start) : int(end)]
            exact += max(float(normal(said) == normal(answer)) for answer in answers)
            overlap += max(shared_words(said, answer) for answer in answers)
        count = max(len(found), 1)
        return {"exact_match": 100 * exact / count, "f1": 100 * overlap / count}


def _right(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    context = row["context"]
    return context, [context[start:end] for start, end in read_answers(row["answers"], context)] or [""]


def best_span(start: torch.Tensor, end: torch.Tensor, window: Features) -> tuple[float, float, float, float]:
    """Characters from and to, score, and the score of no answer, of the logits [tokens] of one window."""
    assert window.offsets is not None
    length = len(window.offsets)
    start, end = start[:length], end[:length]
    allowed = torch.tensor([span is not None and span[0] < span[1] for span in window.offsets])
    scores = start[:, None] + end[None, :]
    possible = torch.ones(length, length, dtype=torch.bool).triu().tril(_LONGEST - 1)
    scores = scores.masked_fill(~(possible & allowed[:, None] & allowed[None, :]), -torch.inf)
    none = float(start[window.nowhere] + end[window.nowhere])
    if not bool(allowed.any()):
        return 0.0, 0.0, -1e30, none
    first, last = divmod(int(scores.argmax()), length)
    from_, to = window.offsets[first], window.offsets[last]
    assert from_ is not None
    assert to is not None
    return float(from_[0]), float(to[1]), float(scores[first, last]), none


def normal(text: str) -> str:
    """As SQuAD compares answers: small letters, without punctuation, articles and more than one space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def shared_words(said: str, right: str) -> float:
    """F1 of the words of two answers."""
    one, other = normal(said).split(), normal(right).split()
    if not one or not other:
        return float(one == other)
    common = sum((collections.Counter(one) & collections.Counter(other)).values())
    return 2 * common / (len(one) + len(other))


def windows_of(encoder: Any, row: Mapping[str, Any]) -> Iterator[Any]:
    """Samples of a row, by any encoder: one, or several windows."""
    yield from encoder.many(row) if isinstance(encoder, Questions) else [encoder.one(row)]
