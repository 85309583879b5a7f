"""Sequences that are split along tensor parallelism, against one process and against closed forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from hybrid_ranks import Layout, run_layout
from torch import nn

from shardwright import Booster
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from tests.ranks.counting import CountCollectives

SPLIT: dict[str, Any] = {"enable_sequence_parallelism": True}
RING: dict[str, Any] = {**SPLIT, "sequence_parallelism_mode": "ring"}
AGAIN: dict[str, Any] = {"enable_sequence_overlap": True}
FOUR: dict[str, Any] = {"num_hidden_layers": 4}


def layout(model: str, world: int = 2, **plugin: Any) -> Layout:
    own = {name: plugin.pop(name) for name in ("overrides", "checkpointing", "calls", "steps") if name in plugin}
    return Layout(model, world, {"tp_size": 2, **SPLIT, **plugin}, **own)


TWO = [
    layout("llama-causal-lm", **AGAIN, calls=True, checkpointing=True),
    layout("gpt2-causal-lm", **RING),
    layout("bert-masked-lm", **RING, **AGAIN, zero_stage=1, steps=2),
    layout("qwen3-moe-causal-lm", calls=True),
    layout("opt-causal-lm", steps=2),
]
ZBV: dict[str, Any] = {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 2}
MORE = [
    layout("llama-causal-lm", 4, **ZBV, **AGAIN, overrides=FOUR, steps=2),
    layout("t5-conditional-generation", 4, pp_size=2, num_microbatches=2, **RING, checkpointing=True, steps=2),
    layout("llama-causal-lm", 4, tp_size=4, zero_stage=3, steps=2),
]
MODELS = [
    "llama-causal-lm",
    "qwen3-tied-causal-lm",
    "gpt2-causal-lm",
    "mixtral-causal-lm",
    "qwen3-moe-causal-lm",
    "t5-gated-conditional-generation",
    "bert-masked-lm",
]
KINDS: list[dict[str, Any]] = [{}, AGAIN, RING, {**RING, **AGAIN}]
MATRIX = [
    layout(model, world, tp_size=tp, pp_size=world // tp, **({"num_microbatches": 2} if world > tp else {}), **kind)
    for model in MODELS
    for world, tp in ((2, 2), (4, 4), (4, 2))
    for kind in KINDS
]


def train_all(rank: int, world: int, layouts: list[Layout]) -> None:
    for one in layouts:
        run_layout(rank, world, one)


@pytest.mark.parametrize("layouts", [TWO, MORE], ids=["two ranks", "four ranks"])
def test_they_train_like_one_process(layouts: list[Layout]) -> None:
    run_ranks(train_all, layouts[0].world, layouts, timeout=200)


@pytest.mark.sweep
@pytest.mark.parametrize("one", MATRIX, ids=str)
def test_every_mode_trains_like_one_process(one: Layout) -> None:
    run_ranks(train_all, one.world, [one], timeout=200)


BATCH, LENGTH, HIDDEN = 2, 8, 32


def llama(layers: int, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, "num_hidden_layers": layers, **settings}))


def boosted(model: nn.Module, **plugin: Any) -> nn.Module:
    settings = {"tp_size": dist.get_world_size(), "precision": "fp32", "make_vocab_size_divisible_by": 8, **plugin}
    model, *_ = Booster(plugin=HybridParallelPlugin(**settings)).boost(model)
    return model


class Saved:
    """Bytes of what is kept for backward, by shape without the samples; what lies in the same memory counts once."""

    def __init__(self, wide: int) -> None:
        self.wide, self.bytes, self._seen = wide, 0, []  # type: ignore[var-annotated]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        known = any(tensor.data_ptr() == other.data_ptr() for other in self._seen)
        if not known and not isinstance(tensor, nn.Parameter) and tensor.dim() == 3 and tensor.shape[-1] == self.wide:
            self.bytes += tensor.numel() * tensor.element_size()
            self._seen.append(tensor)
        return tensor


def measure(rank: int, world: int) -> dict[str, Any]:
    """Of one layer more: collectives forward and backward, and bytes kept of activations as wide as a layer's."""
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    found: dict[str, Any] = {}
    for name, plugin in (("plain", {}), ("split", SPLIT), ("again", {**SPLIT, **AGAIN}), ("ring", RING)):
        seen: list[Any] = []
        for layers in (1, 2):
            model = boosted(llama(layers), **plugin)
            saved = Saved(HIDDEN)
            with CountCollectives() as forward, torch.autograd.graph.saved_tensors_hooks(saved, lambda one: one):
                loss = model(input_ids=ids, labels=ids).loss
            with CountCollectives() as backward:
                loss.backward()
            seen.append((forward.calls, backward.calls, saved.bytes))
        counts = [dict(seen[1][way] - seen[0][way]) for way in (0, 1)]
        found[name] = counts, seen[1][2] - seen[0][2]
    return found


def test_they_send_the_bytes_of_the_all_reduces_and_keep_parts_of_activations() -> None:
    pair = {"_allgather_base_": 2, "_reduce_scatter_base_": 2}
    for found in run_ranks(measure, 2, timeout=100):
        assert found["plain"][0] == [{"allreduce_": 2}, {"allreduce_": 2}]
        # of [B, S, H] each, as an all-reduce is
        assert found["split"][0] == [pair, pair]
        assert found["again"][0] == [pair, {**pair, "_allgather_base_": 4}]
        assert found["ring"][0] == [
            {"broadcast_": 4, "reduce_": 4},
            {"broadcast_": 4, "_reduce_scatter_base_": 2},
        ]
        whole = BATCH * LENGTH * HIDDEN * 4
        assert found["again"][1] * 2 == found["plain"][1]
        # two inputs of column linears are whole
        assert found["split"][1] - found["again"][1] in (whole, 2 * whole)


def keep_mask(masks: list[torch.Tensor], module: nn.Module, args: Any, y: torch.Tensor) -> None:
    masks.append(y == 0)


def drop(rank: int, world: int) -> dict[str, Any]:
    """Masks between and behind regions, and the gradients of a step with and without recomputation."""
    torch.manual_seed(rank)
    found: dict[str, Any] = {}
    for name, config in (("kept", None), ("recomputed", PipelineGradientCheckpointConfig(1.0))):
        torch.manual_seed(3)
        native = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16))
        model = boosted(native, **SPLIT, gradient_checkpoint_config=config).train()
        masks: list[torch.Tensor] = []
        inner = model.unwrap()
        inner.transformer.h[0].mlp.dropout.register_forward_hook(partial(keep_mask, masks))
        torch.manual_seed(5)
        ids = torch.arange(32).view(2, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        sync_shared_gradients(inner.parameters(), dist.group.WORLD)
        found[name] = loss.item(), masks[0], [param.grad.clone() for param in inner.parameters()]
    return found


def test_dropout_differs_by_rank_where_sequences_are_split() -> None:
    first, second = run_ranks(drop, 2, timeout=100)
    assert first["kept"][0] == second["kept"][0] == first["recomputed"][0]
    assert first["kept"][1].shape == (2, 8, 32)
    assert not torch.equal(first["kept"][1], second["kept"][1])
    for found in (first, second):
        for kept, again in zip(found["kept"][2], found["recomputed"][2], strict=True):
            torch.testing.assert_close(kept, again, rtol=1e-5, atol=1e-7)
    # norms, which both ranks hold
    assert any(torch.equal(a, b) for a, b in zip(first["kept"][2], second["kept"][2], strict=True))


class Shifting(tf.LlamaForCausalLM):
    """Every layer looks at the position before, as a convolution does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm.register_forward_hook(lambda module, args, y: y + 0.5 * y.roll(1, 1))


def refuse(rank: int, world: int) -> list[str]:
    found = []
    for model in (Shifting(llama(1).config), llama(1)):
        ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
        try:
            wrapped = boosted(model, **SPLIT)
            with pytest.raises(ValueError, match="output_hidden_states=True") as hidden:
                wrapped(input_ids=ids, output_hidden_states=True)
            found.append(str(hidden.value))
            with pytest.raises(ValueError, match="sequences of 1 cannot be split") as short:
                wrapped(input_ids=ids[:, :1])
            found.append(str(short.value))
            with torch.no_grad():
                found.append(str(wrapped.unwrap().generate(ids, max_new_tokens=3, do_sample=False).tolist()))
            plain = llama(1).generate(ids, max_new_tokens=3, do_sample=False).tolist()
            found.append(str(plain))
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_split_is_refused_by_name() -> None:
    for shifting, hidden, short, generated, plain in run_ranks(refuse, 2, timeout=100):
        assert "layers of Shifting need whole sequences outside of attention and MLPs" in shifting
        assert "enable_sequence_parallelism=False" in shifting
        assert "enable_sequence_parallelism=False" in hidden
        assert "use sequences of at least 2" in short
        assert generated == plain
