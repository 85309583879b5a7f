"""Kernels and operators on the device against plain formulas in fp64 on the CPU: results and every gradient.

Memory that nobody has written holds nan, so that what a kernel leaves out shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adam_kernels import step_beside_torch
from place import ALL, CLOSE, DEVICE, HALF, NAMES, draw, exact, same, size
from test_gated_and_rotary import as_written
from torch import Tensor

from shardwright.attention import blocks
from shardwright.comm.quantised import dequantise, quantise
from shardwright.kernels.adam import Piece, Rule
from shardwright.kernels.backends import triton_kernels
from shardwright.kernels.gated import ACTIVATIONS, gated
from shardwright.kernels.linear_cross_entropy import linear_cross_entropy
from shardwright.kernels.norms import layer_norm, rms_norm
from shardwright.kernels.rotary import FORMS, Form, rotated
from shardwright.ops.fp8 import Fp8Products
from shardwright.precision.fp8 import why_not
from shardwright.precision.grad_norm import power_sum

pytestmark = pytest.mark.gpu
by_dtype = pytest.mark.parametrize("dtype", ALL, ids=NAMES.get)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compare(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float,
    scale: float = 1.0,
) -> None:
    """`inputs` are on the device, in the dtype that is tried; those that require gradients get them.

    scale   of the result's gradient, as a scaler of losses has it
    """
    right = [exact(x) if x.is_floating_point() else x.cpu() for x in inputs]
    found, expected = function(*inputs), reference(*right)
    same(found, expected, tolerance, "result")
    trained = [number for number, x in enumerate(inputs) if x.requires_grad]
    dy = draw(*expected.shape, dtype=found.dtype, seed=99, scale=scale)
    mine = torch.autograd.grad(found, [inputs[number] for number in trained], dy)
    theirs = torch.autograd.grad(expected, [right[number] for number in trained], exact(dy))
    for number, one, other in zip(trained, mine, theirs, strict=True):
        assert one.dtype == inputs[number].dtype
        same(one, other, 2 * tolerance, f"gradient of input {number}")


@by_dtype
@pytest.mark.parametrize("columns", [size(4096, 48), 101])
def test_norms(dtype: torch.dtype, columns: int) -> None:
    x = draw(size(2051, 7), columns, dtype=dtype).requires_grad_()
    w, b = (draw(columns, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
    close = CLOSE[dtype]
    compare(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (columns,), w, 1e-6), [x, w], close)
    compare(lambda x, w: rms_norm(x, w, 1e-6, 1.0), lambda x, w: F.rms_norm(x, (columns,), w + 1, 1e-6), [x, w], close)
    compare(lambda *x: layer_norm(*x, 1e-5), lambda x, w, b: F.layer_norm(x, (columns,), w, b, 1e-5), [x, w, b], close)
    compare(
        lambda x, w: layer_norm(x, w, None, 1e-5),
        lambda x, w: F.layer_norm(x, (columns,), w, None, 1e-5),
        [x, w],
        close,
    )


@by_dtype
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activations(dtype: torch.dtype, kind: str) -> None:
    """Projections apart, and halves of a packed one."""
    rows, columns = size(1021, 5), size(14336, 37)
    gate, up = (draw(rows, columns, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
    compare(lambda g, u: gated(g, u, kind), lambda g, u: ACTIVATIONS[kind](g) * u, [gate, up], CLOSE[dtype])
    packed = draw(3, rows, 74, dtype=dtype, seed=3).requires_grad_()
    compare(
        lambda x: gated(*x.chunk(2, -1), kind),
        lambda x: ACTIVATIONS[kind](x[..., :37]) * x[..., 37:],
        [packed],
        CLOSE[dtype],
    )


@by_dtype
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_rotary_positions(dtype: torch.dtype, form: Form) -> None:
    for heads, rest, samples in ((1, 0, 2), (2, 3, 1)):
        x = draw(2, size(515, 5), 32 if heads == 2 else 8, 64 + rest, dtype=dtype).requires_grad_()
        width = 32 if form.angles == "half" else 64
        cos, sin = (draw(samples, x.shape[1], width, dtype=dtype, seed=seed) for seed in (1, 2))

        def run(x: Tensor, cos: Tensor, sin: Tensor, one: Any, heads: int = heads) -> Tensor:
            view = x.transpose(1, 2) if heads == 1 else x
            return one(view, cos, sin, form, heads)

        compare(lambda *a: run(*a, rotated), lambda *a: run(*a, as_written), [x, cos, sin], CLOSE[dtype])


@by_dtype
@pytest.mark.parametrize(
    "terms",
    [{}, {"label_smoothing": 0.1, "softcap": 5.0}, {"z_loss": 1e-3, "logit_scale": 0.5, "chunk": 100}],
    ids=lambda terms: "-".join(terms) or "plain",
)
def test_a_head_and_its_loss(dtype: torch.dtype, terms: dict[str, Any]) -> None:
    tokens, width, vocabulary = size(1031, 33), size(512, 16), size(32003, 103)
    x = draw(tokens, width, dtype=dtype, scale=0.5).requires_grad_()
    weight = draw(vocabulary, width, dtype=dtype, seed=1, scale=0.2).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    target[::7] = -100

    def reference(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight) * terms.get("logit_scale", 1.0)
        if cap := terms.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        loss = F.cross_entropy(logits, target, label_smoothing=terms.get("label_smoothing", 0.0))
        return loss + terms.get("z_loss", 0.0) * logits.logsumexp(1)[target != -100].square().mean()

    compare(
        lambda *a: linear_cross_entropy(*a, **terms),
        reference,
        [x, weight, target.to(DEVICE)],
        max(CLOSE[dtype], 2e-6) if dtype != torch.float64 else 1e-10,
        2.0**14 if dtype == torch.float16 else 1.0,  # a share of a thousand tokens' mean is little beside fp16's least
    )


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@by_dtype
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_blocks_of_attention(dtype: torch.dtype, causal: bool, width: int) -> None:
    """In two halves of the keys, merged, as rings do; heads of keys that serve several of queries."""
    length = size(384, 24)
    half = length // 2
    q = draw(2, 4, length, width, dtype=dtype).requires_grad_()
    k, v = (draw(2, 2, length, width, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
    softcap = 20.0 if width == 80 else None
    rule = blocks.Rule(width**-0.5, softcap, causal)
    whole = blocks.Rule(width**-0.5, softcap)
    dout = draw(2, 4, length, width, dtype=dtype, seed=3)
    right = [exact(x) for x in (q, k, v)]
    expected = attention(*right, causal, softcap)
    wanted = torch.autograd.grad(expected, right, exact(dout))
    with torch.no_grad():
        first, second = (q[:, :, :half], q[:, :, half:]) if causal else (q, q)
        parts = [(k[:, :, :half], v[:, :, :half]), (k[:, :, half:], v[:, :, half:])]
        if causal:  # the first queries see the first keys, the second ones both
            one, lse_one = blocks.attend(first, *parts[0], rule)
            early, lse_early = blocks.attend(second, *parts[0], whole)
            late, lse_late = blocks.attend(second, *parts[1], rule)
            two, lse_two = blocks.merge(early.to(lse_early.dtype), lse_early, late, lse_late)
            out = torch.cat([one, two.to(dtype)], 2)
            calls = [
                (slice(0, half), 0, rule, one, lse_one),
                (slice(half, None), 0, whole, two.to(dtype), lse_two),
                (slice(half, None), 1, rule, two.to(dtype), lse_two),
            ]
        else:
            early, lse_early = blocks.attend(first, *parts[0], whole)
            late, lse_late = blocks.attend(second, *parts[1], whole)
            merged, lse = blocks.merge(early.to(lse_early.dtype), lse_early, late, lse_late)
            out = merged.to(dtype)
            calls = [(slice(None), place, whole, out, lse) for place in (0, 1)]
        close = CLOSE[dtype] * (1 if dtype == torch.float64 else 2)
        same(out, expected, close, "result")
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE) for x in (q, k, v)
        )
        for queries, place, what, merged_out, lse in calls:
            keys = slice(0, half) if place == 0 else slice(half, None)
            given = dout[:, :, queries], q[:, :, queries], *parts[place], merged_out, lse
            found = blocks.attend_backward(*given, what)
            dq[:, :, queries] += found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]
    for name, one, other in zip("qkv", (dq, dk, dv), wanted, strict=True):
        same(one, other, 2 * close, f"gradient of {name}")


@by_dtype
def test_norm_of_gradients(dtype: torch.dtype) -> None:
    parts = [draw(count, dtype=dtype, seed=count) for count in (1, 256, 1000, size(3_000_001, 5000))]
    parts.append(parts[-1][3:77])
    expected = sum(float(exact(part).square().sum()) for part in parts)
    found = float(power_sum(parts, torch.device(DEVICE)))
    assert abs(found - expected) <= max(1e-5 if dtype != torch.float64 else 0.0, 1e-12) * expected


@pytest.mark.parametrize("skipped", [(), (1, 4)], ids=["all", "some skipped"])
@pytest.mark.parametrize("weight", [None, *HALF], ids=lambda dtype: NAMES.get(dtype, "fp32"))
def test_steps_of_adam(weight: torch.dtype | None, skipped: tuple[int, ...]) -> None:
    """In one pass, for which the host never waits once the places of the pieces are known."""
    kernels: Any = triton_kernels("adam", torch.empty(1, device=DEVICE))
    if kernels is None:
        pytest.skip(f"no Triton kernels on {DEVICE}")
    step_beside_torch(kernels.TritonAdam(), torch.float32, weight, skipped, DEVICE)
    kernel, flat = kernels.TritonAdam(), torch.zeros(5, 3001, device=DEVICE)
    piece = Piece(*flat[:4], flat[4, 0], None if weight is None else flat[0].to(weight))
    rule, one = Rule(1e-3, 0.9, 0.999, 1e-8, 0.1, True, False), torch.ones((), device=DEVICE)
    kernel(0, [piece], rule, one, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(0, [piece], rule._replace(lr=2e-3), one, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=NAMES.get)
def test_eight_bits_on_the_wire(dtype: torch.dtype) -> None:
    """The same bytes on every device."""
    x = draw(3, size(10_007, 77), dtype=dtype) * torch.exp2(draw(3, 1, dtype=torch.float32) * 9).to(dtype)
    payload = quantise(x)
    assert torch.equal(payload.cpu(), quantise(x.cpu()))
    assert torch.equal(dequantise(payload, x.shape[1], dtype).cpu(), dequantise(payload.cpu(), x.shape[1], dtype))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", HALF, ids=NAMES.get)
def test_products_in_eight_bits(dtype: torch.dtype, granularity: str) -> None:
    """The device's against the same products emulated on the CPU."""
    if granularity == "rowwise" and dtype == torch.float16:
        pytest.skip("kernels with a scale for each row return bf16")
    missing = why_not(torch.device(DEVICE))
    shapes = (size(512, 32), 256), (128, 256), (size(512, 32), 128)
    x, weight, dy = (draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    found = []
    for place, emulated in ((DEVICE, missing is not None), ("cpu", True)):
        one, other = (tensor.detach().to(place).requires_grad_() for tensor in (x, weight))
        y = Fp8Products(granularity == "rowwise", emulated=emulated).linear(one, other, None, other, False)
        y.backward(dy.to(place))
        found.append((y.detach(), one.grad, other.grad))
    for what, mine, theirs in zip(("result", "dx", "dw"), *found, strict=True):
        assert mine is not None
        assert theirs is not None
        same(mine, theirs, 2e-2, what)
