"""Activations of gated MLPs and rotary positions in one, in models of transformers, against the same models as they
are.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import tiny_text_models as tiny
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

from shardwright.shardformer.layer.activation import Activated, GatedActivation, fuse_activations
from shardwright.shardformer.layer.rotary import FusedRotary, fuse_rotary, rotary_of
from shardwright.testing import keep_float64, zoo

# How many activations and modules with rotary positions, of models of four layers.
FAMILIES = {
    "llama": (4, 4),
    "phi3": (4, 4),  # gate and up packed, some features without an angle
    "glm": (4, 4),  # pairs of neighbours, angles of the first half
    "cohere": (4, 4),  # pairs of neighbours, computed in 32 bits
    "gemma2": (4, 4),  # GELU
    "gpt_neox": (0, 4),
    "gpt_oss": (0, 4),  # angles of half the features, and a gate of its own
    "deepseek_v3": (7, 4),  # neighbours that become halves; experts, and shared ones
    "qwen2_moe": (8, 4),
    "falcon_h1": (4, 4),  # gated by a factor of its own
    "gptj": (0, 0),
    "gpt2": (0, 0),
    "lfm2": (0, 4),  # an activation that is no module
}


def step(model: Any, batch: Any) -> list[Tensor]:
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
@keep_float64()
def test_families(family: str) -> None:
    model = tiny.build(family).train()
    plain, batch = copy.deepcopy(model), tiny.inputs(model)
    assert (fuse_activations(model), fuse_rotary(model)) == FAMILIES[family]
    assert (fuse_activations(model), fuse_rotary(model)) == (0, 0), "once is enough"
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for found, expected in zip(step(model, batch), step(plain, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@keep_float64()
def test_other_models_keep_what_they_have() -> None:
    own = modeling_llama.apply_rotary_pos_emb
    model, other = (zoo.build("llama-causal-lm", num_hidden_layers=2) for _ in range(2))
    assert (fuse_activations(model), fuse_rotary(model)) == (2, 2)
    attention: Any = model.model.layers[0].self_attn
    assert isinstance(attention, FusedRotary)
    assert isinstance(attention, modeling_llama.LlamaAttention)
    assert type(attention) is type(model.model.layers[1].self_attn)
    assert modeling_llama.apply_rotary_pos_emb is own
    assert type(other.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    assert not isinstance(other.model.layers[0].mlp.act_fn, GatedActivation)
    assert attention.forward.__globals__["apply_rotary_pos_emb"] is not own
    again = copy.deepcopy(model)
    batch = zoo.inputs(model)
    expected = step(other, batch)
    for one in (model, again):
        torch.testing.assert_close(step(one, batch), expected, rtol=1e-10, atol=1e-12)


def test_a_modeling_file_that_somebody_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a file is what it is now; a function that turns the other way is none that is known."""

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return own(q, k, cos, -sin, unsqueeze_dim)

    own = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
        assert fuse_rotary(zoo.build("llama-causal-lm", num_hidden_layers=1)) == 0
    assert fuse_rotary(zoo.build("llama-causal-lm", num_hidden_layers=1)) == 1


def test_calls_that_were_not_tried_go_to_the_function_itself() -> None:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=1)
    fuse_rotary(model)
    ours: Any = model.model.layers[0].self_attn.forward.__globals__["apply_rotary_pos_emb"]
    own = modeling_llama.apply_rotary_pos_emb
    q, k, cos, sin = (torch.randn(shape) for shape in ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 8), (2, 5, 8)))
    by_token = q.transpose(1, 2), k.transpose(1, 2), cos, sin
    for args, kwargs in (
        (by_token, {}),
        ((q, k, cos, sin), {"unsqueeze_dim": 2}),
        ((*by_token[:2], cos[:1], sin[:1]), {}),
        ((*by_token[:2], cos[:, :1], sin[:, :1]), {}),  # one angle for all tokens
        ((*by_token[:2], cos.double(), sin.double()), {}),
        ((*by_token[:2], cos.requires_grad_(), sin), {}),
        (by_token[:2], {"cos": cos, "sin": sin}),
    ):
        for found, expected in zip(ours(*args, **kwargs), own(*args, **kwargs), strict=True):
            assert found.requires_grad == expected.requires_grad
            torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError):
        ours(*by_token[:2], cos[..., :6], sin[..., :6])  # as the function itself would
    assert rotary_of(lambda q, k, cos, sin: (q, k)) is None


def test_what_stands_for_an_activation() -> None:
    """Other uses than the product get the numbers; what is watched or called in another way is left alone."""
    act = nn.SiLU()
    mlp = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=1).model.layers[0].mlp
    gate, up = torch.randn(2, 3, 5).unbind()
    lazy = Activated(gate, "silu", act, None)
    expected = act(gate)
    for found, wanted in (
        (lazy * up, expected * up),
        (up * lazy, expected * up),
        (torch.mul(up, lazy), expected * up),
        (lazy * up[0], expected * up[0]),
        (lazy * 2, expected * 2),
        (torch.cat([lazy, up]), torch.cat([expected, up])),  # type: ignore[list-item]
        (nn.functional.linear(lazy, up), expected @ up.t()),  # type: ignore[arg-type]
        (lazy.sum(0), expected.sum(0)),
        (1 - lazy, 1 - expected),
        (lazy[0], expected[0]),
        (up @ lazy[:].t(), up @ expected.t()),
    ):
        torch.testing.assert_close(found, wanted)
    assert lazy.shape == gate.shape
    assert isinstance(copy.deepcopy(lazy), Activated)
    handle = mlp.act_fn.register_forward_hook(lambda *_: None)
    assert fuse_activations(mlp) == 0
    handle.remove()
    mlp.forward = lambda x: x
    assert fuse_activations(mlp) == 0
    del mlp.forward
    kept: list[Tensor] = []
    sizes = []
    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
            mlp(torch.randn(7, 48))
        sizes.append(sum(x.numel() for x in kept if x.shape == (7, 88)))
        assert fuse_activations(mlp) == (not sizes[1:])
    assert sizes == [4 * 7 * 88, 3 * 7 * 88], "of gate, its activation, up and their product"


@keep_float64()
def test_adapters() -> None:
    config = peft.LoraConfig(
        r=3, target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    plain = peft.get_peft_model(zoo.build("qwen3-causal-lm", num_hidden_layers=2), config)
    model: Any = copy.deepcopy(plain)
    assert (fuse_activations(model), fuse_rotary(model)) == (2, 2)
    batch = zoo.inputs(model.get_base_model())
    torch.testing.assert_close(step(model, batch), step(plain, batch), rtol=1e-10, atol=1e-12)


def test_fused_layers_are_one_graph() -> None:
    model = zoo.build("qwen3-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    plain, batch = copy.deepcopy(model), zoo.inputs(model)
    assert (fuse_activations(model), fuse_rotary(model)) == (2, 2)
    expected = step(plain, batch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(step(model, batch), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2  # the first layer's input and that of the others
    torch._dynamo.reset()
