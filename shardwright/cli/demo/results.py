"""The results directory: numbers, a report to look at, and what the trained model says."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ...pipeline import timeline_html
from ...utils.versions import versions
from .chart import Point, loss_chart
from .grammar import IDS, STOP, UNKNOWN, questions
from .records import History, Score

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
    records = [record._asdict() for record in history.steps] + [
        evaluation._asdict() for evaluation in history.evaluations
    ]
    lines = map(_json_line, sorted(records, key=lambda record: record["step"]))
    (output / "metrics.jsonl").write_text("".join(lines))
    (output / "layout.json").write_text(json.dumps(history.layout.describe(), indent=2) + "\n")
    (output / "sample.txt").write_text("\n".join(history.sample) + "\n")
    chart = loss_chart(
        [Point(record.step, record.loss) for record in history.steps],
        [Point(evaluation.step, evaluation.held_out_loss) for evaluation in history.evaluations],
        history.lowest_loss,
    )
    (output / "loss.svg").write_text(chart)
    (output / "report.html").write_text(report(history, chart))
    if history.timeline is not None:
        history.timeline.write_trace(output / "trace.json")
        timeline_html.write_page(
            history.timeline, output / "timeline.html", title="One training step of the Shardwright demo"
        )


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


def _json_line(record: dict[str, float]) -> str:
    return (
        json.dumps({name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in record.items()})
        + "\n"
    )


def report(history: History, chart: str) -> str:
    """A page that needs no other file."""
    last = history.evaluations[-1].held_out_loss
    facts = {
        "held-out loss": f"{history.evaluations[0].held_out_loss:.3f} before, {last:.3f} after {len(history.steps)} "
        "steps",
        "best possible": f"{history.lowest_loss:.3f}, the entropy of the text",
        "parameters": f"{history.parameters:,}",
        "speed": f"{history.tokens_per_second:,.0f} tokens/s over all ranks",
        "time": f"{history.seconds:.1f} s of training",
        **{f"questions: {kind}": f"{score} answered right" for kind, score in history.scores.items()},
    }
    made_with = {"command": history.settings.command_line, **versions()}
    pipeline = ""
    if history.timeline is not None:
        pipeline = f"<h2>What the pipeline did in one step</h2>{timeline_html.figure(history.timeline)}"
    sample = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in history.sample)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Shardwright demo</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2em auto; padding: 0 1em; color: #222;
    background: #fff }}
  table {{ border-collapse: collapse }} td {{ padding: 2px 18px 2px 0; vertical-align: top }} td:first-child {{ color:
    #666 }}
  li {{ list-style: none }} ul {{ padding: 0 }} svg {{ width: 100% }}
  {timeline_html.STYLE}
</style></head><body>
<h1>Shardwright demo</h1>
<p>A Llama that began with random weights, trained on {history.layout}, on a small invented
language whose statistics are known exactly.</p>
{chart}
<h2>What came out</h2>{_table(facts)}
<h2>How it was laid out</h2>{_table(history.layout.describe())}
{pipeline}
<h2>What the model writes now</h2><ul>{sample}</ul>
<h2>How it was made</h2>{_table(made_with)}
</body></html>
"""


def _table(rows: dict[str, str] | dict[str, str | int]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"
