"""Vocabulary-parallel embedding and loss against torch's on the full vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn import CrossEntropyLoss

from shardwright.ops.cross_entropy import vocab_cross_entropy
from shardwright.ops.embedding import vocab_embedding
from shardwright.ops.vocab_mode import (
    as_scripts_see,
    mark_vocab_sharded,
    vocab_parallel_loss,
    vocab_shard_of,
    whole_logits,
)
from shardwright.ops.vocab_shard import VocabShard
from shardwright.spec import ParamSpec, even_pieces
from shardwright.testing import run_ranks
from shardwright.utils import pytree

CLOSE = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}


def _spec(size: int, world: int, hidden: int = 4) -> ParamSpec:
    return ParamSpec("embed", (size, hidden), 0, even_pieces(size, world))


def _columns(full: torch.Tensor, shard: VocabShard, filler: float = 1e4) -> torch.Tensor:
    """This rank's columns; padding holds a number that would show if it were used."""
    local = full.new_full((*full.shape[:-1], shard.local), filler)
    local[..., : shard.length] = full[..., shard.start : shard.start + shard.length]
    return local.requires_grad_()


def _embedding(rank: int, world: int) -> None:
    torch.manual_seed(0)
    group = dist.group.WORLD
    for size, padding_idx in itertools.product((1, 5, 8, 13), (None, 0, -1)):
        spec = _spec(size, world)
        shard = VocabShard.from_spec(spec, group)
        assert shard == VocabShard.even(size, group)
        full = torch.randn(size, 4, dtype=torch.float64, requires_grad=True)
        ids = torch.randint(0, size, (3, 7))
        local = nn.Parameter(spec.shard(full.detach(), rank))
        want, got = F.embedding(ids, full, padding_idx), vocab_embedding(ids, local, shard, padding_idx)
        assert torch.equal(got, want)
        dy = torch.randn_like(want)
        want.backward(dy)
        got.backward(dy)
        assert torch.equal(local.grad, spec.shard(full.grad, rank))
        for wrong in (-1, size):
            with pytest.raises(IndexError):
                vocab_embedding(torch.tensor([0, wrong]), local, shard)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_embedding(world: int) -> None:
    run_ranks(_embedding, world)


def _loss(rank: int, world: int) -> None:
    torch.manual_seed(0)
    group = dist.group.WORLD
    for size, ignore_index, smoothing, reduction in itertools.product(
        (1, 2, 5, 8, 13), (-100, 1), (0.0, 0.1), ("mean", "sum", "none")
    ):
        shard = VocabShard.even(size, group)
        full = (torch.randn(11, size, dtype=torch.float64) * 20).requires_grad_()
        with torch.no_grad():
            full[2] += 1000
            full[3] -= 1000
        target = torch.randint(0, size, (11,))
        target[[1, 4, 5]] = ignore_index
        if ignore_index == 1 and size == 1:
            target[:] = 0
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}
        local = _columns(full.detach(), shard)
        want = F.cross_entropy(full, target, **options)
        got = vocab_cross_entropy(local, target, shard, **options)
        torch.testing.assert_close(got, want, **CLOSE)
        dy = torch.randn_like(want)
        want.backward(dy)
        got.backward(dy)
        torch.testing.assert_close(
            local.grad[:, : shard.length], full.grad[:, shard.start : shard.start + shard.length], **CLOSE
        )
        assert not local.grad[:, shard.length :].any()

        # z-loss is a term on top, a mean over the tokens that count.
        full.grad = local.grad = None
        terms = 0.01 * full.logsumexp(1).square().masked_fill(target == ignore_index, 0)
        plain = F.cross_entropy(full, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")
        kept = (target != ignore_index).sum()
        want = {"none": plain + terms, "sum": (plain + terms).sum(), "mean": (plain + terms).sum() / kept}[reduction]
        if reduction == "mean" and smoothing == 0:
            torch.testing.assert_close(plain.sum() / kept, F.cross_entropy(full, target, **options), **CLOSE)
        got = vocab_cross_entropy(local, target, shard, z_loss=0.01, **options)
        torch.testing.assert_close(got, want, **CLOSE)
        want.backward(dy)
        got.backward(dy)
        torch.testing.assert_close(
            local.grad[:, : shard.length], full.grad[:, shard.start : shard.start + shard.length], **CLOSE
        )

    # A batch without a single label, and one without tokens.
    shard = VocabShard.even(7, group)
    for tokens in (3, 0):
        full = torch.randn(tokens, 7, dtype=torch.float64, requires_grad=True)
        target = torch.full((tokens,), -100)
        local = _columns(full.detach(), shard)
        for reduction in ("mean", "sum"):
            want = F.cross_entropy(full, target, reduction=reduction)
            got = vocab_cross_entropy(local, target, shard, reduction=reduction)
            torch.testing.assert_close(got, want, **CLOSE)
            (want_dx,) = torch.autograd.grad(want, full)
            (got_dx,) = torch.autograd.grad(got, local)
            torch.testing.assert_close(
                got_dx[:, : shard.length], want_dx[:, shard.start : shard.start + shard.length], **CLOSE
            )
    # -inf logits (masked words), in whole shards too.
    full = torch.randn(4, 7, dtype=torch.float64)
    full[:, : shard.local] = -torch.inf
    full.requires_grad_()
    local, target = _columns(full.detach(), shard), torch.tensor([6, 5, 6, -100])
    want, got = F.cross_entropy(full, target), vocab_cross_entropy(local, target, shard)
    torch.testing.assert_close(got, want, **CLOSE)
    want.backward()
    got.backward()
    torch.testing.assert_close(
        local.grad[:, : shard.length], full.grad[:, shard.start : shard.start + shard.length], **CLOSE
    )
    # Half precision: the loss is fp32, the gradient comes back in bf16.
    full = torch.randn(9, 7).bfloat16()
    local, target = _columns(full, shard), torch.randint(0, 7, (9,))
    reference = full.float().requires_grad_()
    want, got = F.cross_entropy(reference, target), vocab_cross_entropy(local, target, shard)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    want.backward()
    got.backward()
    assert local.grad.dtype == torch.bfloat16
    assert torch.equal(
        local.grad[:, : shard.length], reference.grad[:, shard.start : shard.start + shard.length].bfloat16()
    ) or torch.allclose(
        local.grad[:, : shard.length].float(),
        reference.grad[:, shard.start : shard.start + shard.length],
        rtol=1e-2,
        atol=1e-4,
    )
    for wrong in (7, -1):
        with pytest.raises((IndexError, RuntimeError)):
            vocab_cross_entropy(local, torch.full((9,), wrong), shard)
        dist.barrier()
    for bad, text in (({"reduction": "max"}, "reduction='max'"), ({"label_smoothing": 2.0}, "label_smoothing=2.0")):
        with pytest.raises(ValueError, match=text):
            vocab_cross_entropy(local, target, shard, **bad)
    with pytest.raises(ValueError, match="must be"):
        vocab_cross_entropy(local.view(3, 3, -1), target.view(3, 3), shard)


@pytest.mark.parametrize("world", [2, 4])
def test_loss(world: int) -> None:
    run_ranks(_loss, world)


class Head(nn.Module):
    """Losses the way transformers' heads write them; `sharded` replaces the projection only."""

    def __init__(self, vocab: int, style: str, shard: VocabShard | None = None) -> None:
        super().__init__()
        self.vocab, self.style, self.shard = vocab, style, shard

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # A hidden tensor as wide as the local vocabulary must not be taken for logits.
        width = hidden.shape[-1]
        gate = F.cross_entropy(hidden.view(-1, width), hidden.new_zeros(hidden.shape[:-1].numel(), dtype=torch.long))
        hidden = hidden * F.softmax(hidden, -1) + gate
        logits = F.linear(hidden, weight)
        if self.shard is not None:
            mark_vocab_sharded(logits, self.shard)
        hidden.view(-1, width)
        if self.style == "shift":
            logits = torch.tanh(logits / 30.0) * 30.0
            shifted = logits[..., :-1, :].contiguous()
            return CrossEntropyLoss()(shifted.view(-1, self.vocab), labels[..., 1:].contiguous().view(-1)) + gate
        if self.style == "float":
            return (
                F.cross_entropy(
                    logits.float().view(-1, self.vocab), labels.view(-1), ignore_index=-100, reduction="sum"
                )
                / 7
            )
        if self.style == "channels":
            return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)
        if self.style == "keyword":
            return (
                F.cross_entropy(
                    input=logits.reshape((-1, logits.size(-1))), target=labels.reshape(-1), reduction="none"
                )
                .square()
                .mean()
            )
        if self.style == "masked":
            return F.cross_entropy(logits[labels != -100], labels[labels != -100])
        if self.style == "permuted":
            return nn.functional.cross_entropy(
                logits[:, :, : self.vocab].permute(0, 2, 1), labels, reduction="none"
            ).sum()
        return F.cross_entropy(logits[0, 1], labels[0, 1])


def _mode(rank: int, world: int) -> None:
    torch.manual_seed(0)
    for vocab, style in itertools.product(
        (8, 13), ("shift", "float", "channels", "keyword", "masked", "permuted", "single")
    ):
        shard = VocabShard.even(vocab, dist.group.WORLD)
        dtype = torch.float32 if style == "float" else torch.float64
        hidden = torch.randn(3, 6, shard.local, dtype=dtype)
        weight = torch.randn(vocab, shard.local, dtype=dtype)
        labels = torch.randint(0, vocab, (3, 6))
        labels[0, 3:] = -100
        labels[2, 1] = -100
        results = []
        for head, local in (
            (Head(vocab, style), weight),
            (Head(vocab, style, shard), _columns(weight.t(), shard).detach().t().contiguous()),
        ):
            x, w = hidden.clone().requires_grad_(), local.clone().requires_grad_()
            with vocab_parallel_loss():
                loss = head(x, w, labels)
            loss.backward()
            results.append((loss, x.grad, w.grad))
        (loss, _, dw), (local_loss, _, local_dw) = results
        close = {"rtol": 1e-5, "atol": 1e-5} if style == "float" else CLOSE
        torch.testing.assert_close(local_loss, loss, **close, msg=lambda text, style=style: f"{style}: {text}")
        torch.testing.assert_close(local_dw[: shard.length], dw[shard.start : shard.start + shard.length], **close)

    shard = VocabShard.even(8, dist.group.WORLD)
    refused = {
        "softmax": lambda x: x.softmax(-1),
        "argmax": lambda x: x.argmax(-1),
        "max": lambda x: torch.max(x, dim=2),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "topk": lambda x: x.topk(1),
        "view": lambda x: x.view(-1),
        "indexing": lambda x: x[..., 1],
        "matmul": lambda x: x @ x.new_ones(shard.local, 2),
        "weight": lambda x: F.cross_entropy(x.view(-1, 8), torch.zeros(6, dtype=torch.long), weight=torch.ones(8)),
        "lgamma": lambda x: x.abs().lgamma(),  # of which no list knows whether it mixes columns
        "cat of other tensors": lambda x: torch.cat([x, x], -1),
        "stack of other tensors": lambda x: torch.stack([x, torch.zeros(2, 3, shard.local)]),
        "unbind over": lambda x: x.unbind(-1),
        "numpy": lambda x: x.numpy(),
        "mT": lambda x: x.mT,
        "the vocabulary": lambda x: x.__setitem__((..., 1), 0),
        "probabilities": lambda x: F.cross_entropy(x.view(-1, 8), torch.zeros(6, 8)),
    }
    for name, fn in refused.items():
        with vocab_parallel_loss(), pytest.raises(ValueError, match=name):
            fn(mark_vocab_sharded(torch.randn(2, 3, shard.local), shard))
    with vocab_parallel_loss():  # rows are dealt and joined
        torch.manual_seed(1)
        full = torch.randn(4, 3, 13, dtype=torch.float64)
        rows = VocabShard.even(13, dist.group.WORLD)
        labels = torch.randint(0, 13, (4, 3))
        logits = mark_vocab_sharded(_columns(full, rows).detach(), rows)
        dealt: dict[str, Any] = {
            "chunk": lambda x: x.chunk(2)[1],
            "split": lambda x: x.split([1, 3])[1],
            "tensor_split": lambda x: torch.tensor_split(x, 3, dim=0)[0],
            "narrow": lambda x: x.narrow(0, 1, 2),
            "cat": lambda x: torch.cat([x[:1], x[2:]]),
            "stack": lambda x: torch.stack(x.unbind(1), 1),
            "select": lambda x: x.select(1, 2).unsqueeze(1),
            "index_select": lambda x: x.index_select(0, torch.tensor([2, 0])),
        }
        for name, deal in dealt.items():
            part, whole, target = deal(logits), deal(full), deal(labels)
            losses = [F.cross_entropy(x.reshape(-1, x.shape[-1]), target.reshape(-1)) for x in (part, whole)]
            torch.testing.assert_close(*losses, **CLOSE, msg=name)
    with vocab_parallel_loss():
        logits = mark_vocab_sharded(torch.randn(2, 3, shard.local), shard)
        assert logits.max(1).values.shape == (2, shard.size)
        assert vocab_shard_of(logits * 2) == shard
        assert (
            vocab_shard_of(logits.sum(0))
            == vocab_shard_of(logits.max(1).values)
            == vocab_shard_of(logits.data)
            == shard
        )
        logits[0, 1:] = 0
        assert vocab_shard_of(torch.isnan(logits)) == shard
        assert logits.new_zeros(3).sum() == 0
        half = mark_vocab_sharded(torch.randn(2, 3, shard.local).bfloat16(), shard)
        assert half.float().dtype == torch.bfloat16  # the loss promotes; no copy
        assert (half.float() * 2).dtype == torch.float32
    # Outside, nothing is intercepted, and a failing forward leaves nothing behind.
    assert logits.softmax(-1).shape == logits.shape


def test_inline_losses() -> None:
    run_ranks(_mode, 2)


def _reads(rank: int, world: int) -> None:
    """What scripts read off logits: values and gradients of the whole vocabulary. Of 9 ids in shares of 8, the
    second rank holds one.
    """
    torch.manual_seed(0)
    index = torch.randint(0, 9, (3, 4, 2))
    uses: dict[str, Any] = {
        "argmax": lambda x: x.argmax(-1),
        "argmin keepdim": lambda x: torch.argmin(x, dim=2, keepdim=True),
        "max": lambda x: x.max(-1),
        "min of rows": lambda x: x.min(1).values.argmax(-1),
        "amax": lambda x: x.amax(-1),
        "topk": lambda x: x.topk(3),
        "smallest": lambda x: torch.topk(x, 9, dim=-1, largest=False).values,
        "logsumexp": lambda x: torch.logsumexp(x, -1, keepdim=True),
        "z loss": lambda x: x.logsumexp(-1).square().mean(),
        "gather": lambda x: x.gather(-1, index),
        "log_softmax": lambda x: F.log_softmax(x, dim=-1).gather(2, index),
        "special": lambda x: torch.special.log_softmax(x, -1).gather(2, index),
        "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
        "probabilities": lambda x: torch.softmax(x, dim=-1, dtype=torch.float64).topk(2).values,
        "moved": lambda x: x.transpose(1, 2).argmax(1),
        "rows": lambda x: torch.cat(x.chunk(2)).detach().float().argmax(-1),
        "sum": lambda x: x.sum(),
        "mean": lambda x: x.mean((1, -1)),
        "argmax of one": lambda x: x[:, -1, :].argmax(dim=-1),
        "argmax of all": lambda x: [x.argmax(), x.flatten(0, 1).argmin()],
        "max of all": lambda x: x.max(),
        "smallest of all": lambda x: x.amin(),
        "amax over several": lambda x: x.amax((1, 2)),
        "logsumexp over several": lambda x: x.logsumexp((0, -1), keepdim=True),
        "sort": lambda x: x.sort(-1, descending=True).values,
        "std": lambda x: x.std(-1),
        "kthvalue": lambda x: x.kthvalue(4, 2).values,
        "norm": lambda x: x.norm(1, -1),
        "multinomial": lambda x: torch.multinomial(x[0].softmax(-1), 3, generator=torch.Generator().manual_seed(1)),
    }
    for dtype, multiple in ((torch.float64, 8), (torch.float32, 1), (torch.bfloat16, 1)):
        shard = VocabShard.even(9, dist.group.WORLD, multiple)
        full = torch.randn(3, 4, 9, dtype=dtype)
        if dtype is torch.bfloat16:  # without equal values, of which topk may choose any
            full = ((torch.randperm(108) - 54) / 16).view(3, 4, 9).to(dtype)
        close = {torch.float64: CLOSE, torch.float32: {}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}[dtype]
        for name, use in uses.items():
            whole = full.clone().requires_grad_()
            leaf = _columns(full, shard)
            expected, actual = use(whole), use(as_scripts_see(mark_vocab_sharded(leaf.view_as(leaf), shard)))
            for want, got in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
                assert want.dtype == got.dtype, name
                assert type(got) is torch.Tensor, name
                torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")
            values = pytree.tree_leaves(expected)[0]
            if values.requires_grad and dtype is not torch.bfloat16:  # where equal values share no gradient
                torch.manual_seed(3)
                slope = torch.randn(values.shape, dtype=torch.float64).to(values.dtype)
                values.backward(slope)
                pytree.tree_leaves(actual)[0].backward(slope)
                want = whole.grad[..., shard.start : shard.start + shard.length]
                torch.testing.assert_close(
                    leaf.grad[..., : shard.length], want, **close, msg=lambda text, name=name: f"{name}: {text}"
                )
                assert not leaf.grad[..., shard.length :].any(), name
    _facts_of_the_whole()
    logits = as_scripts_see(mark_vocab_sharded(torch.randn(2, 3, shard.local), shard))
    assert type(whole_logits(logits)) is torch.Tensor
    for name, fn in {
        "argmax without dim": lambda x: x.transpose(1, 2).argmax(),
        "matmul": lambda x: x @ torch.randn(9, 4),
        "softmax without dim": lambda x: F.softmax(x),
        "max without dim": lambda x: torch.max(x, x),
        "equal": lambda x: torch.equal(x, x),
        "allclose": lambda x: torch.allclose(x, x),
        "dlpack": lambda x: torch.from_dlpack(x),
        "vmap": lambda x: torch.vmap(lambda row: row.argmax(-1))(x),
        "contains": lambda x: 3.0 in x,
        "flatten": lambda x: x[0].unsqueeze(-1).flatten(),
        "squeeze": lambda x: x.transpose(1, 2).squeeze(0),
        "gumbel_softmax": lambda x: F.gumbel_softmax(x, 1),
    }.items():
        with pytest.raises(ValueError, match=name):
            fn(logits)


def _facts_of_the_whole() -> None:
    """Types, places and values where they could be guessed wrong: as many tokens as columns of a rank, operands of
    more dims, bf16.
    """
    shard = VocabShard.even(9, dist.group.WORLD)
    tokens = shard.local
    full = torch.randn(1, tokens, 9).bfloat16()

    def written(change: Any) -> Any:
        def use(x: torch.Tensor) -> Any:
            scaled = x.float()
            change(scaled)
            return [scaled.dtype, scaled.logsumexp(-1), x.float().sum(-1)]

        return use

    uses: dict[str, Any] = {
        "sum of bool": lambda x: (x > 0).sum(-1),
        "sum of int": lambda x: (x > 0).to(torch.int32).sum(),
        "sum in int32": lambda x: (x > 0).sum(-1, dtype=torch.int32),
        "mean of bool": lambda x: (x > 0).float().mean(-1),
        "any": lambda x: [(x > 0).any(-1), x.isnan().any(), (x > 9).any(dim=2, keepdim=True)],
        "all": lambda x: [(x > -1).all(-1), torch.isfinite(x).all(), torch.all(x > 9, (1, 2))],
        "div_": written(lambda x: x.div_(0.25)),
        "masked_fill_": written(lambda x: x.masked_fill_(x > 0, -5.0)),
        "setitem": written(lambda x: x.__setitem__((slice(None), 0), 0)),
        "more dims": lambda x: (x.float().transpose(1, 2) * torch.ones(2, 1, 1, 1)).argmax(2),
        "more dims behind": lambda x: (x.float() * torch.ones(2, 1, 1, 1)).argmax(-1),
        "moved, then unsqueeze": lambda x: x.transpose(1, 2).unsqueeze(0).argmax(2),
        "kthvalue of rows": lambda x: whole_logits(x.float().kthvalue(2, 1).values),
        "norm of rows": lambda x: whole_logits(x.float().norm(2, 1)),
        "iter": lambda x: [row.argmax(-1) for row in x],
        "type as": lambda x: torch.ones(tokens, 1).type_as(x) * 2,
        "facts": lambda x: [x.dtype, x.ndim, len(x), x.is_floating_point(), x.size(0), x.requires_grad, x.grad],
    }
    for name, use in uses.items():
        expected = use(full.clone())
        actual = use(as_scripts_see(mark_vocab_sharded(_columns(full, shard).detach(), shard)))
        for want, got in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
            if isinstance(want, torch.Tensor):
                assert want.dtype == got.dtype, name
                torch.testing.assert_close(
                    got, want, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
            else:
                assert want == got, name
    logits = as_scripts_see(mark_vocab_sharded(_columns(full, shard).detach(), shard))
    with pytest.raises(RuntimeError, match="mean"):
        (logits > 0).mean()
    with pytest.raises(ValueError, match="vocabularies are in different dims"):
        logits + logits.transpose(1, 2)
    for name in ("squeeze", "flatten"):
        with pytest.raises(ValueError, match=f"{name} while the vocabulary is not the last dim"):
            getattr(logits.transpose(1, 2), name)(0, *[1] * (name == "flatten"))


def test_scripts_read_the_whole_vocabulary() -> None:
    run_ranks(_reads, 2)
