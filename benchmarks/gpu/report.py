"""The report of `check.py`: what can be pasted into docs/performance.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_LINES = 40  # of a failure
# Columns of figures: key, heading, how it is written.
_COLUMNS = (
    ("ms", "ms", "{:.2f}"),
    ("busy_ms", "busy", "{:.2f}"),
    ("host_ms", "host", "{:.2f}"),
    ("predicted_ms", "predicted", "{:.2f}"),
    ("floor_ms", "floor", "{:.2f}"),
    ("mfu_half", "MFU half", "{:.1%}"),
    ("mfu_full", "MFU full", "{:.1%}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("peak_gib", "peak, GiB", "{:.2f}"),
    ("tflops", "TFLOP/s", "{:.0f}"),
    ("gb_per_s", "GB/s", "{:.0f}"),
    ("ratio", "ratio", "{:.3f}"),
    ("spread", "slowest / fastest", "{:.2f}"),
    ("first_s", "first step, s", "{:.1f}"),
    ("loss", "loss", "{:.4f}"),
    ("target", "target", "{}"),
)


def markdown(report: Mapping[str, Any]) -> str:
    facts, parts = report["machine"], report["parts"]
    kind = (
        "Rehearsal on a CPU at tiny sizes: no figure here says anything" if report["rehearsed"] else "Checks on one GPU"
    )
    lines = [f"## {kind}", "", _machine(facts), "", f"Begun {report['begun']} UTC, {report['seconds']:.0f} s in all."]
    lines += ["", "| part | outcome | seconds of its budget |", "|---|---|---|"]
    lines += [
        f"| {part['name']} | {_outcome(part)} | {part['seconds']:.0f} of {part['budget']:.0f} |" for part in parts
    ]
    failed = [test for part in parts for test in part.get("tests", []) if test["outcome"] == "failed"]
    lines += ["", f"### {len(failed)} failed checks", ""]
    for test in failed:
        lines += [f"**{test['name']}**", "", *_quoted(test["text"]), ""]
    for part in parts:
        # 1 is what pytest says where tests failed, which have been shown
        explained = part["status"] == 1 and any(test["outcome"] == "failed" for test in part.get("tests", []))
        if part["outcome"] != "ended well" and part["tail"] and not explained:
            lines += [f"**{part['name']}**: {part['outcome']}", "", *_quoted(part["tail"]), ""]
    lines += _left_out(parts)
    for part in parts:
        if "figures" in part:
            lines += [f"### {part['name']}", "", f"`{part['command']}`", "", *_table(part["figures"]), ""]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _quoted(text: str) -> list[str]:
    """The end of `text`, and how much of it is left out."""
    lines = text.splitlines()
    left_out = len(lines) - _LINES
    before = [f"({left_out} lines before these: gpu-report.json)"] if left_out > 0 else []
    return ["```", *before, *lines[-_LINES:], "```"]


def _machine(facts: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    device = "no GPU"
    if "device" in facts:
        now = facts["now"]
        device = (
            f"{facts['device']} (SM{facts['capability'].replace('.', '')}, {facts['memory_gib']} GiB, driver "
            f"{now.get('driver_version', '?')}, SM clock {now.get('clocks.sm', '?')} of at most "
            f"{now.get('clocks.max.sm', '?')}, power limit {now.get('power.limit', '?')}), CUDA {facts['cuda']}, NCCL "
            f"{facts['nccl']}, cuDNN {facts['cudnn']}"
        )
    host = f"{facts['cores']} cores, load {facts['load']}; Python {facts['python']}"
    return f"{device}; {host}, {packages}; commit {facts['commit']}."


def _outcome(part: Mapping[str, Any]) -> str:
    said = [part["outcome"]]
    if part.get("tests"):
        counts = Counter(test["outcome"] for test in part["tests"])
        said += [f"{count} {outcome}" for outcome, count in sorted(counts.items())]
    if part.get("not_run"):
        said.append(f"**{len(part['not_run'])} not run**")
    if "figures" in part:
        bad = sum("error" in row or "not_run" in row for row in part["figures"])
        said.append(f"{len(part['figures'])} figures" + (f", **{bad} not had**" if bad else ""))
    return ", ".join(said)


def _left_out(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["### Left out", ""]
    skipped = Counter(test["text"] for part in parts for test in part.get("tests", []) if test["outcome"] == "skipped")
    lines += [f"- {count} x {reason}" for reason, count in skipped.items()]
    lines += [f"- not run: {name}" for part in parts for name in part.get("not_run", [])]
    return [*lines, *(["- nothing"] if len(lines) == 2 else []), ""]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    used = [column for column in _COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    lines = [f"| | {' | '.join(heading for _, heading, _ in used)} |", "|---" * (len(used) + 1) + "|"]
    for row in rows:
        why = row.get("error") or row.get("not_run")
        cells = [form.format(row[key]) if row.get(key) is not None else "" for key, _, form in used]
        if why:
            cells = [f"**{why}**".replace("|", "/").replace("\n", " "), *cells[1:]] if cells else [f"**{why}**"]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines if used else [*(f"- {row['name']}: {row.get('error') or row.get('not_run')}" for row in rows)]


def as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"
