"""What preflight says about a layout is what boosting and training then do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright import Booster
from shardwright.lazy import LazyInitContext
from shardwright.pipeline import schedules
from shardwright.pipeline.simulate import simulate
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, run_ranks, zoo
from shardwright.zero.optimizer import ZeroOptimizer

MODEL = "llama-tied-causal-lm"
LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"},
    {"tp_size": 2, "zero_stage": 1, "precision": "bf16"},
    {"pp_size": 2, "num_microbatches": 2, "zero_stage": 2, "precision": "bf16"},
    {"zero_stage": 1, "zero_group_size": 2, "precision": "fp32"},
    {"tp_size": 2, "zero_stage": 3, "precision": "fp32"},
]


def _bytes_kept(rank: int, world: int) -> list[dict[str, Any]]:
    found = []
    for kwargs in LAYOUTS:
        booster = Booster(plugin=HybridParallelPlugin(**kwargs))
        plugin: Any = booster.plugin
        model = zoo.build(MODEL, dtype=torch.float32)
        params = sum(param.numel() for param in model.parameters())
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        batch = zoo.inputs(MODEL, batch_size=4)
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        optimizer.step()
        states = sum(v.numel() * v.itemsize for state in optimizer.optim.state.values() for v in map(_local, state.values()) if v.ndim)
        shard = sum(_local(p).numel() for group in optimizer.optim.param_groups for p in group["params"])
        kept = {"states": states, "shard": shard}
        if isinstance(optimizer, ZeroOptimizer):
            kept["weights"] = sum(bucket.flat.numel() * bucket.flat.itemsize for bucket in optimizer.buckets)
            kept["gradients"] = sum(
                (bucket.grads if bucket.grads is not None else bucket.shard_grad).numel() * bucket.shard_grad.itemsize
                for bucket in optimizer.buckets
            )
            copies = [bucket.master for bucket in optimizer.buckets if bucket.master.dtype != bucket.flat.dtype]
            kept["masters"] = sum(master.numel() * master.itemsize for master in copies)
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (plugin.mesh.coordinate("pp"), kept))
        layout = plugin.layout
        assert layout.parameters == params
        found.append({"layout": layout, "kept": everywhere})
    return found


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def test_bytes_are_those_that_the_optimizer_allocates() -> None:
    results = run_ranks(_bytes_kept, 4, timeout=110)
    for per_rank in zip(*results, strict=True):
        assert len({str(found["layout"]) for found in per_rank}) == 1, "ranks resolve the same layout"
        layout, kept = per_rank[0]["layout"], per_rank[0]["kept"]
        for shape in layout.ranks:
            here = [amounts for position, amounts in kept if position == shape.rank]
            for name in here[0]:
                assert getattr(shape, name) == max(amounts[name] for amounts in here), (str(layout), name)
        for stage in layout.stages:
            assert stage.parameters > 0
        assert sum(len(stage.layers) for stage in layout.stages) == 4 or layout.sizes["pp"] == 1


def _count_all_reduces(rank: int, world: int) -> tuple[int, int, Any]:
    """All-reduces of whole activations in one step, and what they send by the ring formula."""
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32", num_microbatches=2))
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    layout = booster.plugin.preflight(model, adamw(model), 4, 13)  # type: ignore[union-attr]
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    sizes: list[int] = []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        booster.execute_pipeline(iter([zoo.inputs("llama-causal-lm", batch_size=4, seq_len=13)]), boosted, None, optimizer)
    finally:
        dist.all_reduce = plain
    hidden = model.config.hidden_size
    activations = [numel for numel in sizes if numel == 2 * 13 * hidden]
    return len(activations), sum(activations) * 4, layout


def test_traffic_is_what_one_step_sends() -> None:
    for calls, sent, layout in run_ranks(_count_all_reduces, 2):
        [tensor] = [traffic for traffic in layout.traffic if traffic.axis == "tp"]
        assert (tensor.count, tensor.sent) == (calls, sent)  # 2 (n-1)/n of two ranks is 1


@pytest.mark.parametrize(
    ("style", "chunks", "formula"),
    [
        ("1f1b", 1, lambda p, m, v: (p - 1) / (m + p - 1)),
        ("gpipe", 1, lambda p, m, v: (p - 1) / (m + p - 1)),
        ("interleaved", 2, lambda p, m, v: (p - 1) / (v * m + p - 1)),
    ],
)
def test_bubbles_follow_the_published_formulas(style: str, chunks: int, formula: Any) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        run = simulate(schedules.get(style, ranks, microbatches, chunks))
        assert run.bubble == pytest.approx(formula(ranks, microbatches, chunks))


def _lazy(rank: int, world: int) -> tuple[str, int]:
    plugin = HybridParallelPlugin(tp_size=2, precision="bf16", zero_stage=1)
    import transformers

    config = zoo.config("llama-causal-lm")
    with LazyInitContext():
        model = transformers.LlamaForCausalLM(config)
    layout = plugin.preflight(model, adamw(model), 4, 8)
    assert all(param.is_meta for param in model.parameters()), "preflight makes no weights"
    return str(layout), layout.parameters


def test_models_without_weights_are_resolved() -> None:
    for text, parameters in run_ranks(_lazy, 2):
        assert "dp 1 x pp 1 x tp 2" in text
        assert parameters == sum(param.numel() for param in zoo.build("llama-causal-lm").parameters())
