"""From rows to batches: what is learned, what is packed, and that packed samples are those that they were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_files import LLAMA, recipe, sentences, write_chat, write_text
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardwright.testing.exact import keep_float64
from shardwright.trainer import build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.datasets import Collate, Evened
from shardwright.trainer.packing import fill
from shardwright.trainer.samples import IGNORED, Encoder
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

    collate = Collate(parts.padding)
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
    batch = Collate(parts.padding)([dataset[0], dataset[1], dataset[2]])
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape[1] == lengths.max()
    assert len(set(lengths.tolist())) > 1
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    even = Evened(dataset, 16)
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
