"""The demo's parts that need no ranks: the language, the settings, the chart, the options."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import pytest

from shardwright.cli.demo.grammar import IDS, NUMBERS, STOP, Grammar, entropy, questions
from shardwright.cli.demo.layout import Layout, nearest_worlds
from shardwright.cli.demo.settings import DemoSettings
from shardwright.cli.main import main


def text(seed: int, length: int):
    return Grammar(random.Random(seed)).text(length)


def test_the_text_is_fixed_by_the_seed() -> None:
    assert text(1, 200) == text(1, 200) != text(2, 200)


def test_every_word_has_an_id() -> None:
    assert {step.word for step in text(0, 20_000)} <= set(IDS)
    assert len(IDS) == 1 + max(IDS.values())


def test_probabilities_are_the_frequencies_after_the_same_beginning() -> None:
    """Over the first three words of sentences: what `entropy` claims is what the generator does."""
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    stated: dict[tuple[tuple[str, ...], str], float] = {}
    grammar = Grammar(random.Random(3))
    for _ in range(40_000):
        sentence = list(grammar.sentence())
        for place in range(3):
            before = tuple(step.word for step in sentence[:place])
            counts[before][sentence[place].word] += 1
            assert (
                stated.setdefault((before, sentence[place].word), sentence[place].probability)
                == sentence[place].probability
            )
    for (before, word), probability in stated.items():
        seen = counts[before].total()
        if seen > 500:
            spread = math.sqrt(probability * (1 - probability) / seen)
            assert abs(counts[before][word] / seen - probability) < 5 * spread + 1e-12, (before, word)
    assert sum(stated[(), word] for word in counts[()]) == pytest.approx(1)


def test_the_probability_of_a_word_depends_only_on_the_words_before_it() -> None:
    """Otherwise the sum of surprises would not be the entropy that a model sees."""
    known: dict[tuple[str, ...], float] = {}
    grammar = Grammar(random.Random(4))
    for _ in range(20_000):
        beginning: tuple[str, ...] = ()
        for step in grammar.sentence():
            beginning = (*beginning, step.word)
            assert known.setdefault(beginning, step.probability) == pytest.approx(step.probability)


def test_sums_are_right_and_verbs_agree() -> None:
    sentences = " ".join(step.word for step in text(5, 5000)).split(STOP)[1:-1]
    sums = [sentence.split() for sentence in sentences if " is " in sentence]
    assert sums
    for left, operation, right, _, result in sums:
        sign = 1 if operation == "plus" else -1
        assert NUMBERS.index(left) + sign * NUMBERS.index(right) == NUMBERS.index(result)
    assert any(len(sentence.split()) > 8 for sentence in sentences)


def test_entropy_is_the_mean_surprise() -> None:
    steps = text(6, 3)
    assert entropy(steps) == pytest.approx(-(math.log(steps[1].probability) + math.log(steps[2].probability)) / 2)


def test_questions_of_a_kind_have_one_length_and_known_words() -> None:
    lengths = defaultdict(set)
    for question in questions():
        lengths[question.kind].add(len(question.prompt.split()))
        assert {*question.prompt.split(), *question.answers} <= set(IDS)
    assert {kind: len(found) for kind, found in lengths.items()} == {"sums": 1, "agreement": 1}


@pytest.mark.parametrize(
    ("batch", "wanted", "expected"), [(32, 3, (2, 4)), (32, 4, (4, 4)), (30, 7, (6, 8)), (4, 99, (16, 16))]
)
def test_nearest_worlds(batch: int, wanted: int, expected: tuple[int, int]) -> None:
    assert nearest_worlds(batch, wanted) == expected


@pytest.mark.parametrize(
    ("world", "tp", "pp", "dp"), [(1, 1, 1, 1), (2, 1, 2, 1), (3, 1, 1, 3), (4, 2, 2, 1), (6, 1, 2, 3), (8, 2, 2, 2)]
)
def test_layouts_use_all_ranks(world: int, tp: int, pp: int, dp: int) -> None:
    layout = Layout.for_world(world, 24, "cpu")
    assert (layout.tp, layout.pp, layout.dp) == (tp, pp, dp)
    assert layout.ranks == world
    assert layout.fits


def test_a_world_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"3 parts, which does not divide --batch-size 16.*world size of 2 or 4.*batch size of 18"
    ):
        DemoSettings(world_size=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "0 is too small, the least is 1"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--world-size", "3", "--device", "cpu"], "a world size of 2 or 4"),
        (["--world-size", "-2"], "-2 is too small"),
        (["--seed", "-1"], "-1 is too small"),
        (["--seed", "9" * 23], "too large, seeds are below 2**32"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--zero", "4"], "invalid choice: 4"),
        (["--pp-style", "1f1b,1f1b"], "not a list of different schedules"),
        (["--device", "cpu", "--tp", "2", "--world-size", "3"], "is no multiple of --tp 2 x --pp 1 x --sp 1"),
        (["--device", "cpu", "--tp", "2", "--world-size", "6"], "a batch size of 18 would work"),
        (["--device", "cpu", "--pp", "2", "--pp-style", "1f1b,zbw"], "did you mean"),
        (["--device", "cpu", "--tp", "2", "--pp-style", "zb"], "needs a pipeline; say --pp 2"),
        (["--device", "cpu", "--sp", "128"], "--sp 128 takes 128 ranks, and the CPU of this machine at most "),
        (["--device", "cpu", "--world-size", "4096"], "--world-size 4096 takes 4096 ranks"),
        (["--output", __file__], "is a file; name a directory"),
        (["--output", f"{__file__}/below"], "cannot be written to (Not a directory); name another directory"),
        (["--output", "/proc/nowhere"], "cannot be written to ("),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_bad_options_end_with_one_clear_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
