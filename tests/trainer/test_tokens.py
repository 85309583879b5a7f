"""What a sample's tokens are: those of its whole text, whatever the tokenizer does with spaces between its parts."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import BertConfig, PreTrainedTokenizerFast

from shardwright.trainer.errors import RecipeError
from shardwright.trainer.heads import Labels, TaggedWords
from shardwright.trainer.models import load_config
from shardwright.trainer.recipe import Recipe
from shardwright.trainer.samples import IGNORED, Encoder
from shardwright.trainer.spans import places, tokens_within
from shardwright.trainer.tokenizer import CHAT_TEMPLATE, load_tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog. the dog sleeps, and the fox runs on!",
    "what is two and two? two and two is four. \u00fcber \u4e16\u754c naming and renaming, unrelated names",
    "New York and New Jersey are on the coast; assistant: yes, user: no, system: be brief",
] * 4
MARKS = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def gpt2(trim: bool = True) -> Tokenizer:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.post_processor = processors.ByteLevel(trim_offsets=trim)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return plain


def llama() -> Tokenizer:
    """As sentencepiece has it: a space before the text, and none lost."""
    plain = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    words = [f"\u2581{word}" for text in TEXTS for word in text.split()]
    plain.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"]))
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return plain


def metaspace() -> Tokenizer:
    plain = Tokenizer(models.Unigram())
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return plain


def bert() -> Tokenizer:
    plain = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    plain.normalizer = normalizers.BertNormalizer()
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    plain.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    plain.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return plain


KINDS = {"gpt2": gpt2, "gpt2 untrimmed": lambda: gpt2(False), "llama": llama, "metaspace": metaspace, "bert": bert}


def made(kind: str) -> Any:
    plain = KINDS[kind]()
    plain.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=MARKS[0], pad_token=MARKS[0])


PAIRS = [
    ("what is two and two?", " four"),
    ("what is two and two? ", "four"),
    ("what is two and two?", "four"),
    ("the un", "related dog"),
    ("the dog\n", " sleeps,\n and  runs "),
    ("\u4e16", "\u754c \u00fcber"),
    ("", "the fox"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_prompt_and_its_answer_are_those_of_the_text(kind: str) -> None:
    tokenizer = made(kind)
    for prompt, answer in PAIRS:
        sample = Encoder(tokenizer, 64).one({"prompt": prompt, "completion": answer})
        assert sample.ids == [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        learned = [label for label in sample.labels if label != IGNORED]
        assert learned == sample.ids[-len(learned) :], "all of the end"
        # What is not learned has nothing of the answer, and what is learned has a part of it.
        kept = len(sample.ids) - len(learned)
        spans = tokenizer(prompt + answer, return_offsets_mapping=True)["offset_mapping"]
        for at, (start, end) in enumerate(spans):
            inside = (prompt + answer)[max(start, len(prompt)) : end].strip() if end > len(prompt) else ""
            assert bool(inside) <= (at >= kept), (prompt, answer, at)
            outside = (prompt + answer)[start : min(end, len(prompt))].strip()
            assert at < kept or bool(inside) or not outside, (prompt, answer, at)


TALK = [
    {"role": "user", "content": "what is two and two?"},
    {"role": "assistant", "content": " two and two is four. "},
    {"role": "user", "content": "the quick brown fox?"},
    {"role": "assistant", "content": "yes, the dog sleeps"},
]
PLAIN = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Nothing parts the answer from what stands around it but spaces.
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BARE_MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %} {{ m.content }}\n"
    "{% endgeneration %}{% else %} {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN, BARE, BARE_MARKED], ids=["marked", "plain", "bare", "both"])
def test_tokens_of_a_conversation_are_those_of_the_text(kind: str, template: str) -> None:
    """And the answers, from their first word to their last, are learned, and nothing of the questions."""
    tokenizer = made(kind)
    tokenizer.chat_template = template
    sample = Encoder(tokenizer, 512).one({"messages": TALK})
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert sample.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    learned = "".join(
        text[start:end] for (start, end), label in zip(spans, sample.labels, strict=True) if label != IGNORED
    )
    words = learned.replace("<|im_end|>", " ").split()
    assert "".join(words) == "twoandtwoisfour.yes,thedogsleeps"


def test_tokens_within_spans_in_any_order() -> None:
    """Against the rule as it is said: a token has a part of a span."""
    draw = random.Random(3)
    tokenizer: Any = SimpleNamespace(is_fast=True)
    for _ in range(300):
        edges = sorted(draw.choices(range(30), k=12))
        tokens = list(pairwise(edges))
        spans = [(one, one + draw.randrange(9)) for one in draw.choices(range(30), k=draw.randrange(5))]
        found = {"offset_mapping": tokens, "special_tokens_mask": [0] * len(tokens)}
        expected = [
            start < end and any(start < last and first < end for first, last in spans)
            for start, end in places(found, "x" * 30)
        ]
        assert tokens_within(tokenizer, found, "x" * 30, spans) == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN], ids=["marked", "plain"])
def test_the_beginning_of_a_long_conversation_is_looked_at_alone(template: str) -> None:
    tokenizer = made("gpt2")
    tokenizer.chat_template = template
    row = {"messages": TALK * 20}
    whole = Encoder(tokenizer, 64).whole(row)
    written = 0
    write = tokenizer.apply_chat_template

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal written
        written += 1
        return write(*args, **options)

    tokenizer.apply_chat_template = counting
    for length in (1, 20, 33, 64):
        sample = Encoder(tokenizer, length).one(row)
        assert sample.ids == whole.ids[:length]
        assert sample.labels == whole.labels[:length]
    assert written <= (0 if "generation %}" in template else 60), "of 40 answers, three times each, at 4 lengths"


WORDS = [
    ["the", "quick", "fox", ",", "unrelated", "New", "York"],
    ["\u4e16\u754c", "\u00fcber", "", "dog", "renaming", "a b", "."],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", WORDS, ids=["plain", "odd"])
def test_tokens_of_tagged_words_are_those_of_the_text(kind: str, words: list[str]) -> None:
    """GPT-2's tokenizer has the space in the token of the word behind it."""
    tokenizer = made(kind)
    config = BertConfig(num_labels=len(words))
    tags = list(range(len(words)))
    features = TaggedWords(tokenizer, 64, False, Labels(config)).one({"words": words, "tags": tags})
    ids, labels = features.values["input_ids"], features.values["labels"]
    text = " ".join(words)
    found = tokenizer(text, return_offsets_mapping=True)
    assert ids == found["input_ids"]
    starts = [sum(len(word) + 1 for word in words[:at]) for at in tags]
    firsts = {}
    for at, (start, end) in enumerate(found["offset_mapping"]):
        for word, first in enumerate(starts):
            if start < first + len(words[word]) and first < end and text[start:end].strip():
                firsts.setdefault(word, at)
    firsts = {word: at for word, at in firsts.items() if words[word]}
    assert {label: at for at, label in enumerate(labels) if label != IGNORED} == firsts
    assert set(firsts) == {at for at, word in enumerate(words) if word}


def test_tagged_words_of_bert_have_the_tokens_that_transformers_gives_words() -> None:
    tokenizer = made("bert")
    words = WORDS[0]
    features = TaggedWords(tokenizer, 64, False, Labels(BertConfig(num_labels=9))).one(
        {"words": words, "tags": range(7)}
    )
    found = tokenizer(words, is_split_into_words=True)
    assert features.values["input_ids"] == found["input_ids"]
    tags = [IGNORED if word is None else word for word in found.word_ids()]
    once = [tag if tag not in tags[:at] else IGNORED for at, tag in enumerate(tags)]
    assert features.values["labels"] == once


class Slow:
    """A tokenizer that tells no places."""

    is_fast, chat_template = False, PLAIN

    def __init__(self, fast: Any) -> None:
        self.fast, self.eos_token_id = fast, fast.eos_token_id
        fast.chat_template = PLAIN
        self.apply_chat_template = fast.apply_chat_template

        self.read = 0  # characters

    def get_chat_template(self) -> str:
        return str(self.chat_template)

    @property
    def special_tokens_map(self) -> Any:
        return self.fast.special_tokens_map

    def __call__(self, text: str, return_offsets_mapping: bool = False, **options: Any) -> Any:
        assert not return_offsets_mapping
        self.read += len(text)
        return self.fast(text, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_that_tell_no_places(kind: str) -> None:
    """Marks of a template part the answers, so that the same is learned."""
    slow: Any = Slow(made(kind))
    told = Encoder(slow, 512).one({"messages": TALK})
    fast = Encoder(slow.fast, 512).one({"messages": TALK})
    assert told.ids == fast.ids
    tokens = slow.fast.convert_ids_to_tokens(told.ids)
    other = [token for token, one, two in zip(tokens, told.labels, fast.labels, strict=True) if one != two]
    assert not {token.strip("\u2581\u0120\u010a") for token in other} - {""}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN], ids=["marked", "plain"])
def test_the_end_of_a_long_text_costs_such_a_tokenizer_one_look(template: str) -> None:
    """Of a conversation ten times as long, ten times as much is read, and not a hundred times."""
    slow: Any = Slow(made("gpt2"))
    slow.chat_template = slow.fast.chat_template = template
    cost = {}
    for turns in (20, 200):
        row = {"messages": TALK * turns}
        whole = Encoder(slow, 64).whole({"messages": TALK * 20})
        text = slow.fast.apply_chat_template(row["messages"], tokenize=False)
        for length in (1, 33, 100, 300):
            slow.read = 0
            sample = Encoder(slow, length).one(row)
            cost[turns, length] = slow.read - len(text)
            assert sample.ids == whole.ids[:length]
            assert sample.labels == whole.labels[:length]
    assert [cost[200, length] for length in (1, 33, 100, 300)] == [cost[20, length] for length in (1, 33, 100, 300)]


def test_a_broken_chat_template_is_refused_whatever_the_samples_are() -> None:
    """It is saved beside the model, where text of it would fail later."""
    with pytest.raises(RecipeError, match=r"chat_template is no Jinja template: .*line 1"):
        load_tokenizer("bytes", {}, "{% for m in %}")
    assert load_tokenizer("bytes", {}, "{{ raise_exception('a system message is needed') }}").chat_template


def test_an_unknown_model_type_is_answered_with_the_nearest() -> None:
    """transformers lists all of the hundreds that it has."""
    with pytest.raises(RecipeError) as caught:
        load_config(Recipe(model={"config": {"model_type": "lama"}}))
    assert len(str(caught.value)) < 150
    assert "did you mean 'llama'?" in str(caught.value)
