"""`enable_jit_fused`: graphs are counted, and layouts with compiled layers equal one process without any."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from habits import Habits
from hybrid_ranks import Layout, run_layout
from sequence_ranks import compare_all
from torch import fx, nn
from torch._dynamo.utils import counters
from transformers import AlbertConfig, AlbertForMaskedLM

import shardwright
import shardwright.attention.ring  # whose operators graphs may hold
from shardwright import Booster
from shardwright.ops import compiled, compiled_sequence, layer_graphs
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, run_ranks, zoo

ON = {"enable_jit_fused": True}
PIPE = {**ON, "pp_size": 2, "num_microbatches": 2}
FOUR = {"num_hidden_layers": 4}
V = {"num_model_chunks": 2, "num_microbatches": 4}
CKPT = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)}
SPLIT = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
PARTS = {**SPLIT, "sequence_parallelism_mode": "ring", "enable_sequence_overlap": True}
TWO = {"num_hidden_layers": 2}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# With the graphs of one rank: one for a kind of layers, one more for lengths that change. Layers that are given a first
# input without a gradient are of another kind.
LAYOUTS: list[tuple[Layout, int | None]] = [
    # whose weight gradients wait for the schedule
    (Layout("llama-causal-lm", 2, {**PIPE, **CKPT, "zero_stage": 1, "pp_style": "zb"}, FOUR, steps=1), 1),
    (Layout("llama-causal-lm", 2, {**ON, **PARTS, **CKPT}, TWO, steps=2), 2),
    # Layers that are no graph: norms, attention and router of each are.
    (Layout("qwen3-moe-causal-lm", 2, {**ON, "ep_size": 2, "zero_stage": 2}, TWO, steps=2), 6),
]
SWEPT: list[tuple[Layout, int | None]] = [  # None: not counted
    # gradients of another dtype than their parameters, and hooks that wait for these
    (
        Layout(
            "llama-causal-lm",
            2,
            {**ON, "zero_stage": 1, "overlap_allgather": True},
            habits=Habits(half="bf16"),
            dtype="fp32",
        ),
        2,
    ),
    (Layout("llama-causal-lm", 2, {**ON, **ULYSSES}, calls=True, steps=2), 2),
    (Layout("llama-causal-lm", 2, {**ON, "tp_size": 2}, calls=True, habits=Habits(lora=True), steps=1), 2),
    (Layout("gpt2-causal-lm", 2, {**ON, "zero_stage": 3}, steps=1), 1),
    (Layout("llama-causal-lm", 2, {**ON, **SPLIT, **CKPT}, FOUR, steps=1), 1),
    (Layout("gpt2-causal-lm", 2, {**ON, **RING, **CKPT}, {"n_layer": 4}, steps=2), 2),
    (Layout("llama-causal-lm", 2, {**ON, "tp_size": 2}, dtype="fp32"), 2),
    (Layout("t5-seq2seq-base", 2, {**ON, "tp_size": 2}), 8),
    (Layout("bert-masked-lm", 2, PIPE), 2),
    (Layout("llama-causal-lm", 2, {**PIPE, "offload_activations": 1.0}, FOUR), 2),
    (Layout("llama-causal-lm", 2, {**PIPE, **CKPT, "zero_stage": 1}, FOUR), 2),
    (Layout("llama-causal-lm", 2, {**PIPE, **V, "pp_style": "zbv"}, FOUR, habits=Habits(lora=True)), None),
    (Layout("gpt2-causal-lm", 2, {**PIPE, **V, "pp_style": "dualpipev"}, {"n_layer": 4}), None),
    (Layout("qwen3-moe-causal-lm", 2, {**PIPE, "pp_style": "zb"}, FOUR), None),
    (Layout("llama-causal-lm", 4, {**PIPE, **V, "pp_style": "zbv", "tp_size": 2, "zero_stage": 1}, FOUR), 2),
    (Layout("llama-causal-lm", 4, {**PIPE, **V, "pp_style": "dualpipev", "tp_size": 2}, FOUR), None),
    (Layout("llama-causal-lm", 4, {**PIPE, "pp_style": "zb", "zero_stage": 3}, FOUR), None),
    (Layout("llama-causal-lm", 4, {**PIPE, **PARTS, "pp_style": "zb"}, FOUR), None),
    (Layout("llama-causal-lm", 2, {**ON, "zero_stage": 2}, habits=Habits(half="bf16"), dtype="fp32"), 2),
    (Layout("llama-causal-lm", 2, {**ON, "zero_stage": 3}, checkpointing=True), 2),
    (Layout("qwen3-moe-causal-lm", 2, {**ON, "tp_size": 2}), 6),
    (Layout("mixtral-causal-lm", 2, {**ON, "ep_size": 2, "zero_stage": 3, **CKPT}, TWO), 7),
    (Layout("llama-causal-lm", 2, {**ON, **PARTS}, TWO, habits=Habits(lora=True)), None),
    (Layout("gpt2-causal-lm", 2, {**ON, **PARTS}), 2),
    (Layout("bert-masked-lm", 2, {**ON, **PARTS, "enable_sequence_overlap": False}), 2),
    (Layout("llama-causal-lm", 2, {**ON, **SPLIT, "enable_sequence_overlap": True, "zero_stage": 1}), 2),
    (Layout("t5-conditional-generation", 2, {**ON, **ULYSSES}, calls=True), None),
    (Layout("bloom-causal-lm", 2, {**ON, **RING}), 2),
    (Layout("llama-causal-lm", 4, {**PIPE, **PARTS}, FOUR), 2),
    (Layout("qwen3-moe-causal-lm", 4, {**ON, "ep_size": 2, "tp_size": 2, "zero_stage": 1}), None),
    (Layout("gpt2-causal-lm", 2, {**ON, **SPLIT}), 2),
    (Layout("bert-masked-lm", 2, {**ON, **SPLIT}), 2),
    (Layout("mixtral-causal-lm", 2, {**ON, **SPLIT}), None),
    (Layout("llama-causal-lm", 2, {**ON, **RING}), 2),
    (Layout("bert-masked-lm", 2, {**ON, **RING}), 2),
    (Layout("bert-masked-lm", 2, {**ON, **ULYSSES}), 2),
    (Layout("mistral-causal-lm", 2, {**ON, **ULYSSES}), 2),
    (Layout("qwen3-causal-lm", 4, {**ON, **RING, "tp_size": 2, "zero_stage": 3}, steps=2), 2),
    (Layout("llama-causal-lm", 4, {**PIPE, **ULYSSES, "zero_stage": 1}, FOUR), 2),
    (Layout("llama-causal-lm", 4, {**ON, **RING, "sp_size": 4, "ulysses_size": 2}), 2),
    # Parts of layers, and layers of models that see whole sequences, among more axes.
    (Layout("t5-conditional-generation", 4, {**PIPE, **RING}, steps=1), None),
    (Layout("mixtral-causal-lm", 4, {**PIPE, **SPLIT}, TWO, steps=1), None),
    (Layout("mixtral-causal-lm", 4, {**ON, **ULYSSES, "tp_size": 2}, TWO, steps=1), None),
    (Layout("mixtral-causal-lm", 4, {**PIPE, **V, **SPLIT, "pp_style": "zbv"}, FOUR, steps=1), None),
    (Layout("mixtral-causal-lm", 4, {**ON, **RING, "sp_size": 4, "ulysses_size": 2}, {**TWO, **ROUTED}, steps=1), None),
]
# model, batch, arguments, called itself: windows and soft caps, packed rows, padding in front, heads that do not divide
SEQUENCES = [
    ("gemma2", "packed", {**ON, **ULYSSES, "sp_size": 3}, True),
    ("gemma2", "packed", {**ON, **RING, "sp_size": 3}, True),
    ("mistral-causal-lm", "in front", {**ON, **ULYSSES, "sp_size": 3}, True),
    ("llama-causal-lm", "few", {**ON, **RING, "sp_size": 3, "ulysses_size": 3}, True),
]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """One process that compiles by the backend that is named."""
    monkeypatch.setenv("LOCAL_RANK", "0")

    def start(backend: str) -> None:
        monkeypatch.setattr(layer_graphs, "backend", backend)
        shardwright.launch(0, 1, None, None, backend="gloo")
        counters.clear()

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(rank: int, world: int, layouts: list[tuple[Layout, int | None]], backend: str) -> None:
    layer_graphs.backend = backend
    for layout, graphs in layouts:
        counters.clear()
        run_layout(rank, world, layout)
        assert not counters["graph_break"], counters["graph_break"]
        found = counters["stats"]["unique_graphs"]
        assert found if graphs is None else found == graphs, (str(layout), counters["stats"])


def test_layouts_equal_one_process() -> None:
    run_ranks(_train, 2, LAYOUTS, "aot_eager")


@pytest.mark.sweep
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", SWEPT + LAYOUTS, ids=lambda case: str(case[0]))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_layouts(case: tuple[Layout, int | None], backend: str) -> None:
    run_ranks(_train, case[0].world, [case], backend, timeout=500)


def _train_sequences(rank: int, world: int, backend: str) -> None:
    layer_graphs.backend = backend
    for case in SEQUENCES:
        counters.clear()
        compare_all(rank, world, [case])
        # One for layers with windows, and one for those without.
        assert counters["stats"]["unique_graphs"] == (2 if case[0] == "gemma2" else 1), (case, counters["stats"])
        assert not counters["graph_break"], counters["graph_break"]


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_sequences(backend: str) -> None:
    run_ranks(_train_sequences, 3, backend, timeout=500)


def _boost(model: nn.Module, **settings: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **{**ON, **settings}))
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    return booster, boosted, optimizer


def _batch(model: str, length: int) -> dict[str, torch.Tensor]:
    return zoo.inputs(model, batch_size=3, seq_len=length, seed=length, dtype=torch.float32)


def test_layers_share_a_graph_and_lengths_cost_one_more(alone: Callable[[str], None]) -> None:
    alone("aot_eager")
    plain = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=3)
    names = list(plain.state_dict())
    booster, model, optimizer = _boost(copy.deepcopy(plain))
    assert list(model.unwrap().state_dict()) == names
    seen = []
    for length in (11, 11, 13, 9, 16, 10):
        batch = _batch("llama-causal-lm", length)
        loss, expected = model(**batch, use_cache=True).loss, plain(**batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        booster.backward(loss, optimizer)
        expected.backward()
        for (name, param), (_, other) in zip(model.unwrap().named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)
        optimizer.zero_grad()
        plain.zero_grad()
        seen.append(counters["stats"]["unique_graphs"])
    assert seen == [1, 1, 2, 2, 2, 2]
    model.eval()  # with a cache of keys and values, which has another state in every layer
    with torch.no_grad():
        filled = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
    assert filled.get_seq_length() == 10
    assert counters["stats"]["unique_graphs"] == 2


def _sums(x: torch.Tensor, other: torch.Tensor, *weights: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    """Two linears on one input and one on another, each behind a row linear."""
    first, second = (compiled.column_linear(x, weight, None, group, False) for weight in weights[:2])
    third = compiled.column_linear(other, weights[2], None, group, False)
    rows = (nn.functional.silu(first) * second, weights[0]), (third, weights[2])
    return tuple(compiled.row_linear(value, weight.t(), None, group, False) for value, weight in rows)


def test_inductor_compiles_collectives(alone: Callable[[str], None]) -> None:
    alone("inductor")
    sums = partial(_sums, group=compiled.name_of(dist.group.WORLD))
    inputs = [torch.rand(size, 8, dtype=torch.float64, requires_grad=True) for size in (5, 3, 16, 16, 16)]
    seen = []
    for function in (sums, torch.compile(sums, backend=layer_graphs.compile_graph, fullgraph=True)):
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            outputs = function(*inputs)
            found = torch.autograd.grad(sum((each**2).sum() for each in outputs), inputs)
        seen.append((outputs, found, [len(call.args[0]) for call in all_reduce.call_args_list]))
    torch.testing.assert_close(seen[1][:2], seen[0][:2], rtol=1e-10, atol=1e-10)
    assert seen[1][2] == [5, 3, 3, 5]  # the two linears share one, as in eager layers
    assert counters["inductor"], "nothing was compiled"


def _steps_are_equal(plain: nn.Module, boosted: tuple[Booster, Any, Any], batch: dict[str, Any], **asked: Any) -> Any:
    """Loss and gradients of one more batch; both models' outputs."""
    booster, model, optimizer = boosted
    outputs, expected = model(**batch, **asked), plain(**batch, **asked)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=1e-5)
    booster.backward(outputs.loss, optimizer)
    expected.loss.backward()
    for (name, param), (_, other) in zip(model.unwrap().named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)
    optimizer.zero_grad()
    plain.zero_grad()
    return outputs, expected


def test_hooks_inside_of_layers_are_called(alone: Callable[[str], None]) -> None:
    """Those that come when graphs are there already, and transformers' own, which stay when they are asked nothing."""
    alone("aot_eager")
    plain: Any = zoo.build("llama-causal-lm", dtype=torch.float32, attn_implementation="eager")
    boosted = _boost(copy.deepcopy(plain))
    _steps_are_equal(plain, boosted, _batch("llama-causal-lm", 11))
    outputs, expected = _steps_are_equal(plain, boosted, _batch("llama-causal-lm", 11), output_attentions=True)
    torch.testing.assert_close(outputs.attentions, expected.attentions)
    assert counters["stats"]["unique_graphs"] == 1 + 3  # norms, attention and MLP, each for itself
    _steps_are_equal(plain, boosted, _batch("llama-causal-lm", 13))
    assert counters["stats"]["unique_graphs"] == 5
    for model in (plain, boosted[1].unwrap()):
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 3 * output)
        model.model.layers[2].mlp.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],))
    _steps_are_equal(plain, boosted, _batch("llama-causal-lm", 11))
    assert counters["stats"]["unique_graphs"] == 6


def test_what_is_compiled_stays_so_when_others_cannot_be(
    alone: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpointed layer that ran compiled is recomputed as it ran, though later layers have no graphs."""
    alone("aot_eager")
    monkeypatch.setattr(layer_graphs, "MOST_GRAPHS", 2)
    plain = zoo.build("gpt2-causal-lm", dtype=torch.float32, n_layer=4, scale_attn_by_inverse_layer_idx=True)
    whole = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    with caplog.at_level(logging.WARNING):
        boosted = _boost(copy.deepcopy(plain), gradient_checkpoint_config=whole)
        for length in (11, 9):
            _steps_are_equal(plain, boosted, _batch("gpt2-causal-lm", length))
    assert counters["stats"]["unique_graphs"] == 2
    [said] = [record.getMessage() for record in caplog.records if "enable_jit_fused" in record.getMessage()]
    assert "layers of class GPT2Block are not compiled where graphs do not fit" in said


def test_a_layer_that_is_applied_again_and_again_is_compiled(alone: Callable[[str], None]) -> None:
    alone("aot_eager")
    config = AlbertConfig(
        vocab_size=40,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
    )
    plain = AlbertForMaskedLM(config).train()
    for module in plain.modules():  # without dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    boosted = _boost(copy.deepcopy(plain))
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    _steps_are_equal(
        plain, boosted, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    )
    assert counters["stats"]["unique_graphs"] == 1


class _Printing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(float(x.sum()))  # the host waits for it: no graph goes over this
        return x


class _Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x.detach()[..., 0] > 0]
        return x + rows.mean() if rows.numel() else x  # of which dynamo's error is none of its own kind


@pytest.mark.parametrize("made", [_Printing, _Choosing])
def test_what_is_no_graph_runs_as_it_is(
    made: type[nn.Module], alone: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    alone("aot_eager")
    plain = zoo.build("llama-causal-lm", dtype=torch.float32)
    for layer in plain.model.layers:  # type: ignore[union-attr]
        layer.mlp = nn.Sequential(layer.mlp, made())  # type: ignore[union-attr]
    booster, model, optimizer = _boost(copy.deepcopy(plain))
    batch = _batch("llama-causal-lm", 11)
    with caplog.at_level(logging.WARNING):
        loss = model(**batch).loss
    said, inside = [record.getMessage() for record in caplog.records if "enable_jit_fused" in record.getMessage()]
    assert "layers of class LlamaDecoderLayer are not compiled and run as they are, but for modules inside" in said
    assert "modules inside of layers of class Sequential are not compiled" in inside
    torch.testing.assert_close(loss, plain(**batch).loss, rtol=1e-5, atol=1e-5)
    booster.backward(loss, optimizer)
    assert counters["stats"]["unique_graphs"] == 3  # norms, attention and MLPs


def test_what_cannot_be_compiled_is_refused(alone: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    alone("inductor")
    with pytest.raises(ValueError, match="Sequential has no list of layers"):
        _boost(nn.Sequential(nn.Linear(2, 2)))
    if not torch.cuda.is_available():
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(ValueError, match="there is no no-such-compiler; install one"):
            _boost(zoo.build("llama-causal-lm", dtype=torch.float32))


def test_the_report_says_what_runs_in_parts(alone: Callable[[str], None]) -> None:
    alone("aot_eager")
    plugin = HybridParallelPlugin(precision="fp32", **ON)
    report = str(plugin.preflight(zoo.build("qwen3-moe-causal-lm")))
    assert "compiled: 4 x Qwen3MoeDecoderLayer in parts (experts_implementation='eager')" in report
    fused = zoo.build("qwen3-moe-causal-lm", experts_implementation="grouped_mm", output_router_logits=True)
    assert "4 x Qwen3MoeDecoderLayer in parts (output_router_logits=True)" in str(plugin.preflight(fused))


def test_what_was_gathered_is_read_twice_and_sent_once() -> None:
    """By column linears, whose gradients are summed as they are dealt out, and by somebody else."""
    graph = fx.Graph()
    operators = torch.ops.shardwright
    x = graph.placeholder("x")
    gathered = graph.call_function(operators.gather_sequence.default, (x, "tp", 1, 8, False, False, False))
    copied = graph.call_function(operators.copy_to_group.default, (gathered, "tp"))
    graph.output((gathered, graph.call_function(operators.deal_sequence.default, (copied, "tp", 1, True))))
    compiled_sequence.read_by_shards(graph)
    graph.lint()
    assert [node.args for node in graph.nodes if compiled.calls(node, "gather_sequence")] == [
        (x, "tp", 1, 8, False, False, False),
        (x, "tp", 1, 8, True, False, False),
    ]
    compiled_sequence.share_gathers(graph)
    compiled.keep_order(graph)
    graph.lint()
    [one] = [node for node in graph.nodes if compiled.calls(node, "gather_sequence")]
    [dealt] = [node for node in graph.nodes if compiled.calls(node, "deal_sequence")]
    assert dealt.args == (one, "tp", 1, True, one)


def test_sums_over_ranks_keep_their_order() -> None:
    """Two that do not depend on each other, behind one copy that both read."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    copies = [graph.call_function(torch.ops.shardwright.copy_to_group.default, (x, "tp")) for _ in range(2)]
    sums = [graph.call_function(torch.ops.shardwright.sum_over_group.default, (each, "tp")) for each in copies]
    graph.output(tuple(sums))
    compiled.share_copies(graph)
    assert sums[0].args == sums[1].args == (copies[0], "tp")
    compiled.keep_order(graph)
    assert sums[0].args == (x, "tp")
    assert sums[1].args == (x, "tp", sums[0])
    graph.lint()


def test_rings_keep_their_order() -> None:
    """An operator with several results, behind one of another kind."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    operators = torch.ops.shardwright
    traded = graph.call_function(operators.trade_heads.default, (x, "sp", [2, 1], [1, 2], True))
    settings = ("ring", [], True, None, 1.0, None, 0.0)
    ring = graph.call_function(operators.ring_attention.default, (x, x, x, None, None, None, *settings))
    ring.meta["val"] = torch.empty(1), torch.empty(2), torch.empty(())
    summed = graph.call_function(operators.sum_over_group.default, (x, "tp"))
    graph.output((traded, ring, summed))
    compiled.keep_order(graph)
    graph.lint()
    assert ring.args == (x, x, x, None, None, None, *settings, traded)
    first = summed.args[-1]
    assert isinstance(first, fx.Node)
    assert first.args == (ring, 0)
