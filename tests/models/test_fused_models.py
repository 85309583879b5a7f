"""Activations of gated MLPs and rotary positions in one, in models of transformers, against the same models as they
are.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import peft
import pytest
import tiny_text_models as tiny
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shardwright.shardformer.layer.activation import Activated, GatedActivation, fuse_activations
from shardwright.shardformer.layer.norm import fuse_norms
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
    "lfm2": (0, 2),  # an activation that is no module; half of its layers have attention
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
    assert attention.forward.__globals__ is vars(modeling_llama)
    again = copy.deepcopy(model)
    batch = zoo.inputs(model)
    expected = step(other, batch)
    for one in (model, again):
        torch.testing.assert_close(step(one, batch), expected, rtol=1e-10, atol=1e-12)


def test_a_modeling_file_that_somebody_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a file is what it is now; a function that turns the other way is none that is known. Whoever
    changes the file later, or what its functions call, changes models that were fused before too.
    """

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return own(q, k, cos, -sin, unsqueeze_dim)

    own, half = modeling_llama.apply_rotary_pos_emb, modeling_llama.rotate_half
    fused, plain = (zoo.build("llama-causal-lm", num_hidden_layers=1) for _ in range(2))
    assert fuse_rotary(fused) == 1
    batch, losses = zoo.inputs(plain), set()
    for name, changed in (("apply_rotary_pos_emb", backwards), ("rotate_half", lambda x: -half(x)), ("Cache", None)):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, name, changed)
            assert fuse_rotary(zoo.build("llama-causal-lm", num_hidden_layers=1)) == (name == "Cache")
            torch.testing.assert_close(fused(**batch).loss, plain(**batch).loss, rtol=1e-12, atol=0)
            losses.add(round(plain(**batch).loss.item(), 9))
    assert len(losses) == 2
    assert fuse_rotary(plain) == 1


SCALE = 1.0


class AttentionOfAScript(modeling_llama.LlamaAttention):
    """Reads a name of its file that changes while it trains, and writes one."""

    seen: list[float] = []

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        q, k, v = (
            linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = modeling_llama_rotary(q, k, *position_embeddings)
        self.seen.append(SCALE)
        y, _ = modeling_llama.eager_attention_forward(self, q * SCALE, k, v, attention_mask, scaling=self.scaling)  # type: ignore[no-untyped-call]
        return self.o_proj(y.flatten(2)), None


modeling_llama_rotary = modeling_llama.apply_rotary_pos_emb


@keep_float64()
def test_names_of_a_script_are_read_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = zoo.build("llama-causal-lm", num_hidden_layers=1)
    fused.model.layers[0].self_attn.__class__ = AttentionOfAScript
    plain = copy.deepcopy(fused)
    assert fuse_rotary(fused) == 1
    batch = zoo.inputs(plain)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    torch.testing.assert_close(step(fused, batch), step(plain, batch), rtol=1e-10, atol=1e-12)
    assert AttentionOfAScript.seen == [2.0, 2.0]


def test_calls_that_were_not_tried_go_to_the_function_itself() -> None:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=1)
    fuse_rotary(model)
    forward: Any = model.model.layers[0].self_attn.forward
    [ours] = (forward.__globals__[name] for name in forward.__code__.co_names if name.endswith("_in_one"))
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
        ((lazy > 0) == (lazy >= 0), (expected > 0) == (expected >= 0)),
        (torch.where(lazy == 0, 1.0, 2.0), torch.where(expected == 0, 1.0, 2.0)),
        (-lazy % 1 // 2, -expected % 1 // 2),
    ):
        torch.testing.assert_close(found, wanted)
    assert lazy.shape == gate.shape
    changed = Activated(gate, "silu", act, None)
    changed.add_(1)
    changed[0] = 3.0
    changed -= up
    assert not isinstance(changed, Activated), "as the tensor is that was changed in place"
    plainly = expected + 1
    plainly[0] = 3.0
    torch.testing.assert_close(changed * up, (plainly - up) * up)
    torch.testing.assert_close(copy.deepcopy(lazy), expected)
    with torch.no_grad():
        constant = Activated(gate.requires_grad_(), "silu", act, None)
    assert not (constant * up).requires_grad, "nor is act(gate) when autograd was off"
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


class Doubled(torch.autograd.Function):
    """Sees no gradients of what is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


class Gated(nn.Module):
    def __init__(self, act: nn.Module, use: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        self.act, self.use = act, use

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        if self.use == "alone":
            return self.down(Doubled.apply(gate))  # type: ignore[no-any-return]
        y = gate * self.up(x)
        if self.use == "twice" or (self.use == "twice in training" and self.training):
            y = y + Doubled.apply(gate)
        return self.down(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("uses", [("once", "once"), ("once", "alone"), ("twice",), ("twice in training",)], ids=str)
def test_activations_that_are_used_otherwise_too_are_left(uses: tuple[str, ...]) -> None:
    """In one of the modules that share it, or beside the product, or in training alone."""
    torch.manual_seed(0)
    act = nn.SiLU()
    plain = nn.Sequential(*(Gated(act, use) for use in uses)).eval()
    model = copy.deepcopy(plain)
    assert fuse_activations(model) == (uses == ("once", "once"))
    x = torch.randn(3, 6)
    for module in (plain, model):
        module.train()(x).sin().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_hooks_see_numbers() -> None:
    mlp = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=1).model.layers[0].mlp
    assert fuse_activations(mlp) == 1
    x, seen = torch.randn(2, 48), []
    handles = [mlp.act_fn.register_forward_hook(lambda module, args, y: seen.append(y))]
    handles.append(mlp.act_fn.register_full_backward_hook(lambda module, dx, dy: seen.extend(dy)))
    mlp(x).sum().backward()
    torch.testing.assert_close(seen[0], nn.functional.silu(mlp.gate_proj(x)))
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    assert isinstance(mlp.act_fn(x), Activated)


@keep_float64()
def test_gradients_of_functions() -> None:
    """`torch.func`, which cannot take functions of autograd apart: gradients of each sample."""
    plain = zoo.build("llama-causal-lm", num_hidden_layers=1, attn_implementation="eager")
    model = copy.deepcopy(plain)
    assert (fuse_activations(model), fuse_rotary(model), fuse_norms(model)) == (1, 1, 3)
    ids = zoo.inputs(plain)["input_ids"]

    def run(module: nn.Module) -> Any:
        def loss(weights: Any, ids: Tensor) -> Tensor:
            batch = {"input_ids": ids[None], "labels": ids[None]}
            return torch.func.functional_call(module, weights, (), batch).loss  # type: ignore[no-any-return]

        weights = {name: weight.detach() for name, weight in module.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids)

    torch.testing.assert_close(run(model), run(plain), rtol=1e-10, atol=1e-12)


def test_derivatives_forwards() -> None:
    plain = zoo.build("llama-causal-lm", num_hidden_layers=1).model.layers[0].mlp
    model = copy.deepcopy(plain)
    assert fuse_activations(model) == 1
    x, dx = torch.randn(2, 2, 3, 48, dtype=torch.float64).unbind()
    found, expected = (torch.func.jvp(mlp, (x,), (dx,)) for mlp in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, nn.RMSNorm])
def test_norms_are_called_as_their_own(kind: type[nn.Module]) -> None:
    """By name, after epsilon was changed, with tensors of another dtype than the weight."""
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        norm = kind(16, eps=1e-6).to(dtype)
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        fused = copy.deepcopy(norm)
        assert fuse_norms(nn.ModuleList([fused])) == 1
        x = torch.randn(3, 16).to(other)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found, expected = fused(x), norm(x)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0 if dtype != other else 1e-2, atol=0)
    name = next(iter(inspect.signature(norm.forward).parameters))
    for module in (fused, norm):
        setattr(module, "variance_epsilon" if kind is LlamaRMSNorm else "eps", 0.5)
    torch.testing.assert_close(fused(**{name: x}), norm(x), rtol=1e-2, atol=0)


@keep_float64()
def test_norms_that_may_be_given_a_gate() -> None:
    model = tiny.build("nemotron_h").train()
    plain, batch = copy.deepcopy(model), tiny.inputs(model)
    assert fuse_norms(model) > 0
    for found, expected in zip(step(model, batch), step(plain, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


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
