"""Every text model type of transformers through two pipeline ranks, and through four stages where it has the layers.

    python -m pytest -m sweep tests/models/test_pipeline_sweep.py --timeout 3600

It writes a table to `pipeline_sweep.txt` in the current directory, or to the path in SHARDWRIGHT_SWEEP_TABLE, and wants
90 % of the types that can be built and trained on one process with a tiny config. SHARDWRIGHT_SWEEP_TYPES="llama,t5"
restricts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tied_gradients import sync_tied_gradients
from tiny_text_models import build, inputs, text_types

from shardwright.interface import OptimizerWrapper
from shardwright.models.dry_run import forward_defaults
from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.cut.tied import create_tied_process_groups
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import RankError, keep_float64, run_ranks

WANTED = 0.9


def compare(rank: int, world_size: int, model_type: str) -> tuple[str, str]:
    """(verdict, detail): "ok", "not runnable" (on one process), "refused" (a ValueError), "wrong"."""
    try:
        reference = build(model_type)
        batch = inputs(reference)
        with keep_float64():
            torch.manual_seed(1)
            outputs = reference(**{**forward_defaults(reference), **batch})
            outputs.loss.backward()
            half = build(model_type)
            parts = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 2), slice(2, 4))]
            apart = torch.cat([half(**{**forward_defaults(half), **part}).logits for part in parts])
            torch.manual_seed(1)
            again = half(**{**forward_defaults(half), **batch})
        if not torch.isfinite(outputs.loss):
            return "not runnable", "the loss is not finite"
        if not torch.allclose(again.loss, outputs.loss):
            return "not runnable", "two runs of one process differ"
    except Exception as error:
        return "not runnable", f"{type(error).__name__}: {error}"
    # Experts with a capacity drop tokens by what else is in the batch: such models get the batch in one piece.
    separable = torch.allclose(apart, outputs.logits)
    settings = PipelineSettings(num_microbatches=2 if separable else 1)
    model = build(model_type)
    try:
        cut = cut_model(model, settings, rank, world_size)
    except ValueError as error:
        return "refused", str(error)
    group = dist.group.WORLD
    assert group is not None
    executor = PipelineExecutor(cut, settings, pipe_group=group)
    tied = create_tied_process_groups(cut.tied_groups, rank, lambda ranks: group)
    optimizer = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with keep_float64():
        torch.manual_seed(1)
        loss = executor.execute(iter([batch]), None, optimizer)["loss"]
        sync_tied_gradients(model, cut.tied_groups, rank, tied)
    worst, where = 0.0, "loss"
    if loss is not None:
        worst = float((loss - outputs.loss).abs())
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        there = expected[name].grad
        if (there is None and parameter.grad is None) or not parameter.numel():
            continue
        there = torch.zeros_like(parameter) if there is None else there
        here = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error = float((here - there).abs().max()) / max(1e-3, float(there.abs().max()))
        if not error <= worst:
            worst, where = error, name
    held = sum(parameter.numel() for parameter in model.parameters()) / sum(
        parameter.numel() for parameter in reference.parameters()
    )
    return (
        "ok" if worst < 1e-8 else "wrong"
    ), f"{worst:.1e} at {where}, {100 * held:.0f} % of the parameters{'' if separable else ', whole batch'}"


def verdict(model_type: str) -> tuple[str, str]:
    try:
        results: list[tuple[str, str]] = run_ranks(compare, 2, model_type, timeout=120)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "failed", lines[-1] if lines else str(error)
    order = ["failed", "wrong", "refused", "not runnable", "ok"]
    return min(results, key=lambda result: order.index(result[0]))


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_every_text_model_type() -> None:
    only = os.environ.get("SHARDWRIGHT_SWEEP_TYPES")
    types = only.split(",") if only else list(text_types())
    table = Path(os.environ.get("SHARDWRIGHT_SWEEP_TABLE", "pipeline_sweep.txt"))
    results: dict[str, tuple[str, str]] = {}
    with table.open("w") as file:
        for model_type in types:
            results[model_type] = verdict(model_type)
            word, detail = results[model_type]
            file.write(f"{model_type:32} {text_types()[model_type]:4} {word:14} {detail.replace(chr(10), ' ')[:300]}\n")
            file.flush()
        counts: dict[str, Any] = {}
        for word, _ in results.values():
            counts[word] = counts.get(word, 0) + 1
        runnable = len(results) - counts.get("not runnable", 0)
        file.write(f"{counts}; {counts.get('ok', 0)} of {runnable} that one process can train\n")
    assert counts.get("ok", 0) >= WANTED * runnable, table.read_text()
