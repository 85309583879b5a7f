"""Products in 8 bits against arithmetic by hand, what kernels are given, and which devices and linears have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwright.ops import fp8
from shardwright.ops.fp8 import DY, E4M3, E5M2, Fp8Products, W, X
from shardwright.precision.amax_history import AmaxHistory
from shardwright.precision.fp8 import Fp8Options, require_device
from shardwright.shardformer.fp8 import find_fp8_linears
from tests.fp8_by_hand import ByHand, Recipe


def factors(dtype: torch.dtype, tokens: tuple[int, ...] = (3, 7), inputs: int = 48, outputs: int = 32) -> list[Tensor]:
    """x, W, b and dy of many sizes within a tensor: outliers, numbers below the formats, zeros."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((*tokens, inputs), (outputs, inputs), (outputs,), (*tokens, outputs)):
        spread = torch.exp2(torch.randint(-24, 9, shape, generator=generator).double())
        found.append((torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype))
    found[0][0, 0] = 0.0  # a token
    return found


def gradients(compute: Any, transposed: bool, dtype: torch.dtype) -> list[Tensor]:
    x, w, b, dy = factors(dtype)
    x.requires_grad_()
    param = nn.Parameter(w.t().contiguous() if transposed else w)
    b.requires_grad_()
    y = compute(x, param, b)
    y.backward(dy)
    dw = param.grad.t() if transposed else param.grad
    return [y.detach(), x.grad, dw, b.grad]


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_three_products_are_those_by_hand(granularity: str, transposed: bool) -> None:
    products = Fp8Products(granularity == "rowwise", emulated=True)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.bfloat16, 2**-8)):
        by_hand = gradients(
            lambda x, w, b: ByHand.apply(x, w.t() if transposed else w, Recipe(granularity), "") + b, transposed, dtype
        )
        ours = gradients(lambda x, w, b: products.linear(x, w, b, w, transposed), transposed, dtype)
        for expected, actual in zip(by_hand, ours, strict=True):
            assert actual.dtype == dtype
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=float(expected.abs().max()) * tolerance)
    plain = gradients(lambda x, w, b: torch.nn.functional.linear(x, w.t() if transposed else w, b), transposed, dtype)
    assert not torch.allclose(plain[0], ours[0])


class Kernel:
    """torch._scaled_mm as GPUs have it: what it is given must lie as it wants it."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.dtype, bool]] = []

    def __call__(
        self, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        rows, inner = a.shape
        columns = b.shape[1]
        assert a.dtype in (E4M3, E5M2)
        assert b.dtype == E4M3
        assert a.stride() == (inner, 1)
        assert b.stride() == (1, inner)
        assert not inner % 16
        assert not columns % 16
        assert of_a.dtype == of_b.dtype == torch.float32
        if of_a.dim():
            assert of_a.shape == (rows, 1)
            assert of_b.shape == (1, columns)
            assert out_dtype == torch.bfloat16
            assert of_a.is_contiguous()
            assert of_b.is_contiguous()
        else:
            assert of_b.dim() == 0
        self.calls.append((a.dtype, use_fast_accum))
        return ((a.float() @ b.float()) * of_a * of_b).to(out_dtype)


@pytest.mark.parametrize("rowwise", [False, True])
def test_kernels_get_what_they_can_take(rowwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(fp8, "scaled_mm", kernel)
    found = {}
    for emulated in (False, True):
        products = Fp8Products(rowwise, emulated)
        found[emulated] = gradients(lambda x, w, b, use=products: use.linear(x, w, b, w), False, torch.bfloat16)
    assert kernel.calls == [(E4M3, True), (E5M2, False), (E5M2, False)]
    for real, emulated in zip(found[False], found[True], strict=True):
        assert torch.equal(real, emulated)


def test_torchs_own_product_has_these_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this torch has it for CPUs."""
    a = torch.zeros(16, 16, dtype=E4M3)
    try:
        fp8.scaled_mm(a, a.t(), torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        pytest.skip("not on CPUs")
    for rowwise in (False, True):
        real, emulated = (
            gradients(lambda x, w, b, use=products: use.linear(x, w, b, w), False, torch.bfloat16)
            for products in (Fp8Products(rowwise), Fp8Products(rowwise, emulated=True))
        )
        for one, other in zip(real, emulated, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-8, atol=float(other.abs().max()) * 2**-8)


def test_no_tokens_and_numbers_that_are_none() -> None:
    products = Fp8Products(emulated=True)
    weight = nn.Parameter(torch.randn(32, 16))
    x = torch.zeros(0, 16, requires_grad=True)
    products.linear(x, weight, None, weight).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    for bad in (torch.inf, torch.nan):
        for rowwise in (False, True):
            x = torch.ones(4, 16)
            x[1, 3] = bad
            y = Fp8Products(rowwise, emulated=True).linear(x, weight, None, weight)
            assert y[1].isnan().all()
            assert not rowwise or y[2].isfinite().all()
    y = products.linear(torch.ones(4, 16, requires_grad=True), weight, None, weight)
    with pytest.raises(ValueError, match=r"create_graph=True with linears in fp8.*precision='bf16'"):
        torch.autograd.grad(y.sum(), [weight], create_graph=True)


def test_delayed_scales_follow_the_steps_before() -> None:
    history = AmaxHistory(["a", "b"], 2, torch.device("cpu"))
    products = Fp8Products(emulated=True)
    products.history, products.number = history, 1
    weight = nn.Parameter(torch.eye(16))

    def step(size: float, times: int = 1) -> float:
        x = torch.full((2, 16), size, requires_grad=True)
        for _ in range(times):  # as recomputation does
            y = products.linear(x, weight, None, weight)
        y.sum().backward()
        history.roll()
        return float(y.detach()[0, 0])

    assert step(1.0) == 1.0  # the first step has no history
    assert step(4096.0, times=2) == 448 * 2**-8  # the largest code times the scale of 1.0
    assert float(history.amax(1, X)) == 4096.0
    assert history.history[1, X].tolist() == [4096.0, 1.0]
    assert step(4096.0) == 4096.0
    with torch.no_grad():
        products.linear(torch.full((2, 16), 1e6), weight, None, weight)  # evaluation is no part of it
    assert step(1.0) == 1.0
    assert history.history[1, X].tolist() == [1.0, 4096.0]
    assert history.history[1, DY].tolist() == [1.0, 1.0]
    assert not history.history[0].any()
    y = products.linear(torch.full((2, 16), torch.inf, requires_grad=True), weight, None, weight)
    assert y.isnan().all()
    resumed = AmaxHistory(["b", "c"], 3, torch.device("cpu"))
    resumed.load_state_dict(history.state_dict())
    assert resumed.history[0, X].tolist() == [1.0, 4096.0, 0.0]
    assert float(resumed.amax(0, W)) == 1.0
    assert resumed.amax(1, X) is None


def test_the_history_of_gradients_is_saved_as_one_process_sees_it() -> None:
    """What a rank sees of them grows with the ranks whose gradients are averaged; three of them, for what does not
    divide exactly.
    """
    saved, resumed, other = (AmaxHistory(["a"], 2, torch.device("cpu"), replicas=count) for count in (3, 3, 1))
    seen = torch.tensor([5.0, 7.0, 0.1])
    for factor in (X, W, DY):
        saved.note(0, factor, seen[factor])
    saved.roll()
    for history in (resumed, other):
        history.load_state_dict(saved.state_dict())
    assert torch.equal(resumed.history, saved.history)
    torch.testing.assert_close(other.history[0, :, 0], seen / torch.tensor([1, 1, 3]))


def test_zeros_are_no_history() -> None:
    """Layers that begin as zeros, and what is behind them, have their first scale from the first other step."""
    history = AmaxHistory(["a"], 2, torch.device("cpu"))
    products = Fp8Products(emulated=True)
    products.history = history
    weight = nn.Parameter(torch.zeros(16, 16))
    x, dy = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16) * 1e-6
    products.linear(x, weight, None, weight).backward(torch.zeros_like(dy))
    history.roll()
    nn.init.normal_(weight, std=1e-4)
    resumed = Fp8Products(emulated=True)
    resumed.history = AmaxHistory(["a"], 2, torch.device("cpu"))
    resumed.history.load_state_dict(history.state_dict())
    for each in (products, resumed):
        weight.grad = None
        y = each.linear(x, weight, None, weight)
        y.backward(dy)
        for actual, expected in ((y.detach(), x.detach() @ weight.detach().t()), (weight.grad, dy.t() @ x.detach())):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0.2 * float(expected.abs().max()))
    assert torch.equal(y, products.linear(x, weight, None, weight))
    assert history.history[0, W].tolist() == [0.0, 0.0]
    history.roll()
    assert [history.amax(0, factor) is not None for factor in (X, W, DY)] == [True] * 3


def test_fp64_is_rounded_once() -> None:
    """Not to fp32 first, where these are exactly between two codes."""
    values = torch.tensor([[0.265625, 0.265625 + 1e-9, 0.265625 - 1e-9, 0.28125 + 1e-9, 1e-30]], dtype=torch.float64)
    codes = fp8.encode(torch.cat([values, -values]), torch.tensor(1.0), E4M3).double()
    expected = torch.tensor([0.25, 0.28125, 0.25, 0.28125, 0.0], dtype=torch.float64)
    assert codes.tolist() == [expected.tolist(), (-expected).tolist()]


@pytest.mark.parametrize(
    ("capability", "hip", "words"),
    [
        (None, None, "the device is cpu"),
        ((8, 6), None, "compute capability 8.6"),
        ((9, 4), "6.2", "ROCm"),
        ((8, 9), None, None),
        ((9, 0), None, None),
        ((10, 0), None, None),
    ],
)
def test_devices(capability: Any, hip: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(type="cpu" if capability is None else "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    require_device("use_fp8=True", Fp8Options(emulate=True), device)  # type: ignore[arg-type]
    if words is None:
        require_device("use_fp8=True", Fp8Options(), device)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError) as caught:
        require_device("use_fp8=True", Fp8Options(), device)  # type: ignore[arg-type]
    for part in ("use_fp8=True", words, "8.9 or higher", "precision='bf16'", "emulate=True"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"granularity": "row"}, "fp8_options.granularity='row' is not one of 'tensorwise', 'rowwise'"),
        ({"scaling": "Delayed"}, "fp8_options.scaling='Delayed'"),
        ({"scaling": "delayed", "granularity": "rowwise"}, "use granularity='tensorwise'"),
        ({"amax_history": 8}, "use scaling='delayed'"),
        ({"scaling": "delayed", "amax_history": 0}, "must be 1 to 4096 steps"),
        ({"emulate": 1}, "emulate=1 must be True or False"),
        ({"scalling": "delayed"}, "did you mean 'scaling'"),
        ("rowwise", "must be Fp8Options, a mapping"),
    ],
)
def test_options(given: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Fp8Options.of(given)
    assert words in str(caught.value)


def test_what_is_converted() -> None:
    with torch.device("meta"):
        config = transformers.Qwen2MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=40,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=16,
            mlp_only_layers=[0],
        )
        model = transformers.Qwen2MoeForCausalLM(config)
    found = find_fp8_linears(model)
    attention = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
    shared = {f"model.layers.1.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    assert set(found.names) == attention | shared
    assert found.left["sizes that are no multiples of 16"] == [
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert found.left["outside of the layers"] == ["lm_head"]
    assert found.left["experts in stacked parameters"] == ["model.layers.1.mlp.experts"]
    assert found.left["routers"] == ["model.layers.1.mlp.shared_expert_gate"]
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    found = find_fp8_linears(model)
    assert found.left["whose weight is made of other parameters"] == ["model.layers.0.self_attn.q_proj"]
    with torch.device("meta"):
        vit = transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    assert "experts in stacked parameters" not in find_fp8_linears(vit).left  # but tokens and positions
