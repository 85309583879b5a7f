"""What scripts do with logits whose vocabulary is split, against the same on whole logits: values and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.ops.vocab_mode import SplitVocabularyError, as_scripts_see, mark_vocab_sharded, whole_logits
from shardwright.ops.vocab_shard import VocabShard
from shardwright.testing import run_ranks
from shardwright.utils import pytree
from tests.ranks.vocab_idioms import IDIOMS

# What has no answer on parts, or none that a script could mean; x are logits of 13 columns, of which a rank holds 7.
REFUSED: dict[str, Any] = {
    "width of a rank": lambda x: x + torch.ones(7),
    "mask of a rank": lambda x: x.masked_fill(torch.ones(4, 5, 7, dtype=torch.bool), 0.0),
    "chosen by a rank": lambda x: torch.where(torch.ones(7, dtype=torch.bool), x, 0.0),
    "moved, by a rank": lambda x: x.transpose(1, 2) * torch.ones(7, 1),
    "keyword": lambda x: torch.add(x, other=torch.ones(7)),
    "rows of a rank": lambda x: x.reshape(-1, 7),
    "beams and tokens in one": lambda x: x[:, -1].reshape(2, -1),
    "flat": lambda x: x.reshape(-1),
    "added to": lambda x: torch.zeros(4, 5, 13).add_(x.detach()),
    "copied into": lambda x: torch.zeros(4, 5, 13).copy_(x.detach()),
    "written into": lambda x: torch.zeros(4, 5, 13).__setitem__(0, x.detach()[0]),
    "out": lambda x: torch.add(x.detach(), 1, out=torch.zeros(4, 5, 13)),
    "places": lambda x: torch.where(x > 0),
    "chosen by a mask of all": lambda x: x[torch.ones(4, 5, 13, dtype=torch.bool)],
    "chooses from another": lambda x: torch.ones(4, 5, 13)[x > 0],
    "index of some columns": lambda x: x.gather(1, torch.zeros(4, 1, 7, dtype=torch.long)),
    "columns joined": lambda x: torch.cat([x, torch.ones(4, 5, 2)], -1),
    "rows joined": lambda x: torch.cat([x, torch.ones(4, 5, 13)]),
    "linear": lambda x: F.linear(x, torch.ones(3, 13)),
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "cosine": lambda x: F.cosine_similarity(x, x, -1),
    "scatter": lambda x: torch.zeros_like(x).scatter_(-1, torch.ones(4, 5, 1, dtype=torch.long), 1.0),
    "weights of classes": lambda x: F.cross_entropy(x.view(-1, 13), torch.zeros(20).long(), weight=torch.ones(13)),
    "numpy": lambda x: x.detach().numpy(),
    "list": lambda x: x[0, 0].tolist(),
    "memory": lambda x: x.data_ptr(),
    "gradients by hand": lambda x: torch.autograd.grad(x.sum(), x),
    "quantile": lambda x: x.quantile(0.5, -1),
    "noise": lambda x: torch.rand_like(x),
    "padding": lambda x: F.pad(x, (0, 3)),
}
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-6, "atol": 1e-6},  # some of them go through fp32
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def split(full: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """This rank's columns; padding holds a number that would show if it were used."""
    local = full.new_full((*full.shape[:-1], shard.local), 50.0)
    local[..., : shard.length] = full[..., shard.start : shard.start + shard.length]
    return local.requires_grad_()


def compare(name: str, use: Any, size: int, multiple: int, dtype: torch.dtype, is_whole: bool) -> None:
    shard = VocabShard.even(size, dist.group.WORLD, multiple)
    generator = torch.Generator().manual_seed(size)
    full, other = torch.randn(2, 4, 5, size, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(size, (4, 5), generator=generator)
    labels[0, 3:], labels[2, 1] = -100, -100
    whole, leaf = full.clone().requires_grad_(), split(full, shard)
    logits = as_scripts_see(mark_vocab_sharded(leaf.view_as(leaf), shard))
    reference = other if is_whole else as_scripts_see(mark_vocab_sharded(split(other, shard).detach(), shard))
    expected, actual = use(whole, other, labels, size), use(logits, reference, labels, size)
    slopes = torch.Generator().manual_seed(1)
    sums = []
    pairs = list(zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True))
    for index, (want, got) in enumerate(pairs):
        got = whole_logits(got)
        where = f"{name}[{index}], V={size} in {multiple}, {dtype}, whole reference: {is_whole}"
        torch.testing.assert_close(
            got,
            want,
            **CLOSE[dtype],
            check_dtype=dtype is torch.float64,  # cross entropy is fp32 or better
            msg=lambda text, where=where: f"{where}: {text}",
        )
        if want.requires_grad:
            slope = torch.randn(want.shape, generator=slopes, dtype=torch.float64).to(want.dtype)
            sums.append([(want * slope).sum(), (got * slope).sum()])
    if sums and dtype is torch.float64:
        for total in zip(*sums, strict=True):
            sum(total).backward()
        want = whole.grad[..., shard.start : shard.start + shard.length]
        torch.testing.assert_close(
            leaf.grad[..., : shard.length], want, **CLOSE[dtype], msg=lambda text: f"{name}, gradient: {text}"
        )
        assert not leaf.grad[..., shard.length :].any(), name


def idioms(rank: int, world: int) -> list[str]:
    problems = []
    for name, use in IDIOMS.items():
        for size, multiple, dtype, is_whole in (
            (13, 1, torch.float64, True),
            (13, 1, torch.float64, False),
            (10, 8, torch.float64, True),
            (13, 1, torch.bfloat16, False),
        ):
            try:
                compare(name, use, size, multiple, dtype, is_whole)
            except Exception as error:  # all idioms at once
                problems.append(f"{name}: {type(error).__name__} {error}")
                break
    return problems + refusals()


def refusals() -> list[str]:
    shard, problems = VocabShard.even(13, dist.group.WORLD), []
    for name, use in REFUSED.items():
        try:
            use(as_scripts_see(mark_vocab_sharded(torch.randn(4, 5, shard.local, requires_grad=True) * 1, shard)))
            problems.append(f"{name}: not refused")
        except SplitVocabularyError as error:
            if "whole_logits(logits)" not in str(error):
                problems.append(f"{name}: {error}")
    return problems


def test_scripts_do_with_split_logits_what_they_do_with_whole_ones() -> None:
    for problems in run_ranks(idioms, 2):
        assert not problems, "\n".join(problems)
