"""Which tokens of a text are those of a part of it.

A text is always tokenised whole: in pieces a tokenizer would give other tokens than a model sees when it is used.
GPT-2's have the space before a word in the word's token, sentencepiece's put one before every piece, BERT's joins what
no space parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

Span = tuple[int, int]  # characters of a text: the first, and the one behind the last


def places(found: Any, text: str) -> list[Span]:
    """The characters of `text` that each token of a fast tokenizer stands for, without space at their ends.

    found   what the tokenizer made of it with return_offsets_mapping and return_special_tokens_mask. Tokens that it
            added stand for (0, 0). Of space alone a token has the space, also where the tokenizer leaves it out of its
            offsets.
    """
    spans: list[Span] = []
    reached = 0
    for (start, end), added in zip(found["offset_mapping"], found["special_tokens_mask"], strict=True):
        if added and start == end:
            spans.append((0, 0))
            continue
        start, end = min(start, reached) if start == end else start, max(start, end)
        kept = text[start:end].strip()
        if kept:
            first = start + text[start:end].index(kept)
            start, end = first, first + len(kept)
        spans.append((start, end))
        reached = max(reached, end)
    return spans


def tokens_within(tokenizer: Any, found: Any, text: str, spans: Sequence[Span]) -> list[bool]:
    """Of each token whether it has a part of one of `spans` of the text; a space does not count beside a word.

    found   as in `places`; of a tokenizer that is not fast the ids, whose places follow from what it makes of the
            beginnings of the text.
    """
    if tokenizer.is_fast:
        # A token (start, end) has a part of a span (first, last) if start < last and first < end. Of the spans with
        # first < end the highest last tells: a conversation of many answers is read once, not once per answer.
        firsts = sorted(first for first, _ in spans)
        highest = [0, *accumulate((last for _, last in sorted(spans)), max)]
        return [start < end and start < highest[bisect_left(firsts, end)] for start, end in places(found, text)]
    ids = list(found["input_ids"])
    marks = [False] * len(ids)
    for first, last in spans:
        start, end = (_shared(tokenizer, text[:at], ids) if at < len(text) else len(ids) for at in (first, last))
        marks[start:end] = [True] * max(0, end - start)
    return marks


_BEYOND = 64  # tokens at the end of a beginning that may be others in the whole text


def reach_of(tokenizer: Any, found: Any, text: str, needed: int | None) -> int:
    """So many characters of the text have its first `needed` tokens; None: all of it.

    A tokenizer that is not fast is asked for beginnings of twice the length each time, so that places in a long text
    cost what its needed part does.
    """
    if needed is None or len(found["input_ids"]) <= needed:
        return len(text)
    if tokenizer.is_fast:
        return max((end for _, end in found["offset_mapping"][:needed]), default=len(text))
    size = needed
    while size < len(text):
        if _shared(tokenizer, text[:size], found["input_ids"]) >= needed + _BEYOND:
            return size
        size *= 2
    return len(text)


def _shared(tokenizer: Any, beginning: str, ids: Sequence[int]) -> int:
    """How many of the first tokens are those of a beginning of the text alone."""
    alone = tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]
    pairs = enumerate(zip(alone, ids, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(alone), len(ids)))
