"""From a row to token ids and labels, and what happens to rows that are longer than a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .reading import RecipeError

IGNORED = -100  # the label of tokens that are not learned, as transformers' losses have it


@dataclass(frozen=True)
class Sample:
    """Token ids and labels of one length; labels are not shifted, the model does that."""

    ids: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, end: int) -> Sample:
        """A piece of it."""
        return Sample(self.ids[start:end], self.labels[start:end])

    @property
    def learned(self) -> int:
        """Tokens that count in the loss: labels that are predicted from a token before them."""
        return sum(label != IGNORED for label in self.labels[1:])


class Encoder:
    """Rows of `sources.rows_of` as samples of at most `max_length` tokens.

    Plain text ends with the tokenizer's end-of-sequence token, so that a model learns where to stop.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        end = tokenizer.eos_token_id
        self.end: list[int] = [] if end is None else [end]

    def whole(self, row: Mapping[str, Any]) -> Sample:
        """The sample of a row, however long."""
        if "text" in row:
            ids = self._ids(self._text(row, "text"), special=True)
            ids = ids if ids[-1:] == self.end else ids + self.end
            return Sample(ids, ids)
        if "messages" in row:
            return self._conversation(row["messages"])
        prompt = self._ids(self._text(row, "prompt"), special=True)
        if self.end and prompt[-1:] == self.end:
            prompt = prompt[:-1]  # of a tokenizer that ends every text
        answer = self._ids(self._text(row, "completion"), special=False) + self.end
        return Sample(prompt + answer, [IGNORED] * len(prompt) + answer)

    def one(self, row: Mapping[str, Any]) -> Sample:
        """The sample of a row, cut off behind max_length."""
        return self.whole(row).cut(0, self.max_length)

    def pieces(self, row: Mapping[str, Any]) -> Iterator[Sample]:
        """Plain text in pieces of max_length, so that all of it is learned; the beginning of other samples."""
        whole = self.whole(row)
        last = len(whole) if "text" in row else min(len(whole), self.max_length)
        for start in range(0, last, self.max_length):
            piece = whole.cut(start, start + self.max_length)
            if len(piece) > 1:  # one token alone predicts nothing
                yield piece

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _text(self, row: Mapping[str, Any], part: str) -> str:
        value = row[part]
        if not isinstance(value, str):
            raise RecipeError(f"a row's {part} is {value!r:.60}; text is needed")
        return value

    def _conversation(self, messages: Any) -> Sample:
        """The assistant's messages are learned. Templates that mark them say where they are; of others, an answer is
        what a conversation has more than the same one that stops where the answer begins.
        """
        self._check(messages)
        if self.tokenizer.chat_template is None:
            raise RecipeError(
                "data has messages, and the tokenizer has no chat template; give one as chat_template: FILE.jinja"
            )
        if "{% generation" in self.tokenizer.chat_template or "{%- generation" in self.tokenizer.chat_template:
            found = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids = list(found["input_ids"])
            return Sample(
                ids, [one if kept else IGNORED for one, kept in zip(ids, found["assistant_masks"], strict=True)]
            )
        ids = self._render(messages, False)
        labels = [IGNORED] * len(ids)
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:at], True), self._render(messages[: at + 1], False)
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise RecipeError(
                    "the tokenizer's chat template writes a conversation differently when it goes on, so that the "
                    "answers cannot be found in it; mark them in a chat_template of yours with {% generation %}"
                )
            labels[len(before) : len(after)] = ids[len(before) : len(after)]
        return Sample(ids, labels)

    def _render(self, messages: Sequence[Any], to_answer: bool) -> list[int]:
        found = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=to_answer
        )
        return list(found["input_ids"])

    @staticmethod
    def _check(messages: Any) -> None:
        good = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        if not good or not all(isinstance(one, Mapping) and "role" in one and "content" in one for one in messages):
            raise RecipeError(
                f"a row's messages are {messages!r:.60}; a list of {{role: user, content: ...}} and "
                "{role: assistant, content: ...} is needed"
            )
