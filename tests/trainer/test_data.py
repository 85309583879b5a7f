"""From rows to batches: what is learned, what is packed, and that packed samples are those that they were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_files import LLAMA, recipe, sentences, write_chat, write_text
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.testing.exact import keep_float64
from shardwright.trainer import RecipeError, build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.counting import labels_of, tokens_of
from shardwright.trainer.datasets import Evened, EvenedSampler
from shardwright.trainer.packing import fill
from shardwright.trainer.samples import IGNORED, Encoder
from shardwright.trainer.sources import Mixture
from shardwright.trainer.tokenizer import CHAT_TEMPLATE, byte_tokenizer


def test_bytes_come_back(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 260
    text = "Gr\u00fc\u00dfe, \u4e16\u754c!\n\t \U0001f98a "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids
    assert again.chat_template == CHAT_TEMPLATE


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a fox?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "no, one"},
]


@pytest.mark.parametrize("marked", [True, False])
def test_answers_alone_are_learned(marked: bool) -> None:
    """With a template that marks the answers, and with one that does not."""
    tokenizer = byte_tokenizer()
    if not marked:
        tokenizer.chat_template = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    sample = Encoder(tokenizer, 512).one({"messages": TALK})
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(sample.ids) == whole
    learned = tokenizer.decode([label for label in sample.labels if label != IGNORED])
    assert learned == "yes<|im_end|>\nno, one<|im_end|>\n"


def test_a_completion_is_learned_with_its_end() -> None:
    tokenizer = byte_tokenizer()
    sample = Encoder(tokenizer, 64).one({"prompt": "2+2=", "completion": "4"})
    assert tokenizer.decode(sample.ids) == "2+2=4<|end|>"
    assert sample.labels == [IGNORED] * 4 + sample.ids[4:]
    assert sample.learned == 2


def test_groups_hold_everything_once() -> None:
    lengths = [int(length) for length in torch.randint(1, 40, (300,), generator=torch.Generator().manual_seed(1))]
    groups = list(fill(enumerate(lengths), 64))
    assert sorted(key for group in groups for key in group) == list(range(300))
    assert all(sum(lengths[key] for key in group) <= 64 for group in groups)
    assert sum(lengths) / (64 * len(groups)) > 0.95


@pytest.mark.parametrize("streaming", [False, True])
def test_packed_is_as_alone(tmp_path: Path, streaming: bool) -> None:
    """The sum over all tokens of the loss, and its gradient, of packed sequences and of texts one by one."""
    data = {
        "path": str(write_text(tmp_path / "t.jsonl", 30)),
        "packing": True,
        "max_length": 80,
        "streaming": streaming,
    }
    parts = prepare(build_recipe(recipe(tmp_path, data=data)))
    torch.manual_seed(0)
    given = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**given)).double()

    def total(batches: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        model.zero_grad()
        loss, count = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            labelled = int((batch["labels"][:, 1:] != IGNORED).sum())
            with keep_float64():
                loss, count = loss + model(**batch, use_cache=False).loss * labelled, count + labelled
        loss.backward()
        return loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone(), count

    collate = parts.collate("data")
    items = list(parts.dataset("data"))
    assert len(items) < 20  # several texts in each
    packed = total([collate(items[:3]), collate(items[3:])])
    tokenizer = byte_tokenizer()
    alone = []
    for text in sentences(30):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        alone += [{"input_ids": piece, "labels": piece} for piece in ids.split(80, dim=1) if piece.shape[1] > 1]
    single = total(alone)
    assert packed[2] == single[2]
    assert abs(packed[0] - single[0]) < 1e-9 * single[0]
    assert (packed[1] - single[1]).abs().max() < 1e-10


def test_a_batch_is_filled_behind_its_ends(tmp_path: Path) -> None:
    parts = prepare(build_recipe(recipe(tmp_path, data={"path": str(write_chat(tmp_path / "c.jsonl"))})))
    dataset = parts.dataset("data")
    batch = parts.collate("data")([dataset[0], dataset[1], dataset[2]])
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape[1] == lengths.max()
    assert len(set(lengths.tolist())) > 1
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    even = Evened(dataset, 16, parts.padding)
    assert len(even) == 48
    assert all((even[at]["labels"] == IGNORED).all() for at in range(40, 48))


def test_a_long_text_is_cut_or_goes_on_in_the_next_sequence(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "ab" * 100}) + "\n")
    cut = prepare(build_recipe(recipe(tmp_path, data={"path": str(path), "max_length": 64}))).dataset("data")
    assert len(cut) == 1
    assert len(cut[0]["input_ids"]) == 64
    packing = {"path": str(path), "max_length": 64, "packing": True}
    packed = prepare(build_recipe(recipe(tmp_path, data=packing))).dataset("data")
    assert sum(int((packed[at]["labels"] != IGNORED).sum()) for at in range(len(packed))) == 201 - len(packed)


def test_workers_of_a_stream_give_every_sample_once(tmp_path: Path) -> None:
    """In the order that one process has, and going on where they were."""
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:03d}"}) + "\n" for number in range(32)))
    for packing in (False, True):
        data = {"path": str(path), "max_length": 16, "streaming": True, "packing": packing}
        parts = prepare(build_recipe(recipe(tmp_path, data=data)))

        def loader(workers: int, parts: Any = parts) -> DataLoader:
            dataset = parts.dataset("data")
            dataset.step = 4
            sizes = {"batch_size": 4, "num_replicas": 1, "rank": 0, "num_workers": workers}
            return build_dataloader(dataset, **sizes, collate_fn=parts.collate("data"))

        def texts(batches: Any, parts: Any = parts) -> list[str]:
            rows = [parts.tokenizer.decode(row) for batch in batches for row in batch["input_ids"]]
            return [text for row in rows for text in row.replace("<|pad|>", "").split("<|end|>") if text]

        alone, shared = texts(loader(0)), texts(loader(2))
        assert sorted(shared) == sorted(alone) == [f"{number:03d}" for number in range(32)]
        assert packing or shared == alone
        first = loader(2)
        running = iter(first)
        begun = texts([next(running)])
        second = loader(2)
        second.load_state_dict(first.state_dict())
        assert begun + texts(second) == shared


def test_every_sample_comes_once_in_a_pass() -> None:
    """Behind the shuffled order of plain torch comes what fills up the last step."""
    samples = torch.arange(10)
    evened: Any = Evened(samples, 4, 0)
    for replicas in (1, 2):
        order: Any = [EvenedSampler(evened, replicas, rank, shuffle=True, seed=3) for rank in range(replicas)]
        plain: Any = torch.utils.data.DistributedSampler(samples, 1, 0, shuffle=True, seed=3)
        for epoch in range(2):
            plain.set_epoch(epoch)
            dealt = [list(one) for one in order]
            assert [at for step in zip(*dealt, strict=True) for at in step] == [*plain, 10, 11]


def test_a_mixture_has_its_shares_from_all_of_a_source() -> None:
    """Half of each: of ten rows seven are chosen from first to last, and four come around."""
    mixture = Mixture([[f"a{number}" for number in range(10)], [f"b{number}" for number in range(4)]], [2, 2])
    rows: list[Any] = list(mixture)
    assert rows[::2] == ["a0", "a1", "a2", "a4", "a5", "a7", "a8"]
    assert rows[1::2] == ["b0", "b1", "b2", "b3", "b0", "b1", "b2"]


def test_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    path = write_text(tmp_path / "t.jsonl", 30)
    for packing in (False, True):
        data = {"path": str(path), "max_length": 100, "packing": packing}
        parts = prepare(build_recipe(recipe(tmp_path, data=data)))
        evened = Evened(parts.dataset("data"), 8, parts.padding)
        assert len(evened) > len(evened.samples)
        batch = parts.collate("data")([evened[at] for at in range(len(evened))])
        assert tokens_of(batch) == sum(len(text) + 1 for text in sentences(30))
        assert labels_of(batch) == sum(len(text) for text in sentences(30))
    assert tokens_of({"pixel_values": torch.zeros(3, 2), "labels": torch.zeros(3)}) == 0
    assert labels_of({"pixel_values": torch.zeros(3, 2), "labels": torch.zeros(3)}) == 3


PLAIN = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# What a conversation has that cannot be learned, the template where it is none of ours, and what is said.
TALKS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([TALK[1], {"role": "gpt", "content": "yes"}], CHAT_TEMPLATE, "did you mean 'assistant'"),
    ([TALK[1], {"role": "Assistant", "content": "yes"}], CHAT_TEMPLATE, "did you mean 'assistant'"),
    ([{"role": "user", "content": 3}, TALK[2]], CHAT_TEMPLATE, "the content 3; text is needed"),
    ([TALK[1], {"role": "assistant", "content": None}], CHAT_TEMPLATE, "the content None"),
    ([TALK[1], {"role": "assistant", "content": [{"type": "image_url", "image_url": "a"}]}], CHAT_TEMPLATE, "image"),
    ([TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}], CHAT_TEMPLATE, "tool_calls"),
    (TALK, PLAIN.split("{% if add_generation_prompt")[0], "does not look at add_generation_prompt"),
    ([TALK[2], TALK[1], TALK[4]], PLAIN, "begins with the assistant"),
    (TALK, "{{ raise_exception('no system here') }}", "no system here"),
    (TALK, "{% for message in messages %}", "cannot write a conversation"),
]


@pytest.mark.parametrize(("talk", "template", "said"), TALKS, ids=lambda one: one if isinstance(one, str) else "")
def test_conversations_that_cannot_be_learned(talk: list[dict[str, Any]], template: str, said: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RecipeError, match=said):
        Encoder(tokenizer, 512).one({"messages": talk})


def test_texts_in_a_list_are_one_text() -> None:
    tokenizer = byte_tokenizer()
    listed = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in TALK]
    assert Encoder(tokenizer, 512).one({"messages": listed}) == Encoder(tokenizer, 512).one({"messages": TALK})


def test_conversations_as_sharegpt_has_them() -> None:
    talk = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The fox."}]
    same = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    encoder = Encoder(byte_tokenizer(), 64)
    assert encoder.one({"messages": talk}) == encoder.one({"messages": same})
    with pytest.raises(RecipeError, match="the role 'bing'"):
        encoder.one({"messages": [{"from": "bing", "value": "a"}]})


@pytest.mark.parametrize("streaming", [False, True], ids=["counted", "streaming"])
def test_files_of_a_directory_are_of_one_kind(tmp_path: Path, streaming: bool) -> None:
    """What is hidden is no file of it: editors leave copies there."""
    folder = tmp_path / "talks"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    write_text(folder / "a.jsonl", 3)
    write_text(folder / ".ipynb_checkpoints" / "a-checkpoint.jsonl", 3)
    (folder / ".b.jsonl").write_text("half a line")
    given = recipe(tmp_path, data={"path": str(folder), "streaming": streaming})
    assert len(list(prepare(build_recipe(given)).rows["data"])) == 3
    write_chat(folder / "b.jsonl", 3)
    with pytest.raises(RecipeError, match=r"b\.jsonl:1 has no column 'text', which other files have; it has messages;"):
        prepare(build_recipe(given))
