"""Triton kernels against torch's own operators, on a CPU by Triton's interpreter and on a GPU when there is one.

tests/unit/test_triton_kernels.py runs this file in a process of its own, because Triton must know that it interprets
before anything imports it. Sizes are odd, rows many enough that programs have several, columns more than a block where
blocks are made small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from adam_kernels import step_beside_torch
from test_gated_and_rotary import as_written
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import shardwright
from shardwright.kernels import backends
from shardwright.kernels import cross_entropy_rows as rows
from shardwright.kernels.adam import Piece, Rule
from shardwright.kernels.gated import ACTIVATIONS
from shardwright.kernels.linear_cross_entropy import linear_cross_entropy
from shardwright.kernels.logit_steps import Step
from shardwright.kernels.rotary import FORMS, Form
from shardwright.kernels.triton import cross_entropy, norms
from shardwright.kernels.triton import gated as gated_kernels
from shardwright.kernels.triton import rotary as rotary_kernels
from shardwright.kernels.triton.adam import TritonAdam
from shardwright.shardformer.layer.norm import fuse_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()


def same(found: Any, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def same_gradients(mine: Tensor, theirs: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    same(mine, theirs, dtype)
    dy = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, params, dy, retain_graph=True)
    for one, other in zip(torch.autograd.grad(mine, params, dy), expected, strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, float(other.abs().max()))
        same(one / scale, other / scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "length"), [(0, 101), (64, 37), (101, 0)], ids=["whole", "part", "padding"])
def test_rows_of_cross_entropy(dtype: torch.dtype, start: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_MOST", 16)
    width = max(length, 3) + 5
    logits = numbers(7, width, dtype=dtype).detach() * 4
    target = torch.tensor([3, 100, -100, 64, 99, 0, 70], device=DEVICE)
    columns, terms = rows.Columns(101, start, length), rows.Terms(0.1, 0.01)
    targets = rows.Targets.of(target, columns, width, -100)
    peak, shares = rows.row_shares(logits, targets, columns, terms)
    found = cross_entropy.row_shares(logits, targets.column, targets.foreign, length)
    same(found, (peak, shares), torch.float32)
    lse = torch.logsumexp(logits.float(), 1)
    dlosses = torch.rand(7, device=DEVICE)
    expected = rows.row_gradients(logits, lse, dlosses, targets, columns, terms)
    out = torch.empty_like(expected)
    cross_entropy.row_gradients(
        logits, lse, dlosses, *targets, length, columns.size, terms.label_smoothing, terms.z_loss, out
    )
    same(out, expected, torch.float32)


def test_a_head_and_its_loss_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ids that there are not make the loss nan, as no assertion can be made on a device."""
    monkeypatch.setattr(backends, "INTERPRETED", True)
    x, weight = numbers(7, 11, dtype=torch.float32), numbers(101, 11, dtype=torch.float32, seed=1)
    target = torch.tensor([3, 100, -100, 64, 99, 0, 70], device=DEVICE)
    expected = F.cross_entropy(5 * torch.tanh(F.linear(x, weight) / 5), target, label_smoothing=0.1)
    for chunk in (3, 100):
        loss = linear_cross_entropy(x, weight, target, label_smoothing=0.1, softcap=5.0, chunk=chunk)
        same_gradients(loss, expected, (x, weight), torch.float32)
    assert linear_cross_entropy(x, weight, target + 1).isnan()


def test_gradients_of_half_precision_are_written_over_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded as they are written, in the place of fp32 beside them, also where models cast their logits before the
    loss, and where a bias sums them, as torch's does.
    """
    monkeypatch.setattr(backends, "INTERPRETED", True)
    wrote: list[torch.dtype] = []
    write = cross_entropy.row_gradients
    monkeypatch.setattr(cross_entropy, "row_gradients", lambda *a: wrote.append(a[-1].dtype) or write(*a))  # type: ignore[func-returns-value]
    shapes = (64, 11), (101, 11), (101,)
    x, weight, bias = (numbers(*shape, dtype=torch.bfloat16, seed=seed) for seed, shape in enumerate(shapes))
    target = torch.arange(64, device=DEVICE)
    expected = F.cross_entropy(F.linear(x, weight).float(), target)
    for steps in ((), (Step("cast", torch.float32),)):
        loss = linear_cross_entropy(x, weight, target, steps=steps, chunk=24)
        same_gradients(loss, expected, (x, weight), torch.bfloat16)
    expected = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    same_gradients(linear_cross_entropy(x, weight, target, bias, chunk=24), expected, (x, weight, bias), torch.bfloat16)
    assert set(wrote) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [37, 64])
def test_norms(dtype: torch.dtype, columns: int) -> None:
    """Several rows for each program, and none for the last ones."""
    x = numbers(9, 3, columns, dtype=dtype)
    weight, bias = (numbers(columns, dtype=dtype, seed=seed) for seed in (1, 2))
    same_gradients(norms.rms_norm(x, weight, 1e-6), F.rms_norm(x, (columns,), weight, 1e-6), (x, weight), dtype)
    rounded = weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    same_gradients(norms.rms_norm(x, weight, 1e-6, rounded=True), rounded, (x, weight), dtype)
    expected = F.layer_norm(x, (columns,), weight, bias, 1e-5)
    same_gradients(norms.layer_norm(x, weight, bias, 1e-5), expected, (x, weight, bias), dtype)
    expected = F.layer_norm(x, (columns,), weight, None, 1e-5)
    same_gradients(norms.layer_norm(x, weight, None, 1e-5), expected, (x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm], ids=lambda kind: kind.__name__)
def test_norms_of_models_take_the_kernels(dtype: torch.dtype, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", True)
    model = nn.Sequential(kind(37)).to(DEVICE, dtype)
    nn.init.normal_(model[0].weight)
    x = numbers(3, 5, 37, dtype=dtype)
    expected = model(x)
    assert fuse_norms(model) == 1
    same_gradients(model(x), expected, (x, model[0].weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activations(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections apart, halves of a packed one, and features that do not follow each other; several blocks a row."""
    monkeypatch.setattr(gated_kernels, "_BLOCK", 16)
    gate, up = (numbers(3, 5, 37, dtype=dtype, seed=seed) for seed in (1, 2))
    packed, turned = numbers(3, 5, 74, dtype=dtype, seed=3), numbers(37, 5, 3, dtype=dtype, seed=4)
    for one, other, params in (
        (gate, up, (gate, up)),
        (*packed.chunk(2, dim=-1), (packed,)),
        (turned.transpose(0, 2), up, (turned, up)),
        (gate[:0], up[:0], (gate, up)),
    ):
        found = gated_kernels.gated(one, other, kind)
        same_gradients(found, ACTIVATIONS[kind](one) * other, params, dtype)


def test_rotary_positions_of_heads_that_lie_far_apart() -> None:
    """Further than 32 bits count, as in a million of tokens; of the memory between them nothing is touched."""
    apart = 2**30 + 16
    memory = torch.empty(2 * apart + 8, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((1, 3, 2, 4), (0, apart, 4, 1))
    x.copy_(numbers(1, 3, 2, 4, dtype=torch.float16).detach())
    cos, sin = (numbers(1, 2, 4, dtype=torch.float16, seed=seed).detach() for seed in (1, 2))
    found, expected = (rotary_kernels.rotated(each, cos, sin, FORMS[0], 1) for each in (x, x.contiguous()))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_rotary_positions(dtype: torch.dtype, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models call it, on views of what a projection returned, with more heads than a program takes, features that
    have no angle, and angles of every sample or of all.
    """
    monkeypatch.setattr(rotary_kernels, "_HEADS", 2)
    for samples, rest, heads in ((2, 3, 1), (1, 0, 2)):
        x = numbers(2, 5, 3, 10 + rest, dtype=dtype)
        cos, sin = (numbers(samples, 5, 10, dtype=dtype, seed=seed).detach() for seed in (1, 2))
        if form.angles == "half":
            cos, sin = cos[..., :5], sin[..., :5]
        view = x.transpose(1, 2) if heads == 1 else x
        expected = as_written(view.float(), cos.float(), sin.float(), form, heads).to(dtype)
        same_gradients(rotary_kernels.rotated(view, cos, sin, form, heads), expected, (x,), dtype)


@pytest.mark.parametrize(
    ("grad", "weight", "skipped"),
    [
        (torch.float32, None, (1, 4)),
        (torch.float32, torch.bfloat16, ()),
        (torch.bfloat16, torch.float16, (1, 4)),
    ],
)
def test_steps_of_adam(grad: torch.dtype, weight: torch.dtype | None, skipped: tuple[int, ...]) -> None:
    step_beside_torch(
        TritonAdam(), grad, weight, skipped, DEVICE, rounds=DEVICE != "cpu"
    )  # the interpreter cuts bf16 off


def test_steps_of_zero_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("tests/gpu has whole layouts")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "ranks"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    import test_zero_one_pass

    shardwright.launch(0, 1, None, None, backend="gloo")
    try:
        cases: list[Any] = [("bf16", {"stage": 1}, {}), ("fp16", {"stage": 2}, {}), ("fp32", {"stage": 3}, {})]
        test_zero_one_pass.compare(0, 1, [*cases, ("bf16", {"stage": 1, "cpu_offload": True}, {})], "triton")
    finally:
        backends.INTERPRETED = False
        dist.destroy_process_group()


def test_a_rate_on_the_device() -> None:
    """Which nobody reads; the table follows pieces that move."""
    kernel, rate = TritonAdam(), torch.tensor(1e-2, device=DEVICE)
    rule = Rule(rate, 0.9, 0.999, 1e-8, 0.1, True, False)
    values, grads = numbers(3001, dtype=torch.float32).detach(), numbers(3001, dtype=torch.float32, seed=1).detach()
    param = nn.Parameter(values.double())
    optim = torch.optim.AdamW([param], weight_decay=0.1)
    state = [torch.zeros_like(values) for _ in range(2)]
    step, one = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    for taken in range(3):
        values, state = values.clone(), [moment.clone() for moment in state]
        kernel(0, [Piece(values, grads, *state, step, None)], rule, one, None)
        optim.param_groups[0]["lr"] = 1e-2 / 2**taken
        rate /= 2
        param.grad = grads.double()
        optim.step()
    torch.testing.assert_close(values.double(), param.detach(), rtol=2e-6, atol=2e-7)
