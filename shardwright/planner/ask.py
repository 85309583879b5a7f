"""The search in a process of its own, for a job that is running; see `plugins.hybrid.found_layout`.

    python -m shardwright.planner.ask < question > answer

The question is a line of JSON, and behind it the job as `found_layout.without_weights` writes it: objects of the user's
own classes, which no plainer form holds. Whoever starts this process may run code in it anyhow, and nobody else writes
to its input. The answer is a table of texts in JSON: `arguments`, `recompute` and `report`, or `error`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..plugins.hybrid.found_layout import with_lazy_weights
from .answer import as_text, plugin_arguments, recompute_of
from .devices import device_of
from .search import Question, check_precision, search


def answer(asked: Mapping[str, Any], written: bytes) -> dict[str, str]:
    """`written` is what `found_layout.without_weights` writes, `device` name and GiB of a device; the others are
    options of the search.
    """
    job = _Job(written)
    try:
        check_precision(asked["precision"])
        device = device_of(
            asked["calibration"],
            asked["gpu"],
            asked["precision"],
            asked["world_size"],
            memory=asked["gpu_memory"],
            per_node=asked["gpus_per_node"],
            inside=asked["inside_bandwidth"],
            between=asked["between_bandwidth"],
            own=asked["device"],
        )
        sizes = asked["world_size"], asked["global_batch_size"], asked["sequence_length"]
        question = Question(job.model, job.optimizer, device, *sizes, asked["precision"])
        found = search(question)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "arguments": json.dumps(plugin_arguments(found.best, question.precision, found.along)),
        "recompute": json.dumps(recompute_of(found.best)),
        "report": as_text(found, replace(question, optimizer_name=job.optimizer_name)),
    }


_NAMES = {"SGD": "sgd", "Muon": "muon"}  # that `shardwright plan` knows; others are taken for AdamW


class _Job:
    """The model, made anew for each question, and its own optimizer for what is left of it."""

    def __init__(self, written: bytes) -> None:
        self._written = written
        self._made: Optimizer | None = None

    def model(self) -> nn.Module:
        found, self._made = with_lazy_weights(self._written)
        return found

    @property
    def optimizer_name(self) -> str:
        """Of `shardwright plan`, for the model that was made last."""
        return _NAMES.get(type(self._made).__name__, "adamw")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """For the model that was made last, of which layers may be gone."""
        if self._made is None:
            return torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
        left = {id(param) for param in model.parameters()}
        for group in self._made.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in left]
        self._made.param_groups = [group for group in self._made.param_groups if group["params"]]
        return self._made


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    asked = json.loads(sys.stdin.buffer.readline())
    out.write(json.dumps(answer(asked, sys.stdin.buffer.read())))
    out.flush()


if __name__ == "__main__":
    main()
