"""Delayed scales of linears in 8 bits over restarts at other layouts: loss and weights of one process that never ended,
with the same linears by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import keep_float64, run_ranks
from tests.fp8_by_hand import Recipe, compute_by_hand
from tests.plugins.test_fp8_layouts import RATE, batch_of, build, rows

OPTIONS = {"scaling": "delayed", "amax_history": 3}  # which a phase of two steps does not fill
STEPS, PARTS = 2, 4  # of a phase; of a batch, in microbatches and over ranks, since scales are those of a part
# ranks, arguments of the plugin
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {"num_microbatches": 4}),
    "dp2": (2, {"zero_stage": 1, "num_microbatches": 2}),
    "dp2, zero 3": (2, {"zero_stage": 3, "num_microbatches": 2}),
    "dp4": (4, {"zero_stage": 2, "num_microbatches": 1}),
    "tp2": (2, {"tp_size": 2, "num_microbatches": 4}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 4}),
    "tp2, dp2": (4, {"tp_size": 2, "zero_stage": 1, "num_microbatches": 2}),
}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def by_hand(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, recipe = build(), Recipe(**OPTIONS)
    compute_by_hand(model.model.layers, recipe)
    optimizer, losses = sgd(model), []
    with keep_float64():
        for step in range(steps):
            optimizer.zero_grad()
            batch = batch_of(step)
            total = int((batch["labels"][:, 1:] != -100).sum())
            losses.append(0.0)
            for part in range(PARTS):
                mine = rows(batch, part, PARTS)
                loss = model(**mine).loss * int((mine["labels"][:, 1:] != -100).sum()) / total
                loss.backward()
                losses[-1] += float(loss.detach())
            optimizer.step()
            recipe.end_step()
    return losses, model.state_dict()


def phase(rank: int, world: int, layout: str, directory: Path, first: int) -> list[float | None]:
    plugin = HybridParallelPlugin(
        precision="fp32", use_fp8=True, fp8_options={**OPTIONS, "emulate": True}, **LAYOUTS[layout][1]
    )
    booster, model = Booster(plugin=plugin), build()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    if first:
        assert booster.load(directory, model=model, optimizer=optimizer)["step"] == first
    losses = []
    with keep_float64():
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            mine = rows(batch_of(step), plugin.mesh.coordinate("dp"), plugin.dp_size)
            loss = booster.execute_pipeline(iter([mine]), model, None, optimizer)["loss"]
            optimizer.step()
            losses.append(None if loss is None else float(loss))
    booster.save(directory / f"step-{first + STEPS}", model=model, optimizer=optimizer, step=first + STEPS)
    booster.save_model(model, directory.parent / "weights.safetensors")
    if world > 1:
        dist.barrier()
    return losses


@pytest.mark.parametrize(
    "layouts",
    [
        ["dp2", "dp1", "dp4"],
        pytest.param(["tp2", "dp4", "pp2"], marks=pytest.mark.sweep),
        pytest.param(["dp2, zero 3", "tp2, dp2", "dp1"], marks=pytest.mark.sweep),
    ],
    ids="-".join,
)
def test_scales_go_on_at_other_layouts(layouts: list[str], tmp_path: Path) -> None:
    expected, weights = by_hand(STEPS * len(layouts))
    (tmp_path / "run").mkdir()
    for number, layout in enumerate(layouts):
        first = STEPS * number
        for losses in run_ranks(phase, LAYOUTS[layout][0], layout, tmp_path / "run", first):
            for step, loss in enumerate(losses, first):
                assert loss is None or loss == pytest.approx(expected[step], rel=1e-10), (layout, step)
    for name, weight in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-10, rtol=0)
