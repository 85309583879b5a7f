"""Question answering and regression: windows, figures, and training against plain transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from recipe_files import LLAMA, sentences
from test_heads import BERT, by_hand, word_tokenizer
from test_training import losses_of, metrics_of, train_on_rank
from torch.utils.data import DataLoader

from shardwright.testing import run_ranks
from shardwright.trainer import RecipeError, build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.questions import normal, shared_words
from shardwright.trainer.tasks import TASKS

AUTO = {name: getattr(transformers, task.auto) for name, task in TASKS.items()}


def squad(count: int, none: bool = False) -> list[dict[str, Any]]:
    """Questions about what an animal does, of contexts of several sentences."""
    lines = sentences(4 * count)
    rows = []
    for at in range(count):
        some = lines[4 * at : 4 * at + 4]
        context = " ".join(some)
        words = some[at % 4].split()
        text = " ".join(words[1:3])
        start = sum(len(line) + 1 for line in some[: at % 4]) + len(words[0]) + 1
        answers: Any = {"text": [text, words[1]], "answer_start": [start, start]}
        if none and at % 5 == 4:
            answers = {"text": [], "answer_start": []}
        rows.append({"question": f"{words[0]} {words[-1]}", "context": context, "answers": answers})
    return rows


def task_recipe(folder: Path, task: str, rows: list[dict[str, Any]], config: dict[str, Any], **changes: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "max_length": 24}
    if task == "question-answering":
        data["stride"] = 4
    words = config.get("vocab_size") == BERT["vocab_size"]
    return {
        "task": task,
        "model": {"config": dict(config)},
        "tokenizer": word_tokenizer(folder) if words else "bytes",
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


def scored(count: int = 18) -> list[dict[str, Any]]:
    texts = sentences(count)
    return [{"text": text, "label": len(text) / 30 + at % 3} for at, text in enumerate(texts)]


CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("question-answering", BERT, 4, {"layout": {"tp_size": 2, "zero_stage": 1}}),
    ("question-answering", BERT, 2, {"layout": {"pp_size": 2, "num_microbatches": 4}}),
    ("sequence-regression", BERT, 4, {"layout": {"tp_size": 2, "zero_stage": 1}}),
    ("sequence-regression", LLAMA, 2, {"layout": {"pp_size": 2, "num_microbatches": 4}}),
]


@pytest.mark.parametrize(("task", "config", "world_size", "changes"), CASES, ids=lambda one: str(one)[:24])
def test_a_head_learns_as_in_a_plain_loop(
    tmp_path: Path, task: str, config: dict[str, Any], world_size: int, changes: dict[str, Any]
) -> None:
    rows = squad(9, none=True) if task == "question-answering" else scored()
    given = task_recipe(tmp_path, task, rows, config, **changes)
    parts = prepare(build_recipe(given))
    torch.manual_seed(3)
    AUTO[task].from_config(parts.config).save_pretrained(tmp_path / "start")
    given |= {"model": str(tmp_path / "start")}
    losses, model, dataset, whole = by_hand(given, 4 * (world_size // 2))
    with torch.no_grad():
        outputs = model.eval()(**whole)
    run_ranks(train_on_rank, world_size, given)
    assert losses_of(given) == pytest.approx(losses, abs=2e-5)
    told = metrics_of(given)[-1]
    assert told["eval_loss"] == pytest.approx(outputs.loss.item(), abs=2e-5)
    if task == "question-answering":
        exact, overlap = figures_by_hand(rows, dataset, outputs)
        assert (told["eval_exact_match"], told["eval_f1"]) == pytest.approx((exact, overlap))
    else:
        labels = [row["label"] for row in rows]
        wanted = numpy.corrcoef(outputs.logits[:, 0].numpy(), labels)[0, 1]
        assert told["eval_pearson"] == pytest.approx(wanted, abs=1e-4)
    trained = type(model).from_pretrained(Path(given["output_dir"]) / "model", dtype=torch.float32)
    assert task == "question-answering" or (trained.config.num_labels, trained.config.problem_type) == (1, "regression")
    for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (theirs - ours).abs().max() < 1e-5, name


def figures_by_hand(rows: list[dict[str, Any]], windows: Any, outputs: Any) -> tuple[float, float]:
    """Every span of every window is tried, and answers are compared as words."""
    exact, overlap = [], []
    for number, row in enumerate(rows):
        best, none = (-1e9, ""), 1e9
        for at in [at for at, of in enumerate(windows.row_of) if of == number]:
            start, end = outputs.start_logits[at].tolist(), outputs.end_logits[at].tolist()
            none = min(none, start[0] + end[0])
            spans = windows.features[at].offsets
            for first, one in enumerate(spans):
                for last in range(first, min(first + 30, len(spans))):
                    if one is not None and spans[last] is not None and start[first] + end[last] > best[0]:
                        best = start[first] + end[last], row["context"][one[0] : spans[last][1]]
        said = ("" if none > best[0] else best[1]).split()
        right = [text.split() for text in row["answers"]["text"]] or [[]]
        exact.append(max(float(said == one) for one in right))
        overlap.append(max(dice(said, one) for one in right))
    return 100 * sum(exact) / len(rows), 100 * sum(overlap) / len(rows)


def dice(one: list[str], other: list[str]) -> float:
    one, other = ([word for word in words if word not in ("a", "an", "the")] for words in (one, other))
    common = sum(min(one.count(word), other.count(word)) for word in set(one))
    return 2 * common / (len(one) + len(other)) if one or other else 1.0


@pytest.mark.parametrize("stride", [0, 1, 4, 10])
def test_windows_cover_a_context_and_share_its_tokens(tmp_path: Path, stride: int) -> None:
    """Each answer that some window has whole is the one that its positions say; none is lost to a cut."""
    rows = squad(12)
    given = task_recipe(tmp_path, "question-answering", rows, BERT)
    given["data"] = {**given["data"], "stride": stride}
    parts = prepare(build_recipe(given))
    windows, tokenizer = parts.dataset("data"), parts.tokenizer
    assert len(windows) >= 2 * len(rows)
    for number, row in enumerate(rows):
        mine = [windows.features[at] for at, of in enumerate(windows.row_of) if of == number]
        spans = [[span for span in one.offsets if span is not None] for one in mine]
        whole = tokenizer(row["context"], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert sorted({span for some in spans for span in some}) == whole
        assert all(len(one.values["input_ids"]) <= 24 for one in mine)
        for before, after in itertools.pairwise(spans):
            assert [span for span in before if span in after] == before[len(before) - stride :]
        text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        for one, some in zip(mine, spans, strict=True):
            first, last = one.values["start_positions"], one.values["end_positions"]
            if some[0][0] <= start and start + len(text) <= some[-1][1]:
                assert row["context"][one.offsets[first][0] : one.offsets[last][1]] == text
            else:
                assert (first, last) == (0, 0)
        if stride >= 1:  # of two words
            assert any(one.values["start_positions"] for one in mine)


def test_answers_are_compared_as_squad_does() -> None:
    for said, right, f1 in (
        ("The  Fox!", "fox", 1.0),
        ("a fox and a dog", "the dog", 2 * 1 / (3 + 1)),
        ("", "", 1.0),
        ("fox", "", 0.0),
        ("fox fox dog", "fox dog dog", 4 / 6),
        ("the", "a", 1.0),
    ):
        assert shared_words(said, right) == pytest.approx(f1), (said, right)
        assert (normal(said) == normal(right)) == (f1 == 1.0), (said, right)


def test_a_stream_of_questions_has_the_windows_of_all_rows(tmp_path: Path) -> None:
    given = task_recipe(
        tmp_path, "question-answering", squad(6), BERT, eval_data=None, eval_strategy="no", eval_steps=None
    )
    counted = list(DataLoader(prepare(build_recipe(given)).dataset("data"), None))
    streamed = list(
        DataLoader(prepare(build_recipe({**given, "data": {**given["data"], "streaming": True}})).dataset("data"), None)
    )
    assert len(counted) == len(streamed)
    for one, other in zip(counted, streamed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


GOOD = {"question": "a fox", "context": "the fox runs on", "answers": {"text": ["fox"], "answer_start": [4]}}
MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "question-answering",
        {**GOOD, "answers": {"text": ["dog"], "answer_start": [4]}},
        {},
        "does not stand at answer_start=4",
    ),
    ("question-answering", {**GOOD, "answers": ["dog"]}, {}, "'dog' does not stand in the context"),
    ("question-answering", {**GOOD, "answers": {"text": ["fox"], "answer_start": []}}, {}, "an answer_start is needed"),
    ("question-answering", {**GOOD, "answers": 3}, {}, "a row's answers are 3"),
    ("question-answering", {**GOOD, "answers": [""]}, {}, "a text is needed"),
    ("question-answering", {**GOOD, "answers": {"text": ["fox"], "answer_start": [-9]}}, {}, "answer_start=-9"),
    ("question-answering", {**GOOD, "question": None}, {}, "question is None"),
    ("question-answering", {**GOOD, "question": "fox " * 30}, {}, "leaves 0 of max_length=24 to its context"),
    ("question-answering", GOOD, {"stride": 24}, "windows share stride=24"),
    ("question-answering", GOOD, {"packing": True}, "packing: true is for causal-lm"),
    ("question-answering", {"text": "a", "label": 1}, {}, "question: COLUMN and context: COLUMN and answers: COLUMN"),
    ("sequence-regression", {"text": "a fox", "label": "many"}, {}, "the label 'many' is no number"),
    ("sequence-regression", {"text": "a fox", "label": True}, {}, "the label True is no number"),
    ("sequence-regression", {"text": "a fox", "label": float("nan")}, {}, "the label nan is no number"),
    ("sequence-regression", {"text": "a fox", "label": None}, {}, "the label None is no number"),
    ("sequence-regression", {"text": "a fox", "label": 1}, {"stride": 3}, "say task: question-answering"),
]


@pytest.mark.parametrize(("task", "row", "changes", "said"), MISTAKES, ids=[one[-1][:30] for one in MISTAKES])
def test_a_mistake_is_one_sentence(
    tmp_path: Path, task: str, row: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    given = task_recipe(tmp_path, task, [row], BERT, eval_data=None, eval_strategy="no", eval_steps=None)
    given["data"] = {**given["data"], **changes}
    with pytest.raises(RecipeError) as caught:
        prepare(build_recipe(given))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_part_no_texts_and_labels_have_no_names(tmp_path: Path) -> None:
    given = task_recipe(
        tmp_path, "question-answering", [GOOD], LLAMA, eval_data=None, eval_strategy="no", eval_steps=None
    )
    with pytest.raises(RecipeError, match="without anything between"):
        prepare(build_recipe(given))
    given = task_recipe(tmp_path, "sequence-regression", scored(4), BERT, labels=["a", "b"])
    with pytest.raises(RecipeError, match="a sequence-regression has none"):
        prepare(build_recipe(given))
