"""What preflight says about a layout is what boosting and training then do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright
from shardwright import Booster
from shardwright.lazy import LazyInitContext
from shardwright.pipeline import schedules
from shardwright.pipeline.planning.simulate import simulate
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, run_ranks, zoo
from shardwright.zero.optimizer import ZeroOptimizer
from tests.models import tiny_text_models


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make this process rank 0 of a world without other processes."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield lambda size: shardwright.launch(0, size, None, None, backend="fake")
    if dist.is_initialized():
        dist.destroy_process_group()


MODEL = "llama-tied-causal-lm"
LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"},
    {"tp_size": 2, "zero_stage": 1, "precision": "bf16"},
    {"pp_size": 2, "num_microbatches": 2, "zero_stage": 2, "precision": "bf16"},
    {"zero_stage": 1, "zero_group_size": 2, "precision": "fp32"},
    {"tp_size": 2, "zero_stage": 3, "precision": "fp32"},
    {"pp_size": 2, "num_microbatches": 2, "zero_stage": 3, "precision": "bf16"},
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
        states = sum(
            v.numel() * v.itemsize for state in optimizer.optim.state.values() for v in state.values() if v.ndim
        )
        assert isinstance(optimizer, ZeroOptimizer)
        buckets = optimizer.buckets
        grads = [bucket.grads if bucket.grads is not None else bucket.shard_grad for bucket in buckets]
        kept = {
            "states": states,
            "shard": sum(segment.tensor.numel() for segment in optimizer.segments.items),
            "weights": sum(bucket.flat.untyped_storage().nbytes() for bucket in buckets),
            "gradients": sum(grad.numel() * grad.itemsize for grad in grads),
            "masters": sum(bucket.master.numel() * bucket.master.itemsize for bucket in buckets if bucket.has_copies),
        }
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, (plugin.mesh.coordinate("pp"), kept))
        layout = plugin.layout
        assert layout.parameters == params
        found.append({"layout": layout, "kept": everywhere})
    return found


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
        booster.execute_pipeline(
            iter([zoo.inputs("llama-causal-lm", batch_size=4, seq_len=13)]), boosted, None, optimizer
        )
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


ZERO_BUBBLES: list[tuple[str, dict[str, Any]]] = [
    ("llama-causal-lm", {"pp_style": "zb"}),
    ("gpt2-causal-lm", {"pp_style": "zb", "tp_size": 2}),  # tied: looked up on the first stage, multiplied on the last
    ("qwen3-moe-causal-lm", {"pp_style": "zbv", "num_model_chunks": 2, "tp_size": 2}),
    ("llama-causal-lm", {"pp_style": "zb", "tp_size": 2, "zero_stage": 3}),
    (
        "llama-causal-lm",
        {
            "pp_style": "zb",
            "zero_stage": 2,
            "gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5),
        },
    ),
    ("llama-tied-causal-lm", {"pp_style": "zb", "zero_stage": 3}),
]


def _postponed(rank: int, world: int) -> list[tuple[Any, float, float]]:
    """Of every case: the layout, the elements whose gradients this rank's W actions computed, and all that it
    computed.
    """
    from shardwright.ops import weight_grad

    found = []
    plain = weight_grad.WeightGradStore.put
    for name, settings in ZERO_BUBBLES:
        seen: set[int] = set()

        def put(self: Any, param: Any, compute: Any, *more: Any, seen: set[int] = seen) -> None:
            if param.ndim > 1 and "_Lookup" not in compute.__qualname__:
                seen.add(id(param))
            plain(self, param, compute, *more)

        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32", **settings)
        booster = Booster(plugin=plugin)
        model = zoo.build(name, dtype=torch.float32)
        visited = getattr(model.config, "num_experts_per_tok", 1) / getattr(model.config, "num_experts", 1)
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        weight_grad.WeightGradStore.put = put  # type: ignore[method-assign]
        booster.execute_pipeline(iter([zoo.inputs(name, batch_size=4)]), boosted, None, optimizer)
        weight_grad.WeightGradStore.put = plain  # type: ignore[method-assign]
        module = boosted.unwrap()
        tables = [child for child in module.modules() if isinstance(child, torch.nn.Embedding)]
        looked_up = {id(param) for table in tables for param in table.parameters(recurse=False)}
        multiplied = {
            id(param): param.numel() * (visited if ".experts" in key else 1.0)
            for key, param in module.named_parameters()
            if param.ndim > 1 and (id(param) not in looked_up or id(param) in seen)
        }
        found.append((plugin.layout, sum(multiplied[param] for param in seen), sum(multiplied.values())))
    return found


def test_the_share_that_zero_bubble_postpones_is_measured() -> None:
    shares = []
    for per_rank in zip(*run_ranks(_postponed, 4, timeout=110), strict=True):
        layout = per_rank[0][0]
        postponed, together = (sum(found[place] for found in per_rank) for place in (1, 2))
        assert layout.deferred == pytest.approx(postponed / together), str(layout)
        shares.append(layout.deferred)
        assert any("of the weight-gradient work" in warning for warning in layout.warnings) == (layout.deferred < 0.9)
    # at stage 3 the head's does not wait, and from stage 2 on those of recomputed layers
    assert shares[:3] == [1.0, 1.0, 1.0]
    assert 0.8 < shares[3] < 1.0
    assert shares[4] == pytest.approx(0.5, abs=0.1)
    assert shares[5] == 1.0, "but that of a tied head does"


def test_bubbles_of_zero_bubble_schedules_are_those_of_the_formulas(world_of: Any) -> None:
    """8 ranks, 32 microbatches: 6.8 % and 3.5 %."""
    world_of(8)
    bubbles = {}
    for style, chunks in (("1f1b", 1), ("zb", 1), ("zbv", 2)):
        plugin = HybridParallelPlugin(pp_size=8, num_microbatches=32, pp_style=style, num_model_chunks=chunks)
        with LazyInitContext():
            model = zoo.build("llama-causal-lm", num_hidden_layers=16)
        layout = plugin.preflight(model, adamw(model))
        bubbles[style] = layout.bubble
        assert layout.deferred == (None if style == "1f1b" else 1.0)
        assert ("0% of weight gradients postponed" in str(layout)) == (style != "1f1b")
    assert bubbles["1f1b"] == pytest.approx(0.179, abs=1e-3)
    assert (bubbles["zb"], bubbles["zbv"]) == (pytest.approx(0.068, abs=1e-3), pytest.approx(0.035, abs=1e-3))


def test_ranks_with_several_stages_are_weighed_together(world_of: Any) -> None:
    world_of(4)
    for style, chunks in (("1f1b", 1), ("zbv", 2)):
        plugin = HybridParallelPlugin(pp_size=4, num_microbatches=8, pp_style=style, num_model_chunks=chunks)
        with LazyInitContext():
            model = zoo.build("llama-causal-lm", num_hidden_layers=9, vocab_size=1001)
        layout = plugin.preflight(model, adamw(model))
        stages = [stage.parameters for stage in layout.stages]  # the embedding counts less than this, so bounds only
        assert layout.imbalance is not None
        assert layout.rank_imbalance is not None
        assert 1.0 <= layout.rank_imbalance <= layout.imbalance <= max(stages) * len(stages) / sum(stages) * 1.5
        assert ("dearest rank" in str(layout)) == (chunks == 2)
    assert layout.rank_imbalance < layout.imbalance


def test_activations_of_a_step_are_stated(world_of: Any) -> None:
    world_of(4)
    with LazyInitContext():
        model = zoo.build("llama-causal-lm", num_hidden_layers=8)

    def peaks(**settings: Any) -> list[float]:
        plugin = HybridParallelPlugin(
            pp_size=4, num_microbatches=8, precision="fp32", num_layers_per_stage=[2, 2, 2, 2], **settings
        )
        [note] = [
            note
            for note in plugin.preflight(model, adamw(model), 16, 32).notes
            if note.startswith("activations at the peak")
        ]
        amounts = note.split("rank: ")[1].split("; ")[0].split(", up to")[0].split(", ")
        return [
            float(amount.removesuffix(" MiB")) if "MiB" in amount else float(amount.removesuffix(" KiB")) / 1024
            for amount in amounts
        ]

    plain, gpipe = peaks(), peaks(pp_style="gpipe")
    assert plain[1:3] == pytest.approx([gpipe[1] * 3 / 8, gpipe[2] * 2 / 8], rel=0.02), "3 and 2 of 8 microbatches"
    half = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
    assert 0.5 * plain[1] < peaks(gradient_checkpoint_config=half)[1] < 0.6 * plain[1]
    partly, both = (PipelineGradientCheckpointConfig(ratio, selective_ratio=0.5) for ratio in (None, 0.5))
    assert 0.7 * plain[1] < peaks(gradient_checkpoint_config=partly)[1] < 0.8 * plain[1]
    assert 0.2 * plain[1] < peaks(gradient_checkpoint_config=both)[1] < 0.4 * plain[1]
    layout = HybridParallelPlugin(pp_size=4, num_microbatches=8, precision="fp32").preflight(model, adamw(model))
    assert not any("activations" in note for note in layout.notes), "the batch is not known"


def test_microbatches_that_make_interleaving_wait_are_named(world_of: Any) -> None:
    world_of(2)
    with LazyInitContext():
        model = zoo.build("llama-causal-lm", num_hidden_layers=8)
    said = {}
    for number in (5, 6):
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=number, pp_style="interleaved", num_model_chunks=4)
        layout = plugin.preflight(model, adamw(model))
        said[number] = f"{layout.bubble:.1%}", [note for note in layout.notes if "multiple of 2" in note]
    assert said[6][1] == []
    [note] = said[5][1]
    assert f"the bubble is {said[5][0]} where num_microbatches=6 has {said[6][0]}" in note


def test_what_settings_of_layers_change_is_shown(world_of: Any) -> None:
    """Recomputation and fused kernels change no byte that is kept, but the report says what they do, or that they do
    nothing.
    """
    world_of(2)
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    pipe = {"pp_size": 2, "num_microbatches": 2}

    def layout(**settings: Any) -> Any:
        return HybridParallelPlugin(**pipe, **settings).preflight(model, adamw(model))

    plain = str(layout())
    assert "recomputed" not in plain
    assert "without activations" in plain
    half = layout(gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5))
    assert [stage.recomputed for stage in half.stages] == [1, 1]
    assert "1 of 2 layers" in str(half)
    partly = layout(gradient_checkpoint_config=PipelineGradientCheckpointConfig(0.5, selective_ratio=0.5))
    assert [(stage.recomputed, stage.selective) for stage in partly.stages] == [(1, 1), (1, 1)]
    assert "1 of 2 layers, 1 in part" in str(partly)
    tenth = layout(gradient_checkpoint_config=PipelineGradientCheckpointConfig(selective_ratio=0.1))
    assert any("selective_ratio=0.1 of at most 2 layers per stage rounds down" in warning for warning in tenth.warnings)
    tenth = layout(gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.1))
    assert any("rounds down to none" in warning and "0.5 is the least" in warning for warning in tenth.warnings)
    assert layout(enable_flash_attention=True).kernels.startswith("attention sdpa")
    every = layout(enable_all_optimization=True).kernels
    for words in ("norms fused (torch)", "gated activations fused (torch)", "rotary positions fused (torch)"):
        assert words in every
    assert layout(attention_backend="math", enable_fused_cross_entropy=False).kernels == "attention math"
    deberta = tiny_text_models.build("deberta-v2")
    found = HybridParallelPlugin(enable_all_optimization=True).preflight(deberta, adamw(deberta))
    assert any("enable_all_optimization=True: DebertaV2ForMaskedLM has neither" in text for text in found.warnings)
