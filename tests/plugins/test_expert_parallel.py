"""Experts spread over ranks: every number equals one process, and what travels is what the closed forms say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import EXPERTS, LAYOUTS, load_at, save_at
from habits import Habits
from hybrid_ranks import Layout, run_layout
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright import Booster
from shardwright.comm import compat
from shardwright.files.huggingface import HfFiles
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.shardformer.experts import find_experts
from shardwright.spec import ParamSpec, even_pieces
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks, zoo
from shardwright.testing.matrix import Subject, pick_axes, run_cells

QWEN, MIXTRAL = "qwen3-moe-causal-lm", "mixtral-causal-lm"
PIPE = {"pp_size": 2, "num_microbatches": 2}
SHALLOW = {"num_hidden_layers": 2}
PARTLY = PipelineGradientCheckpointConfig(selective_ratio=1.0)

TWO = [
    Layout(QWEN, 2, {"ep_size": 2, "zero_stage": 3}, SHALLOW, checkpointing=True, calls=True),
    Layout(
        MIXTRAL,
        2,
        {"ep_size": 2, "zero_stage": 1, "overlap_allgather": True, "zero_bucket_size_in_m": 0.005},
        SHALLOW,
        accumulate=2,
        habits=Habits(clip="norm", frozen=True, captured=True),
    ),
]
FOUR = [
    Layout(
        MIXTRAL,
        4,
        {"ep_size": 2, "tp_size": 2, "zero_stage": 2},
        SHALLOW,
        checkpointing=True,
        habits=Habits(clip="norm"),
    ),
    Layout(QWEN, 4, {**PIPE, "ep_size": 2, "zero_stage": 1, "pp_style": "zb"}, SHALLOW),
    Layout(QWEN, 4, {"ep_size": 2, "zero_stage": 1, "zero_group_size": 2}, SHALLOW, calls=True, steps=2),
]
V = {**PIPE, "num_model_chunks": 2}
SWEEP = [
    # whose layers are no graphs, and run as they are
    Layout(
        QWEN,
        2,
        {"ep_size": 2, "zero_stage": 2, "enable_jit_fused": True},
        SHALLOW,
        habits=Habits(clip="plugin", resume=True),
        steps=2,
    ),
    *(
        Layout(model, 4, {"ep_size": 2, "zero_stage": stage, **sizes})
        for model in (QWEN, MIXTRAL)
        for stage in (0, 1, 2, 3)
        for sizes in ({}, {"tp_size": 2}, PIPE)
    ),
    Layout(QWEN, 4, {**V, "ep_size": 2, "zero_stage": 2, "pp_style": "zbv"}, checkpointing=True),
    Layout(QWEN, 4, {**V, "ep_size": 2, "zero_stage": 3, "pp_style": "interleaved"}, accumulate=2),
    Layout(QWEN, 4, {**V, "ep_size": 2, "zero_stage": 1, "pp_style": "dualpipev", "num_microbatches": 4}),
    Layout(QWEN, 4, {**PIPE, "ep_size": 2, "dp_outside": False, "gradient_checkpoint_config": PARTLY}),
    Layout(MIXTRAL, 4, {**PIPE, "ep_size": 2, "num_sequence_slices": 2}),
    Layout(QWEN, 4, {"ep_size": 4, "zero_stage": 3}, accumulate=2, calls=True),
    Layout(MIXTRAL, 4, {"ep_size": 4}, habits=Habits(lora=True)),
    Layout(QWEN, 4, {"ep_size": 4, "zero_stage": 1}, habits=Habits(resume=True, clip="norm")),
]


def run_all(rank: int, world: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        run_layout(rank, world, layout)


def two(rank: int, world: int) -> None:
    run_all(rank, world, TWO)
    parts_of_gradients(rank)


@keep_float64()
def parts_of_gradients(rank: int) -> None:
    """No rank has the gradients of all experts, so that a norm of its own would not be that of the model; kernels that
    group rows run in single precision.
    """
    settings: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_experts_per_tok": 3,
        "experts_implementation": "grouped_mm",
    }
    reference = zoo.build(QWEN, dtype=torch.float32, **settings)
    model = zoo.build(QWEN, dtype=torch.float32, **settings)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", ep_size=2))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    batch = zoo.inputs(QWEN, batch_size=2, seq_len=9, seed=rank, dtype=torch.float32)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, reference(**batch).loss, atol=0.0, rtol=1e-5)
    booster.backward(loss, optimizer)
    with pytest.raises(ValueError, match=r"this rank \(dp 2 x ep 2, ZeRO stage 0\) holds only a part of the gradients"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_two_ranks_equal_one_process() -> None:
    run_ranks(two, 2, timeout=110)


def test_four_ranks_equal_one_process() -> None:
    run_ranks(run_all, 4, FOUR, timeout=110)


def test_biases_that_one_rank_adds_are_stepped_on_all() -> None:
    """Also without expert parallelism."""
    (cell,) = run_cells(Subject("GptOssForCausalLM"), pick_axes(["tp2"]))
    assert cell["outcome"] == "verified", cell


@pytest.mark.sweep
@pytest.mark.parametrize("layout", SWEEP, ids=str)
def test_every_layout_equals_one_process(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout, timeout=200)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["GptOss", "Qwen2Moe", "DeepseekV3", "NemotronH"])
def test_kinds_of_experts_over_two_axes(name: str) -> None:
    (cell,) = run_cells(Subject(f"{name}ForCausalLM"), pick_axes(["tp2_ep2"]))
    assert cell["outcome"] == "verified", cell


# What travels.


class Routed:
    """Lets routers choose, for all tokens, the first expert and another one of the first half."""

    def __init__(self, model: nn.Module) -> None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.mlp.gate.register_forward_hook(self._route)

    def _route(self, module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, index = output
        return logits, weights, torch.arange(index.shape[-1]).expand_as(index).contiguous()


class Trades:
    """Counts rows and calls of all-to-alls, as the backend is asked for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: list[int] = []
        monkeypatch.setattr(compat, "all_to_all_single", self._counted)

    def _counted(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.bytes.append(input.numel() * input.itemsize)
        return dist.all_to_all_single(output, input, *args, **kwargs)


@keep_float64()
def all_to_one(rank: int, world: int, settings: dict[str, Any]) -> list[int]:
    """No token chooses an expert of the second rank. Returns what the all-to-alls of one step carried."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    reference = zoo.build(QWEN, dtype=torch.float64, **sizes)
    model = zoo.build(QWEN, dtype=torch.float64, **sizes)
    Routed(reference), Routed(model)
    batches = [zoo.inputs(QWEN, batch_size=2, seq_len=9, seed=seed, dtype=torch.float64) for seed in range(world)]
    for batch in batches:
        (reference(**batch).loss / world).backward()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", ep_size=2, **settings))
    trained = adamw(model)
    report = booster.plugin.preflight(model, trained, batch_size=2, sequence_length=9)
    (planned,) = [row for row in report.traffic if row.axis == "ep"]
    row = 4 * 48 * 8 + 2 * 2 * 8 + 2 * 4  # there and back with weights and numbers of two experts, twice
    assert (planned.count, planned.sent) == (5 * 2, 2 * (2 * 9) * row * 5 // 6)  # one choice of six is at home
    assert any("every rank has 2 of the 4 experts of a layer" in note for note in report.notes)
    model, optimizer, *_ = booster.boost(model, trained)
    held = sum(param.numel() for param in model.parameters())
    assert report.ranks[0].parameters == held
    assert report.ranks[0].shard == sum(segment.tensor.numel() for segment in optimizer.segments.items)
    with pytest.MonkeyPatch.context() as patches:
        trades = Trades(patches)
        booster.backward(model(**batches[rank]).loss, optimizer)
    gradients = optimizer.gradients()
    mesh = booster.plugin.mesh
    compare_models(reference, model, coordinate=mesh.coordinate, gradients=gradients)
    if rank == 1:
        idle = [grad for name, grad in gradients.items() if ".experts." in name]
        assert idle
        assert not any(grad.any() for grad in idle)
    optimizer.step()
    return trades.bytes


def test_a_rank_without_tokens_takes_part() -> None:
    tokens, hidden, layers = 2 * 9, 48 * 8, 2
    weights, numbers = 2 * 8, 2 * 4
    first, second = run_ranks(all_to_one, 2, {"zero_stage": 1})
    counts = 2 * 2 * 8  # how many tokens and choices for each rank
    there, back = tokens * (hidden + weights), tokens * hidden  # once, though both experts of a token are there
    assert first == [counts, there + tokens * numbers, 2 * back] * layers + [back, 2 * there] * layers
    assert second == [counts, there + tokens * numbers, 0] * layers + [back, 0] * layers


# Files.


def several(rank: int, world: int, path: Path) -> None:
    """Saved at one layout of experts, gone on with at others, in one world of two."""
    save_at(rank, world, QWEN, "ep2-zero1", path)
    save_at(rank, world, QWEN, "tp2", path)
    load_at(rank, world, QWEN, "ep2-zero3", path, ["ep2-zero1", "tp2"])
    load_at(rank, world, QWEN, "zero1", path, ["ep2-zero1"])


def test_checkpoints_of_other_layouts(tmp_path: Path) -> None:
    run_ranks(several, 2, tmp_path, timeout=110)


@pytest.mark.sweep
def test_checkpoints_of_all_layouts(tmp_path: Path) -> None:
    layouts = {name: LAYOUTS[name] for name in ("one", "tp2-pp2", "zero3")} | EXPERTS
    for name, (world, _) in layouts.items():
        run_ranks(save_at, world, QWEN, name, tmp_path, timeout=200)
    for name, (world, _) in layouts.items():
        run_ranks(load_at, world, QWEN, name, tmp_path, list(layouts), timeout=400)


def reading(rank: int, world: int, path: Path, settings: dict[str, Any]) -> None:
    """A lazily built model reads this rank's experts and no others, and is the same model."""
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plugin = HybridParallelPlugin(precision="fp32", ep_size=2, **settings)
    with LazyInitContext():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patches:
        read = HfFiles.read
        patches.setattr(HfFiles, "read", lambda self, key, *args: (seen.append(key), read(self, key, *args))[1])
        model, *_ = Booster(plugin=plugin).boost(model, adamw(model))
    experts = {int(key.split(".experts.")[1].split(".")[0]) for key in seen if ".experts." in key}
    assert experts == ({0, 1}, {2, 3})[plugin.mesh.coordinate("ep")]
    held = {param.shape[0] for name, param in model.unwrap().named_parameters() if ".experts." in name}
    assert held == {2}
    compare_models(whole, model, coordinate=plugin.mesh.coordinate, gradients=False, tolerance=0.0)


def test_only_own_experts_are_read(tmp_path: Path) -> None:
    zoo.build(QWEN, dtype=torch.float32, num_experts=4).save_pretrained(tmp_path)
    run_ranks(reading, 2, tmp_path, {"zero_stage": 3})


# Gradients that some ranks lack.


class ForLongTexts(nn.Module):
    """A branch that a data-parallel rank with short texts does not take."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out + self.extra(x) if x.shape[1] > 8 else out


@keep_float64()
def lacking(rank: int, world: int) -> None:
    for stage, overlap in ((1, True), (1, False), (2, True)):
        reference = zoo.build(MIXTRAL, dtype=torch.float32, num_hidden_layers=4)
        last = reference.model.layers[-1]
        torch.manual_seed(0)
        last.mlp = ForLongTexts(last.mlp, reference.config.hidden_size)
        reference = reference.double()
        settings: dict[str, Any] = {"zero_stage": stage, "overlap_communication": overlap}
        plugin = HybridParallelPlugin(precision="fp32", ep_size=2, zero_bucket_size_in_m=0.002, **settings)
        booster, model = Booster(plugin=plugin), copy.deepcopy(reference)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        batches = [zoo.inputs(MIXTRAL, batch_size=2, seq_len=9 - 2 * replica, seed=replica) for replica in range(world)]
        booster.backward(model(**batches[rank]).loss, optimizer)
        for batch in batches:
            (reference(**batch).loss / world).backward()
        gradients = optimizer.gradients()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=gradients, weights=False)


def test_ranks_that_exchange_tokens_may_lack_gradients() -> None:
    """Nobody waits in backward for a bucket of a peer who waits for tokens."""
    run_ranks(lacking, 2, timeout=60)


# Layouts on paper, and what cannot be spread.


def test_blocks_of_pieces() -> None:
    """Experts over ep, and the features of each over tp."""
    full = torch.randn(6, 10, 4)
    spec = ParamSpec("experts", (6, 10, 4), 1, even_pieces(10, 2), axis="ep_tp", blocks=3)
    shards = [spec.shard(full, coordinate) for coordinate in range(6)]
    for coordinate, shard in enumerate(shards):
        block, part = divmod(coordinate, 2)
        assert torch.equal(shard, full[2 * block : 2 * block + 2, 5 * part : 5 * part + 5])
        assert spec.local_shape(coordinate) == tuple(shard.shape)
    assert torch.equal(spec.unshard(shards), full)


def test_experts_with_adapters_are_refused() -> None:
    settings = peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(zoo.build(MIXTRAL, dtype=torch.float32, num_hidden_layers=1), settings)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts carries adapters of its own.*use ep_size=1"):
        find_experts(model, 2)
