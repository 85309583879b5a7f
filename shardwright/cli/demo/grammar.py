"""A little language with known statistics, the demo's training text.

    the fox near the birds sleeps .          verbs agree with the first noun, not with the nearest
    the small birds chase the fox .
    seven minus two is five .

Every word is drawn from a distribution that the words before it determine, so the entropy of the text is known exactly:
no model can reach a held-out loss below it on average, and a loss curve can be read against it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
)
NOUNS = (
    ("fox", "foxes"),
    ("bird", "birds"),
    ("cat", "cats"),
    ("horse", "horses"),
    ("child", "children"),
    ("king", "kings"),
)
ADJECTIVES = ("small", "old", "red", "quiet")
INTRANSITIVE = (("sleeps", "sleep"), ("sings", "sing"), ("waits", "wait"))
TRANSITIVE = (("sees", "see"), ("chases", "chase"), ("likes", "like"))
PREPOSITIONS = ("near", "behind")
STOP = "."
UNKNOWN = "<unk>"

WORDS = (
    *(UNKNOWN, STOP, "the", "plus", "minus", "is"),
    *NUMBERS,
    *(form for noun in NOUNS for form in noun),
    *ADJECTIVES,
    *(form for verb in INTRANSITIVE + TRANSITIVE for form in verb),
    *PREPOSITIONS,
)
IDS = {word: index for index, word in enumerate(WORDS)}


class Step(NamedTuple):
    """A word of the text and the probability it had, given all words before it."""

    word: str
    probability: float


class Question(NamedTuple):
    """A beginning of a sentence and the words that may come next; `kind` groups questions in the report."""

    kind: str
    prompt: str
    answers: frozenset[str]


@dataclass
class Grammar:
    """Draws sentences. The same seed gives the same text."""

    random: random.Random

    def text(self, length: int) -> list[Step]:
        """`length` words that begin where a sentence begins; the last sentence may be cut."""
        steps = [Step(STOP, 1.0)]
        while len(steps) < length:
            steps.extend(self.sentence())
        return steps[:length]

    def sentence(self) -> Iterator[Step]:
        if self._chance(0.5):
            yield from self._sum(0.5)
        else:
            yield from self._scene(0.5)

    def _sum(self, probability: float) -> Iterator[Step]:
        left = self.random.randrange(10)
        yield Step(NUMBERS[left], probability / 10)
        if self._chance(0.5):
            right = self.random.randrange(10)
            yield from (Step("plus", 0.5), Step(NUMBERS[right], 1 / 10))
            total = left + right
        else:
            right = self.random.randrange(left + 1)
            yield from (Step("minus", 0.5), Step(NUMBERS[right], 1 / (left + 1)))
            total = left - right
        yield from (Step("is", 1.0), Step(NUMBERS[total], 1.0), Step(STOP, 1.0))

    def _scene(self, probability: float) -> Iterator[Step]:
        """Subject, perhaps a place, a verb that agrees with the subject, perhaps an object."""
        yield Step("the", probability)
        number = yield from self._noun_phrase()
        before_verb = 1.0
        if self._chance(0.4):
            yield Step(self.random.choice(PREPOSITIONS), 0.4 / len(PREPOSITIONS))
            yield Step("the", 1.0)
            yield from self._noun_phrase()
        else:
            before_verb = 0.6
        if self._chance(0.5):
            yield Step(self.random.choice(INTRANSITIVE)[number], before_verb * 0.5 / len(INTRANSITIVE))
        else:
            yield Step(self.random.choice(TRANSITIVE)[number], before_verb * 0.5 / len(TRANSITIVE))
            yield Step("the", 1.0)
            yield from self._noun_phrase()
        yield Step(STOP, 1.0)

    def _noun_phrase(self) -> Generator[Step, None, int]:
        """An adjective or none, and a noun; returns 0 for the singular, 1 for the plural."""
        before_noun = 0.7
        if self._chance(0.3):
            yield Step(self.random.choice(ADJECTIVES), 0.3 / len(ADJECTIVES))
            before_noun = 1.0
        number = self.random.randrange(2)
        yield Step(self.random.choice(NOUNS)[number], before_noun / (2 * len(NOUNS)))
        return number

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability


def entropy(steps: list[Step]) -> float:
    """Mean surprise in nats of all words but the first: the lowest loss a model can have on this text, on average."""
    return -sum(math.log(step.probability) for step in steps[1:]) / (len(steps) - 1)


def questions() -> list[Question]:
    """What a model that has learned the language knows; prompts of one kind have the same number of words."""
    asked = []
    for left in range(10):
        for right in range(10):
            asked.append(
                Question("sums", f". {NUMBERS[left]} plus {NUMBERS[right]} is", frozenset({NUMBERS[left + right]}))
            )
            if right <= left:
                asked.append(
                    Question("sums", f". {NUMBERS[left]} minus {NUMBERS[right]} is", frozenset({NUMBERS[left - right]}))
                )
    for subject in NOUNS:
        for other in NOUNS:
            for number in (0, 1):
                verbs = frozenset(verb[number] for verb in INTRANSITIVE + TRANSITIVE)
                asked.append(Question("agreement", f". the {subject[number]} near the {other[1 - number]}", verbs))
    return asked
