"""From a row to token ids and labels, and what happens to rows that are longer than a sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..utils.errors import nearest
from .errors import RecipeError
from .spans import Span, reach_of, tokens_within

IGNORED = -100  # the label of tokens that are not learned, as transformers' losses have it
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_ANSWERING = ("assistant", "gpt", "model", "bot", "ai", "chatbot")
_MESSAGES = "a list of {role: user, content: ...} and {role: assistant, content: ...} is needed"


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

    def whole(self, row: Mapping[str, Any], needed: int | None = None) -> Sample:
        """The sample of a row, however long; of a conversation nothing need be right behind the `needed` tokens."""
        if "text" in row:
            ids = self._ids(self._text(row, "text"), special=True)
            ids = ids if ids[-1:] == self.end else ids + self.end
            return Sample(ids, ids)
        if "messages" in row:
            return self._conversation(row["messages"], needed)
        prompt, completion = self._text(row, "prompt"), self._text(row, "completion")
        sample = self._marked(prompt + completion, [(len(prompt), len(prompt + completion))], special=True)
        ids = [*sample.ids] if sample.ids[-1:] == self.end else [*sample.ids, *self.end]
        answered = [at for at, label in enumerate(sample.labels) if label != IGNORED]
        # What stands behind the answer, the tokenizer has added: it is the end that a model learns to write.
        behind = answered[-1] + 1 if answered else len(ids) - len(self.end)
        return Sample(ids, [*sample.labels[:behind], *ids[behind:]])

    def nothing(self, padding: int) -> Sample:
        """A sample of which nothing counts."""
        return Sample([padding] * 2, [IGNORED] * 2)

    def one(self, row: Mapping[str, Any]) -> Sample:
        """The sample of a row, cut off behind max_length."""
        return self.whole(row, self.max_length).cut(0, self.max_length)

    def pieces(self, row: Mapping[str, Any]) -> Iterator[Sample]:
        """Plain text in pieces of max_length, so that all of it is learned; the beginning of other samples."""
        whole = self.whole(row, self.max_length)
        last = len(whole) if "text" in row else min(len(whole), self.max_length)
        for start in range(0, last, self.max_length):
            piece = whole.cut(start, start + self.max_length)
            if len(piece) > 1:  # one token alone predicts nothing
                yield piece

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokens(text, special)["input_ids"])

    def _tokens(self, text: str, special: bool, **options: Any) -> Any:
        try:
            return self.tokenizer(text, add_special_tokens=special, verbose=False, **options)
        except Exception as error:  # half of a character, and what else tokenizers do not take
            raise RecipeError(f"the tokenizer cannot read the text {text!r:.60} ({type(error).__name__})") from error

    def _marked(self, text: str, spans: Sequence[Span], special: bool) -> Sample:
        """A text of which the tokens of some spans are learned."""
        return self._learned(self._found(text, special), text, spans)

    def _found(self, text: str, special: bool) -> Any:
        fast = self.tokenizer.is_fast
        return self._tokens(text, special, return_offsets_mapping=fast, return_special_tokens_mask=True)

    def _learned(self, found: Any, text: str, spans: Sequence[Span]) -> Sample:
        ids = list(found["input_ids"])
        marks = tokens_within(self.tokenizer, found, text, spans)
        return Sample(ids, [one if kept else IGNORED for one, kept in zip(ids, marks, strict=True)])

    def _text(self, row: Mapping[str, Any], part: str) -> str:
        value = row[part]
        if not isinstance(value, str):
            raise RecipeError(f"a row's {part} is {value!r:.60}; text is needed")
        return value

    def _conversation(self, messages: Any, needed: int | None) -> Sample:
        """The assistant's messages are learned. Templates that mark them say where they are; of others, an answer is
        what a conversation has more than the same one that stops where the answer begins.
        """
        messages = read_messages(messages)
        template = self.tokenizer.chat_template
        if template is None:
            raise RecipeError(
                "data has messages, and the tokenizer has no chat template; give one as chat_template: FILE.jinja"
            )
        self._check_calls(messages)
        if re.search(r"{%[-+]?\s*generation", str(template)):
            text, spans = self._written_marked(messages)
            found = self._found(text, special=False)
            reach = reach_of(self.tokenizer, found, text, needed)
            return self._learned(found, text, [(start, min(end, reach)) for start, end in spans if start < reach])
        text, spans = self._written(messages), []
        found = self._found(text, special=False)
        # Every answer costs three more looks at all that is before it: so none behind what is needed.
        reach = reach_of(self.tokenizer, found, text, needed)
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if at == 0:
                raise RecipeError(
                    "a conversation begins with the assistant, before whom the tokenizer's chat template cannot be "
                    "asked where an answer begins; begin with a user, or mark answers in a chat_template of yours with "
                    "{% generation %}"
                )
            before = self._written(messages[:at], True)
            if len(before) >= reach:
                break
            after = self._written(messages[: at + 1])
            if before == self._written(messages[:at]):
                raise RecipeError(
                    "the tokenizer's chat template does not look at add_generation_prompt, so that the head of an "
                    "answer would be learned with it; mark answers in a chat_template of yours with {% generation %}"
                )
            if not (text.startswith(before) and text.startswith(after)):
                raise RecipeError(
                    "the tokenizer's chat template writes a conversation differently when it goes on, so that the "
                    "answers cannot be found in it; mark them in a chat_template of yours with {% generation %}"
                )
            spans.append((len(before), min(len(after), reach)))
        return self._learned(found, text, spans)

    def _written_marked(self, messages: Sequence[Any]) -> tuple[str, list[Span]]:
        """A conversation as a template writes it that marks answers, and where they are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _of_template():
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        (text,), (spans,) = rendered
        return str(text), [(start, end) for start, end in spans]

    def _written(self, messages: Sequence[Any], to_answer: bool = False) -> str:
        """A conversation as text."""
        with _of_template():
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer))

    def _check_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if not any(one.get("tool_calls") for one in messages):
            return
        plain = [{name: value for name, value in one.items() if name != "tool_calls"} for one in messages]
        if self._written(messages) == self._written(plain):
            raise RecipeError(
                "a row has tool_calls, which the tokenizer's chat template does not write; give a chat_template that "
                "does, or write them into the content"
            )


@contextmanager
def _of_template() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template raises what it likes
        first = (str(error).strip().split("\n") or [""])[0]
        raise RecipeError(
            f"the chat template cannot write a conversation ({type(error).__name__}: {first}); change the row, or "
            "give another chat_template"
        ) from error


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages whose content is text; a list of texts, as OpenAI has it, becomes one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RecipeError(f"a row's messages are {messages!r:.60}; {_MESSAGES}")
    return [_read_message(one) for one in messages]


def _read_message(one: Any) -> dict[str, Any]:
    if isinstance(one, Mapping) and {*one} == {"from", "value"}:  # as ShareGPT has it
        one = {"role": _SHAREGPT.get(one["from"], one["from"]), "content": one["value"]}
    if not isinstance(one, Mapping) or "role" not in one or "content" not in one:
        raise RecipeError(f"a row has the message {one!r:.60}; {_MESSAGES}")
    role, content = one["role"], one["content"]
    if role not in ROLES:
        near = "assistant" if str(role).lower() in _ANSWERING else "user" if str(role).lower() == "human" else None
        meant = f" - did you mean {near!r}?" if near else nearest(str(role), ROLES)
        raise RecipeError(f"a message has the role {role!r}, which is not one of {', '.join(ROLES)}{meant}")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and one.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RecipeError(
            f"a message of {role} has the content {content!r:.60}; text is needed, or a list of "
            "{type: text, text: ...}"
        )
    return {**{name: value for name, value in one.items() if value is not None}, "content": content}
