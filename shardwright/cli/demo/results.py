"""The results directory: numbers, a report to look at, and what the trained model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ...pipeline import timeline_html
from ...pipeline.snapshots import write_timelines
from ...utils.errors import counted
from ...utils.versions import versions
from ..report.curves import Curve, Point, alone, chart, running_mean
from ..report.page import page
from ..report.runs import read_run
from .grammar import IDS, STOP, UNKNOWN, questions
from .records import History, Score, told_apart

SAMPLE_WORDS = 90


def save_tokenizer(directory: Path) -> None:
    """One token per word, in the format that AutoTokenizer reads."""
    words = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN).save_pretrained(directory)


def write_results(history: History) -> None:
    """Complete `history` with what the saved model can do, and write everything but the model itself."""
    output = history.settings.output
    question_model(history, output / "model")
    (output / "layout.json").write_text(json.dumps(history.layout.describe(), indent=2) + "\n")
    (output / "sample.txt").write_text("\n".join(history.sample) + "\n")
    (output / "loss.svg").write_text(alone(loss_chart(history)))
    (output / "run.json").write_text(json.dumps(facts(history), indent=1) + "\n")
    write_timelines(history.timelines, output / "timeline.json")
    (output / "recipe.yaml").unlink(missing_ok=True)  # of another run in this directory
    (output / "report.html").write_text(page([read_run(output)], title="Shardwright demo"))
    if history.timelines:
        first = history.timelines[history.settings.styles[0]]
        first.write_trace(output / "trace.json")
        timeline_html.write_page(first, output / "timeline.html", title="One training step of the Shardwright demo")


@torch.no_grad()
def question_model(history: History, directory: Path) -> None:
    """Load the saved model as any user of transformers would, ask it the grammar's questions and let it write."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    by_kind: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for question in questions():
        by_kind.setdefault(question.kind, []).append((question.prompt, question.answers))
    for kind, asked in by_kind.items():
        ids = torch.tensor([tokenizer(prompt)["input_ids"] for prompt, _ in asked])
        answers = tokenizer.convert_ids_to_tokens(model(input_ids=ids).logits[:, -1].argmax(-1).tolist())
        right = sum(answer in accepted for answer, (_, accepted) in zip(answers, asked, strict=True))
        history.scores[kind] = Score(right, len(asked))

    torch.manual_seed(history.settings.seed)
    start = torch.tensor([[IDS[STOP]]])
    written = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=SAMPLE_WORDS, do_sample=True, pad_token_id=0
    )
    history.sample = sentences(tokenizer.decode(written[0, 1:]))


def sentences(text: str) -> list[str]:
    """Whole sentences only, written as people write them."""
    whole = [" ".join(part.split()) for part in text.split(STOP)[:-1]]
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in whole if sentence]


def loss_chart(history: History) -> str:
    """Loss of every training step, its running mean, the held-out losses, and the line below which no model can get."""
    points = [Point(step["step"], step["loss"]) for step in history.steps]
    mean = running_mean(points, window=max(1, len(points) // 20))
    checks = [Point(row["step"], row["eval_loss"]) for row in history.evaluations]
    curves = [Curve("loss", "raw a", points), Curve("loss", "line a", mean), Curve("held out", "a", checks, dots=True)]
    return chart("Loss", curves, floor=history.lowest_loss)


def facts(history: History) -> dict[str, Any]:
    """run.json: what the report tells beside the numbers of steps."""
    first, last = history.evaluations[0]["eval_loss"], history.evaluations[-1]["eval_loss"]
    answers = {f"questions: {kind}": f"{score} answered right" for kind, score in history.scores.items()}
    apart = {
        f"losses under {style}": f"{told_apart(apart)} those of {history.settings.styles[0]}"
        for style, apart in history.apart.items()
    }
    learned = {
        "held-out loss": f"{first:.3f} before, {last:.3f} after {counted(len(history.steps), 'step')}",
        "best possible": f"{history.lowest_loss:.3f}, the entropy of the text",
        **answers,
        **apart,
    }
    about = {
        "model": "a Llama from random weights, on an invented language whose statistics are known exactly",
        "layout": str(history.layout),
        "parameters": history.parameters,
        "total_steps": history.settings.steps,
    }
    return {
        "facts": about,
        "finished": {"interrupted": False},
        "floor": history.lowest_loss,
        "layout": history.layout.describe(),
        "tables": {"What it has learned": learned, "How it was laid out": history.layout.describe()},
        "texts": {"What the model writes now": history.sample},
        "made with": {"command": history.settings.command_line, **versions()},
    }
