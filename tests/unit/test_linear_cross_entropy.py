"""A head and its loss in one, against F.linear and F.cross_entropy of torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.kernels.linear_cross_entropy import _Grads, chunk_for, linear_cross_entropy, tokens_at_a_time
from shardwright.kernels.logit_steps import Step
from shardwright.ops.vocab_shard import VocabShard
from shardwright.testing import run_ranks
from shardwright.utils.device import planning_for

HIDDEN, VOCAB = 11, 101
KINDS = list(itertools.product((37, 5), ("mean", "sum", "none"), ((0.0, 0.0), (0.1, 0.01)), ((1.0, None), (0.3, 5.0))))


def by_torch(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, terms: Any, shape: Any
) -> Tensor:
    (smoothing, z_loss), (scale, cap) = terms, shape
    logits = F.linear(x, weight, bias) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    losses = losses + (z_loss * logits.logsumexp(1).square()).masked_fill(target == -100, 0)
    valid = (target != -100).sum()
    return losses if reduction == "none" else losses.sum() / (valid if reduction == "mean" else 1)


def numbers(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    target = torch.randint(0, VOCAB, (tokens,), generator=generator)
    target[1::4] = -100
    return x, weight, bias, target


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_loss_and_gradients_are_those_of_torch(bias: bool, device_type: str) -> None:
    """More tokens than features, where gradients come with the loss, and fewer, where they come again; twice, as with
    retain_graph; and gradients of gradients. On a GPU the head gets rows of zeros.
    """
    with planning_for(device_type):
        compare_with_torch(bias)


def compare_with_torch(bias: bool) -> None:
    for tokens, reduction, terms, shape in KINDS:
        x, weight, b, target = numbers(tokens)
        params = [param.requires_grad_() for param in ((x, weight, b) if bias else (x, weight))]
        got = linear_cross_entropy(
            x, weight, target, b if bias else None, reduction=reduction, label_smoothing=terms[0], z_loss=terms[1],
            logit_scale=shape[0], softcap=shape[1], chunk=8,
        )  # fmt: skip
        want = by_torch(x, weight, target, b if bias else None, reduction, terms, shape)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        dloss = torch.randn_like(want)
        expected = torch.autograd.grad(want, params, dloss, create_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(got, params, dloss, retain_graph=True)
            torch.testing.assert_close(found, tuple(each.detach() for each in expected), rtol=1e-11, atol=1e-12)
        second = torch.autograd.grad(got, params, dloss, create_graph=True)
        torch.testing.assert_close(
            torch.autograd.grad(sum(each.square().sum() for each in second), params),
            torch.autograd.grad(sum(each.square().sum() for each in expected), params),
            rtol=1e-9,
            atol=1e-10,
        )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_half_precision_is_rounded_as_by_torch(device_type: str) -> None:
    with planning_for(device_type):
        compare_half_precision()


def compare_half_precision() -> None:
    for dtype, tokens in itertools.product((torch.bfloat16, torch.float16), (64, 5)):
        x, weight, _, target = numbers(tokens, dtype)
        exact = [param.double().requires_grad_() for param in (x, weight)]
        params = [param.requires_grad_() for param in (x, weight)]
        want = by_torch(*exact, target, None, "mean", (0.0, 0.0), (1.0, None))
        expected = torch.autograd.grad(want, exact)
        plain = F.cross_entropy(F.linear(x, weight).float(), target)
        rounded = torch.autograd.grad(plain, params)
        got = linear_cross_entropy(x, weight, target, chunk=8)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
        for mine, theirs, true in zip(torch.autograd.grad(got, params), rounded, expected, strict=True):
            assert (mine - true).norm() < 1.5 * (theirs - true).norm() + 1e-4 * true.norm()


def test_a_cast_that_rows_do_anyway_is_spared() -> None:
    """Models write logits once more in fp32 before their loss; numbers are the same bit by bit without."""
    for dtype, tokens in itertools.product((torch.bfloat16, torch.float16), (64, 5)):
        x, weight, _, target = numbers(tokens, dtype)
        params = [param.requires_grad_() for param in (x, weight)]
        losses = [
            linear_cross_entropy(x, weight, target, chunk=8, steps=steps)
            for steps in ((), (Step("cast", torch.float32),), (Step("multiply", 1.0), Step("cast", torch.float32)))
        ]
        expected = torch.autograd.grad(losses[0], params)
        for loss in losses[1:]:
            assert torch.equal(loss, losses[0])
            assert all(map(torch.equal, torch.autograd.grad(loss, params), expected))


class OnGpu(Tensor):
    """Goes the way of a GPU's tensors, on a CPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_logits_in_fp64_are_summed_in_it(dtype: torch.dtype) -> None:
    """Where a criterion casts them: CUDA's products write half precision to fp32 alone."""
    dz, x = (torch.randn(4, 4).to(dtype).as_subclass(OnGpu) for _ in range(2))
    total = torch.empty(4, 4, dtype=torch.float64)
    for is_first, times in ((True, 1), (False, 2)):
        _Grads(None, total, None)._add_product(dz, x, is_first)
        assert torch.equal(total, times * dz.mm(x).double().as_subclass(Tensor))


def test_chunks_on_a_gpu_are_worth_the_sum_of_their_weight_gradients() -> None:
    """As many tokens as features at least, where there is such a gradient."""
    x, weight = torch.empty(16, 4096, device="meta"), torch.empty(2**17, 4096, device="meta", requires_grad=True)
    assert chunk_for(x, weight) == 4096
    assert chunk_for(x, weight.detach()) == tokens_at_a_time(x.device, 2**17) == 512
    with torch.no_grad():
        assert chunk_for(x, weight) == 512
    assert chunk_for(torch.empty(16, 4096), torch.empty(64, 4096, requires_grad=True)) == 2**24 // 256


def test_a_batch_without_targets_is_a_loss_of_nan_and_no_gradient() -> None:
    for tokens in (37, 5):
        x, weight, _, target = numbers(tokens)
        params = [param.requires_grad_() for param in (x, weight)]
        loss = linear_cross_entropy(x, weight, target.fill_(-100))
        assert loss.isnan()
        assert all(not grad.any() for grad in torch.autograd.grad(loss, params))
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(x, weight, target.fill_(VOCAB))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 3, HIDDEN)}, "must be [N, H]"),
        ({"target": torch.rand(5)}, "must be ids; class probabilities need the logits"),
        ({"reduction": "max"}, "reduction='max' must be 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 must be between 0 and 1"),
        ({"softcap": 0.0}, "softcap=0.0 must be more than 0"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    x, weight, _, target = numbers(5)
    with pytest.raises(ValueError) as error:
        linear_cross_entropy(**{"x": x, "weight": weight, "target": target, **change})
    assert words in str(error.value)


def shared_vocabulary(rank: int, world: int) -> None:
    """Rows of the vocabulary on two ranks, which share it unevenly and with padding."""
    for tokens, reduction, terms, shape in KINDS:
        x, weight, bias, target = numbers(tokens)
        params = [param.requires_grad_() for param in (x, weight, bias)]
        want = by_torch(x, weight, target, bias, reduction, terms, shape)
        dloss = torch.randn_like(want)
        dist.broadcast(dloss, 0)
        expected = torch.autograd.grad(want, params, dloss)
        shard = VocabShard.even(VOCAB, dist.group.WORLD, 16)
        rows = slice(shard.start, shard.start + shard.length)
        mine = [
            F.pad(param.detach()[rows], [0, 0] * (param.ndim - 1) + [0, shard.local - shard.length], value=3.0)
            for param in (weight, bias)
        ]
        params = [x, *(param.requires_grad_() for param in mine)]
        got = linear_cross_entropy(
            x, mine[0], target, mine[1], shard=shard, reduction=reduction, label_smoothing=terms[0],
            z_loss=terms[1], logit_scale=shape[0], softcap=shape[1], chunk=8,
        )  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        for create in (False, True):
            dx, dw, db = torch.autograd.grad(got, params, dloss, retain_graph=True, create_graph=create)
            torch.testing.assert_close(dx, expected[0], rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(dw[: shard.length], expected[1][rows], rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(db[: shard.length], expected[2][rows], rtol=1e-10, atol=1e-11)
            assert not dw[shard.length :].any()


def test_a_vocabulary_on_two_ranks() -> None:
    run_ranks(shared_vocabulary, 2)
