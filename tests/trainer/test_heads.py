"""Recipes of other heads than causal language models, on ranks against a loop of transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from recipe_files import LLAMA, sentences
from test_training import losses_of, metrics_of, train_on_rank
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader

from shardwright.testing import run_ranks
from shardwright.trainer import RecipeError, Trainer, build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.tasks import TASKS

BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 260,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
TAGS = ["O", "ANIMAL", "VERB"]


def tag(word: str) -> str:
    return "ANIMAL" if word in ("fox", "bird") else "VERB" if word in ("sees", "runs") else "O"


def word_tokenizer(folder: Path) -> str:
    """A word is a token, between a beginning and an end, as BERT has them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for line in sentences(60) for word in line.split()})
    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(special + words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    )
    made.save_pretrained(folder / "words")
    return str(folder / "words")


def task_recipe(folder: Path, task: str, config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Plain values of a recipe that starts from a saved model, over rows with the columns of every task."""
    lines, others = sentences(18), sentences(18, 1)
    rows = [
        {
            "text": line,
            "text_pair": other,
            "label": int("fox" in line),
            "words": line.split(),
            "tags": [tag(word) for word in line.split()],
            "prompt": line,
            "completion": other,
        }
        for line, other in zip(lines, others, strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = {
        "sequence-classification": {"text": "text", "text_pair": "text_pair"},
        "token-classification": {"words": "words"},
        "seq2seq-lm": {"prompt": "prompt", "completion": "completion"},
    }.get(task, {"text": "text"})
    if config is LLAMA:
        read = {"text": "text"}
        for row in rows:
            del row["text_pair"]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "max_length": 24, **read}
    return {
        "task": task,
        "model": {"config": dict(config)},
        "tokenizer": word_tokenizer(folder) if config is BERT else "bytes",
        "data": data,
        "eval_data": data,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-5,  # with less of it, what rounding leaves of a gradient that is none makes whole steps
        "seed": 1,
        "save_strategy": "no",
    } | changes


def by_hand(given: dict[str, Any], batch_size: int) -> tuple[list[float], Any, Any, Any]:
    """Losses of a plain loop with transformers' own loss, the model, the samples, and all of them as one batch."""
    parts = prepare(build_recipe(given))
    dataset = parts.dataset("data")
    model = getattr(transformers, TASKS[given["task"]].auto).from_pretrained(given["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given["learning_rate"], eps=given["adam_epsilon"], weight_decay=0.0
    )
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=3)
    order = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=given["seed"], shuffle=True)
    losses: list[float] = []
    for batch in DataLoader(dataset, batch_size, sampler=order, collate_fn=parts.collate("data")):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == 3:
            break
    return losses, model, dataset, parts.collate("data")([dataset[at] for at in range(len(dataset))])


def evaluated(given: dict[str, Any], model: Any, whole: dict[str, Any]) -> tuple[float, float]:
    """The loss and the accuracy of all samples."""
    with torch.no_grad():
        outputs = model.eval()(**whole)
    counted = whole["labels"] != -100
    right = (outputs.logits.argmax(-1) == whole["labels"])[counted] if "class" in given["task"] else torch.zeros(1)
    return outputs.loss.item(), right.double().mean().item()


CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("sequence-classification", BERT, 4, {"layout": {"tp_size": 2, "zero_stage": 1}, "labels": ["no", "fox"]}),
    ("sequence-classification", LLAMA, 2, {"layout": {"pp_size": 2, "num_microbatches": 4}}),
    ("token-classification", BERT, 2, {"layout": {"pp_size": 2, "num_microbatches": 4}, "labels": TAGS}),
    ("masked-lm", BERT, 2, {"layout": {"zero_stage": 2}}),
    ("seq2seq-lm", T5, 2, {"layout": {"tp_size": 2}}),
]


@pytest.mark.parametrize(("task", "config", "world_size", "changes"), CASES, ids=lambda one: str(one)[:24])
def test_a_head_learns_as_in_a_plain_loop(
    tmp_path: Path, task: str, config: dict[str, Any], world_size: int, changes: dict[str, Any]
) -> None:
    given = task_recipe(tmp_path, task, config, **changes)
    parts = prepare(build_recipe(given))
    torch.manual_seed(3)
    getattr(transformers, TASKS[task].auto).from_config(parts.config).save_pretrained(tmp_path / "start")
    given |= {"model": str(tmp_path / "start")}
    replicas = world_size // 2 if {"tp_size", "pp_size"} & given["layout"].keys() else world_size
    losses, model, _, whole = by_hand(given, 4 * replicas)
    eval_loss, accuracy = evaluated(given, model, whole)
    run_ranks(train_on_rank, world_size, given)
    assert losses_of(given) == pytest.approx(losses, abs=2e-5)
    told = metrics_of(given)[-1]
    assert told["eval_loss"] == pytest.approx(eval_loss, abs=2e-5)
    assert told.get("eval_accuracy") == (pytest.approx(accuracy) if TASKS[task].labelled else None)
    trained = type(model).from_pretrained(Path(given["output_dir"]) / "model", dtype=torch.float32)
    assert trained.config.id2label == model.config.id2label
    for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (theirs - ours).abs().max() < 1e-5, name


MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sequence-clasification", BERT, {}, "did you mean 'sequence-classification'"),
    ("sequence-classification", {"model_type": "mamba", "vocab_size": 260}, {}, "mamba is no sequence-classification"),
    ("sequence-classification", BERT, {"labels": ["one"]}, "two different names"),
    ("sequence-classification", BERT, {"mlm_probability": 0.2}, "say task: masked-lm"),
    ("token-classification", BERT, {}, "the label 'O' is not one of the model's LABEL_0, LABEL_1"),
    ("token-classification", BERT, {"labels": ["O", "ANIMALS", "VERB"]}, "did you mean 'ANIMALS'"),
    ("masked-lm", LLAMA, {}, "a llama is no masked-lm"),
    ("masked-lm", BERT, {"tokenizer": "bytes", "model": {"config": BERT | {"vocab_size": 260}}}, "no mask token"),
    ("masked-lm", BERT, {"labels": TAGS}, "a masked-lm has none"),
    ("masked-lm", BERT, {"chat_template": "{{ messages }}"}, "has no conversations"),
    ("seq2seq-lm", T5 | {"decoder_start_token_id": None}, {"tokenizer": "bytes"}, "no decoder_start_token_id"),
    ("causal-lm", LLAMA, {"data": {"path": "a.jsonl", "label": "label"}}, "say task: sequence-classification"),
    ("masked-lm", BERT, {"data": {"path": "a.jsonl", "packing": True}}, "packing: true is for causal-lm"),
    ("masked-lm", BERT, {"data": {"path": "a.jsonl", "prompt": "p", "completion": "c"}}, "it has text"),
]


@pytest.mark.parametrize(("task", "config", "changes", "said"), MISTAKES, ids=[one[-1][:30] for one in MISTAKES])
def test_a_mistake_is_one_sentence(
    tmp_path: Path, task: str, config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        prepare(build_recipe(task_recipe(tmp_path, task, config, **changes)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("sequence-classification", {"text": "a fox", "label": 2}, "no number from 0 to 1"),
        ("sequence-classification", {"text": "a fox", "label": True}, "no number from 0 to 1"),
        ("sequence-classification", {"text": 3, "label": 0}, "text is 3; text is needed"),
        ("token-classification", {"words": ["a", "fox"], "tags": ["O"]}, "2 words and the tags ['O']"),
        ("token-classification", {"words": "a fox", "tags": ["O"]}, "a list of texts is needed"),
        ("token-classification", {"words": ["a"], "tags": ["Q"]}, "the label 'Q' is not one of the model's O, ANIMAL"),
        ("masked-lm", {"text": None}, "text is None"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path: Path, task: str, row: dict[str, Any], said: str) -> None:
    labels = TAGS if task == "token-classification" else None
    given = task_recipe(tmp_path, task, BERT, labels=labels, eval_data=None, eval_strategy="no", eval_steps=None)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text_pair": "a", **row}) + "\n")
    with pytest.raises(RecipeError) as caught:
        prepare(build_recipe(given))
    assert said in str(caught.value)
    assert "rows.jsonl:1: " in str(caught.value)


def test_masks_are_those_of_the_text_and_the_seed(tmp_path: Path) -> None:
    given = task_recipe(tmp_path, "masked-lm", BERT, mlm_probability=0.5)
    parts = prepare(build_recipe(given))
    encoder, other = parts.encoder("data"), prepare(build_recipe({**given, "seed": 2})).encoder("data")
    lines = [{"text": line} for line in sentences(200)]
    found = [encoder.one(line).values for line in lines]
    assert found == [encoder.one(line).values for line in lines] != [other.one(line).values for line in lines]
    pairs = [pair for one in found for pair in zip(one["input_ids"], one["labels"], strict=True)]
    told = [(token, label) for token, label in pairs if label != -100]
    assert not {label for _, label in told} & {0, 2, 3, 4}, "special tokens are not asked for"
    assert 0.4 < len(told) / sum(len(line["text"].split()) for line in lines) < 0.65
    assert 0.7 < sum(token == encoder.mask for token, _ in told) / len(told) < 0.9


def test_an_evaluation_at_the_ends_needs_one() -> None:
    booster: Any = None
    with pytest.raises(ValueError, match="evaluate_at_ends=True needs evaluation"):
        Trainer(booster, None, None, None, total_steps=1, directory="out", evaluate_at_ends=True)
