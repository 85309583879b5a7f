"""An error for want of memory says what holds it and what would free how much, wherever in a step it comes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.pipeline.runtime import PipelineError
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid import plugin as hybrid_plugin
from shardwright.plugins.hybrid import room as hybrid_room
from shardwright.plugins.memory_table import GRADIENTS, MASTERS, STATES, WEIGHTS, as_text, held
from shardwright.testing import run_ranks, zoo
from shardwright.utils import memory_notes
from shardwright.utils.memory_notes import AtFailure, read_error

NAME = "llama-causal-lm"
TORCH_SAYS = (  # torch 2.13
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 3.25 MiB is "
    "free. Process 7 has 79.14 GiB memory in use. Of the allocated memory 1.50 MiB is allocated by PyTorch, and "
    "512.00 KiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_torchs_error_is_read() -> None:
    assert read_error(TORCH_SAYS) == AtFailure(20 * 2**20, 3 * 2**19, 2**19)
    assert read_error("CUDA out of memory.") == AtFailure(None, None, None)


class _Full(nn.Module):
    """A layer for which there is no memory, in forward or in backward."""

    def __init__(self, inner: nn.Module, in_backward: bool) -> None:
        super().__init__()
        self.inner, self.in_backward = inner, in_backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_backward:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        output = self.inner(*args, **kwargs)
        output.register_hook(_no_memory)
        return output


def _no_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(TORCH_SAYS)


def _boosted(**options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    bare = zoo.build(NAME, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    return booster, model, optimizer


def _step(booster: Booster, model: Any, optimizer: Any, fails: str = "") -> list[str]:
    """Notes on the error of a step that fails in that part."""
    plugin: Any = booster.plugin
    if fails in ("forward", "backward"):
        layer = model.unwrap().model.layers[0]
        layer.mlp = _Full(layer.mlp, fails == "backward")
    if fails == "step":
        optimizer.unwrap().register_step_pre_hook(lambda *_: _no_memory(torch.ones(1)))
    batch = zoo.inputs(NAME, batch_size=4, seq_len=6)
    try:
        if plugin.pp_size > 1:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    except (torch.OutOfMemoryError, PipelineError) as error:
        return list(getattr(error, "__notes__", []))
    return []


def _on_rank(rank: int, world: int) -> list[dict[str, Any]]:
    found = []
    for fails, options in (
        ("forward", {"precision": "bf16", "zero_stage": 1}),
        ("backward", {"precision": "fp32", "zero_stage": 0}),
        ("step", {"precision": "bf16", "zero_stage": 3}),
    ):
        booster, model, optimizer = _boosted(**options)
        _step(booster, model, optimizer)
        shape = booster.plugin.layout.ranks[0]  # type: ignore[union-attr]
        planned = {WEIGHTS: shape.weights, GRADIENTS: shape.gradients, MASTERS: shape.masters, STATES: shape.states}
        own = held(model, optimizer)
        found.append({"held": own, "planned": planned, "notes": _step(booster, model, optimizer, fails)})
        del booster, model, optimizer
        gc.collect()  # an error speaks of all models that are there
    return found


def test_errors_say_what_holds_memory_and_what_frees_it() -> None:
    for in_forward, in_backward, in_step in run_ranks(_on_rank, 2, timeout=100):
        for one in (in_forward, in_backward, in_step):
            assert len(one["notes"]) == 1, "once"
            for kind, amount in one["held"].items():
                assert amount == pytest.approx(one["planned"][kind], rel=0.01, abs=64), kind  # of the fullest rank
            assert "which trains LlamaForCausalLM, had no memory for 20.00 MiB; tensors had 1.50 MiB" in one["notes"][0]
            assert "512.00 KiB" in one["notes"][0]
            assert "num_microbatches=2" in one["notes"][0]
        assert "zero_stage=1" not in in_forward["notes"][0]
        assert "zero_stage=2" in in_forward["notes"][0]
        assert "zero_stage=1" in in_backward["notes"][0]
        assert "zero_stage" not in in_step["notes"][0]


def test_a_pipeline_says_it_too() -> None:
    """What the rank raises names its action; the note is on that."""
    notes = run_ranks(_of_pipeline, 2, timeout=60)
    assert not notes[1]
    assert "had no memory for 20.00 MiB" in notes[0]
    assert "gradient_checkpoint_config" in notes[0]


def _of_pipeline(rank: int, world: int) -> str:
    booster, model, optimizer = _boosted(precision="fp32", pp_size=2, num_microbatches=2)
    assert not _step(booster, model, optimizer)
    if rank == 1:  # it would wait for what does not come
        return ""
    return "\n".join(_step(booster, model, optimizer, "forward"))


def test_what_is_done_already_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    said = as_text(model, held(model, None), read_error(TORCH_SAYS), None)
    assert setting in said
    assert "model.gradient_checkpointing_enable()" in said
    model[0].gradient_checkpointing = True
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    said = as_text(model, held(model, None), read_error(TORCH_SAYS), None)
    assert setting not in said
    assert "gradient_checkpoint" not in said
    assert "half the batch" in said


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    memory_notes.write_snapshots_to(tmp_path)
    yield tmp_path
    memory_notes.write_snapshots_to(None)


def test_a_snapshot_is_written_where_one_is_wanted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    written: list[str] = []
    path = memory_notes.write_snapshot(written.append)
    assert path == directory / "oom-rank3.pickle"
    assert written == [str(path)]
    memory_notes.write_snapshots_to(None)
    assert memory_notes.write_snapshot(written.append) is None
    monkeypatch.setenv(memory_notes.SNAPSHOTS, str(directory / "new"))
    assert memory_notes.write_snapshot(written.append) == directory / "new" / "oom-rank3.pickle"


def test_other_errors_are_left_alone() -> None:
    error = RuntimeError("no")
    memory_notes.note_memory(error)
    assert not hasattr(error, "__notes__")


def _boost_without_room(rank: int, world: int, stage: int, room: int) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_room, "host_memory", lambda: room)
        patch.setattr(hybrid_plugin, "warn_once", said.append)
        _boosted(zero_stage=stage, precision="bf16", tp_size=1)
    return [text for text in said if "will not fit" in text]


def test_boost_says_that_a_layout_will_not_fit() -> None:
    """By the rank that speaks for all, with what the plan says and what would help."""
    params = sum(param.numel() for param in zoo.build(NAME).parameters())
    by_stage = {}
    for stage, kept in ((0, 2 * (2 + 4 + 4 + 8)), (1, 2 * (2 + 4) + 12), (3, 16)):
        [said], others = run_ranks(_boost_without_room, 2, stage, params * kept - 1)
        assert others == []
        assert said.startswith("this layout will not fit: 2 ranks keep"), said
        by_stage[stage] = said
        assert run_ranks(_boost_without_room, 2, stage, params * kept * 11 // 10)[0] == []
    assert all(f"zero_stage={number}" in by_stage[0] for number in (1, 2, 3))
    assert "zero_stage=1" not in by_stage[1]
    assert "cpu_offload=True" in by_stage[1]
    assert "zero_stage" not in by_stage[3]
    assert "pp_size=2" in by_stage[3]
