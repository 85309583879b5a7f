"""A layout that is searched for inside of the job that uses it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.cluster.launch import launch
from shardwright.planner.gpus import like_device
from shardwright.planner.states import optimizer_costs
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.found_layout import with_lazy_weights, without_weights
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo

ASKED = {"global_batch_size": 4, "sequence_length": 16, "gpu": "h100", "precision": "fp32"}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, eps=1e-3)


def _search_and_train(rank: int, world: int) -> str:
    """In a job with groups and random numbers of its own, which the search must leave as they are."""
    with keep_float64():
        model: Any = zoo.build("llama-tied-causal-lm", dtype=torch.float64, num_hidden_layers=4)
        optimizer = adamw(model)
        reference = copy.deepcopy(model)
        alone = adamw(reference)
        model.note = lambda: None
        with pytest.raises(ValueError, match="process that searches"):  # rank 0 alone sees it
            HybridParallelPlugin.from_search(model, optimizer, **ASKED)
        del model.note
        before = torch.get_rng_state()
        plugin = HybridParallelPlugin.from_search(model, optimizer, **ASKED, gpus_per_node=1, max_norm=0.5)
        assert torch.equal(torch.get_rng_state(), before)
        booster = Booster(plugin=plugin)
        boosted: Any
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        batch = {
            name: torch.randint(5, 90, (4, 16), generator=torch.Generator().manual_seed(5))
            for name in ("input_ids", "labels")
        }
        replicas, replica = plugin.data_parallel
        own = {name: value.chunk(replicas)[replica] for name, value in batch.items()}
        booster.execute_pipeline(iter([own]), boosted, None, wrapped)
        reference(**batch).loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for each in (wrapped, alone):
            each.step()
        compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
    return str(plugin.search_report)


def test_a_job_searches_for_its_own_layout() -> None:
    reports = run_ranks(_search_and_train, 2)
    assert reports[0] == reports[1]
    assert "2 x h100" in reports[0]


def test_models_travel_without_weights() -> None:
    model: Any = zoo.build("llama-tied-causal-lm", num_hidden_layers=3)
    optimizer = adamw(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    optimizer.state[next(model.parameters())] = {"exp_avg": torch.ones(1 << 20)}
    written = without_weights(model, optimizer)
    assert len(written) < 1 << 17
    found, own = with_lazy_weights(written)
    assert own is not None
    told = {name: (param.shape, param.dtype, param.requires_grad) for name, param in model.named_parameters()}
    assert {name: (each.shape, each.dtype, each.requires_grad) for name, each in found.named_parameters()} == told
    assert all(param.is_meta for param in found.parameters())
    assert {id(param) for group in own.param_groups for param in group["params"]} == set(map(id, found.parameters()))
    assert [group["weight_decay"] for group in own.param_groups] == [0.1, 1e-2]
    assert not own.state
    assert optimizer.state, "which belongs to the caller"


def test_what_the_search_decides_cannot_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="needs a process group"):
        HybridParallelPlugin.from_search(model, global_batch_size=4, sequence_length=8)
    launch(0, 4, None, None, backend="fake")
    try:
        with pytest.raises(ValueError, match=r"from_search\(tp_size=2\): the search decides on it"):
            HybridParallelPlugin.from_search(model, global_batch_size=4, sequence_length=8, tp_size=2)
        with pytest.raises(ValueError, match="global_batch_size='4' must be"):
            HybridParallelPlugin.from_search(model, global_batch_size="4", sequence_length=8)  # type: ignore[arg-type]
        wrong: Any
        for wrong in (nn.Linear, None, {"hidden_size": 8}):
            with pytest.raises(ValueError, match=r"from_search\(model=.*\): model must be a torch Module, made"):
                HybridParallelPlugin.from_search(wrong, global_batch_size=4, sequence_length=8)
        wrong = 1e-3
        with pytest.raises(ValueError, match=r"from_search\(optimizer=0.001\): optimizer must be a torch Optimizer"):
            HybridParallelPlugin.from_search(model, wrong, global_batch_size=4, sequence_length=8)
    finally:
        dist.destroy_process_group()


def test_models_without_layers_are_told_what_would_work() -> None:
    launch(0, 1, None, None, backend="fake")
    try:
        with pytest.raises(ValueError, match="Linear has no list of layers") as raised:
            HybridParallelPlugin.from_search(nn.Linear(3, 3), **ASKED)
        assert "Use pp_size=1" not in str(raised.value), "which the search decides on"
        assert "HybridParallelPlugin(zero_stage=1)" in str(raised.value)
    finally:
        dist.destroy_process_group()


def test_devices_are_known_by_their_names() -> None:
    assert like_device(("NVIDIA H100 80GB HBM3", 79.1)) == ("h100", 79.1)
    assert like_device(("NVIDIA A100-SXM4-40GB", 39.4)) == ("a100-40", 39.4)
    assert like_device(("AMD Instinct MI300X", 191.7)) == ("mi300x", 191.7)
    for unknown in (None, ("NVIDIA GeForce RTX 2080 Ti", 10.6)):
        with pytest.raises(ValueError, match=r"gpu=None: .*'h100'"):
            like_device(unknown)


def test_what_optimizers_keep_is_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    params = list(model.parameters())
    assert optimizer_costs(torch.optim.AdamW(params))[0] == 2
    assert optimizer_costs(torch.optim.SGD(params))[0] == 0
    assert optimizer_costs(torch.optim.SGD(params, momentum=0.9))[0] == 1
    assert optimizer_costs(torch.optim.Adam(params, amsgrad=True))[0] == 3
    assert not any(param.grad is not None for param in params)
