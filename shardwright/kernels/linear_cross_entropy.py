"""A head over the vocabulary and its cross entropy in one: the logits exist for a few tokens at a time.

Shapes: x [N, H], the same on every rank; weight [v, H] and bias [v], this rank's rows of V in all; target [N].

    logits = f(x W^T + b)       f: see `logit_steps`
    loss   = cross entropy of the logits, see `cross_entropy_rows`
    dz     = dloss * d loss / d(x W^T + b)
    dx     = sum over ranks of dz W       dW = dz^T x       db = sum over tokens of dz

[Note: when gradients are computed] Chunks of tokens go through head and loss one after the other. Two ways:

    at once     with the loss, dx and dW are computed for dloss = 1 and multiplied by dloss in backward: the three
                products of plain torch. dx [N, H] and dW [v, H] are kept between forward and backward
    again       forward keeps lse [N]; backward computes the logits again, then dx and dW: four products

Plain torch keeps logits [N, v]. So "at once" is the way where dW takes no more than these, "again" elsewhere: never
more memory than plain torch, and a third more arithmetic of the head alone where tokens are few. It is also "again"
where dloss differs by token (reduction "none"), and in fp16, whose range is too small for dloss = 1. Where weight
gradients wait for a schedule (`ops.weight_grad`), dx is computed at once and dW when its turn comes: the backward that
another stage waits for then only scales.

dW is summed over the chunks in fp32 for half precision. On a GPU each chunk of `T` tokens pays 8 v H bytes for that
sum (the product adds to it as it writes) beside 6 T v H operations, which is as dear as its products at T = 300: chunks
have at least H tokens there where dW is wanted, whose logits take half of the memory that dW does.

[Note: rows that nobody has] A GPU multiplies two to three times as slowly by matrices of which a side is no multiple of
16 bytes, as vocabularies of 30522 (BERT) or 50257 (GPT-2) are. Heads get rows of zeros there until theirs is, as they
have under tensor parallelism until ranks share them evenly, and the loss does not see their logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm import turns
from ..ops.collective import copy_to_group
from ..ops.cross_entropy import Reduction, written_out
from ..ops.vocab_shard import VocabShard
from ..ops.weight_grad import active_store, deferral_possible, store_for
from ..utils.device import chosen_as_for
from .cross_entropy_rows import Columns, Targets, Terms, joined, row_gradients, row_losses, row_shares
from .logit_steps import Step, applied, differentiated, steps_of

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}  # of the logits of a chunk, in fp32
_SIDE = 16  # bytes, see [Note: rows that nobody has]


def tokens_at_a_time(device: torch.device, rows: int) -> int:
    """Whose logits, over `rows` of a vocabulary, exist at once. A loss of no more tokens has nothing to gain here."""
    return max(1, CHUNK_BYTES.get(chosen_as_for(device), CHUNK_BYTES["cuda"]) // (4 * rows))


def chunk_for(x: Tensor, weight: Tensor) -> int:
    """Tokens of a chunk. See the end of [Note: when gradients are computed]."""
    tokens = tokens_at_a_time(x.device, weight.shape[0])
    sums = chosen_as_for(x.device) != "cpu" and torch.is_grad_enabled() and weight.requires_grad
    return max(tokens, weight.shape[1]) if sums else tokens


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    shard: VocabShard | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    steps: tuple[Step, ...] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`F.cross_entropy(softcap * tanh(logit_scale * F.linear(x, weight, bias) / softcap), target, ...)` plus
    `z_loss * lse^2` per token, without the logits.

    x [N, H], weight [V, H], bias [V], target [N] -> [] or, with reduction "none", [N]; at least fp32.

    shard   the rows of the vocabulary that weight and bias of this rank hold; None: all
    steps   in the place of logit_scale and softcap: what is done to the logits, in order
    chunk   tokens whose logits exist at a time; None: as many as a few megabytes hold
    """
    _check(x, weight, target, bias, shard, reduction, label_smoothing, softcap, chunk)
    columns = Columns(weight.shape[0], 0, weight.shape[0]) if shard is None else Columns.of(shard)
    if chunk is None:
        chunk = chunk_for(x, weight)
    job = _Job(
        columns,
        Terms(label_smoothing, z_loss),
        steps_of(logit_scale, softcap) if steps is None else steps,
        ignore_index,
        chunk,
        reduction != "none",
        torch.is_grad_enabled(),
        shard,
        weight,
    )
    if missing := _rows_missing(weight):
        weight, bias = F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))
    losses: Tensor = _LinearCrossEntropy.apply(x, weight, bias, target, job)
    return losses / (target != ignore_index).sum() if reduction == "mean" else losses


def _rows_missing(weight: Tensor) -> int:
    """See [Note: rows that nobody has]."""
    if chosen_as_for(weight.device) == "cpu":
        return 0
    return -weight.shape[0] % (_SIDE // weight.dtype.itemsize)


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    shard: VocabShard | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    chunk: int | None,
) -> None:
    rows = weight.shape[0] if shard is None else shard.local
    shapes = x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1] and target.shape == x.shape[:1]
    if not shapes or weight.shape[0] != rows or (bias is not None and bias.shape != weight.shape[:1]):
        biased = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ValueError(
            f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)}{biased} and target "
            f"{tuple(target.shape)} must be [N, H], [{rows if shard else 'V'}, H]{', [V]' * (bias is not None)} and "
            "[N]; flatten leading dims first"
        )
    if target.is_floating_point():
        raise ValueError(
            f"linear_cross_entropy: target of dtype {target.dtype} must be ids; class probabilities need the logits: "
            "F.cross_entropy(F.linear(x, weight, bias), target)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"linear_cross_entropy: label_smoothing={label_smoothing} must be between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy: softcap={softcap} must be more than 0, or None for no cap")
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk={chunk} must be at least 1 token, or None")


class _Job(NamedTuple):
    """All that is no tensor of autograd's; `weight` is the parameter itself, which autograd would hand back as an
    alias.
    """

    columns: Columns
    terms: Terms
    steps: tuple[Step, ...]
    ignore_index: int
    chunk: int
    summed: bool  # the losses of all tokens are added up
    differentiated: bool
    shard: VocabShard | None
    weight: Tensor

    def row_steps(self, dtype: torch.dtype) -> tuple[Step, ...]:
        """What is done to logits of `dtype` before their rows are reduced. Rows are computed in fp32 anyway, so a cast
        to it at the end would only write them once more.
        """
        is_spared = dtype.itemsize < 4 and self.steps[-1:] == (Step("cast", torch.float32),)
        return self.steps[:-1] if is_spared else self.steps


class _Chunk(NamedTuple):
    rows: slice
    x: Tensor
    logits: Tensor
    kept: list[Tensor]
    targets: Targets


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, job: _Job) -> Tensor:
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        targets = Targets.of(target, job.columns, weight.shape[0], job.ignore_index)
        at_once = job.differentiated and job.summed and x.dtype != torch.float16 and not x.is_meta
        accumulated = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grads = _Grads(
            torch.empty_like(x) if at_once and need_x else None,
            _room(weight, accumulated, x)
            if at_once
            and need_weight
            and not deferral_possible()
            and weight.shape[1] * accumulated.itemsize <= x.shape[0] * x.dtype.itemsize
            else None,
            _zeros(bias, accumulated) if at_once and need_bias and bias is not None else None,
        )
        if grads.are_wanted:
            lse, losses = _forward_at_once(x, weight, bias, targets, job, grads)
        else:
            lse, losses = _forward(x, weight, bias, targets, job)
        ctx.save_for_backward(x, weight, bias, lse, grads.x, *targets)
        ctx.job, ctx.weight_grad, ctx.bias_grad = job, grads.weight, grads.bias
        return losses.sum() if job.summed else losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse, dx, *saved = ctx.saved_tensors
        job, targets = ctx.job, Targets(*saved)
        if torch.is_grad_enabled():
            return (*_through_formula(x, weight, bias, targets, job, dlosses, ctx.needs_input_grad), None, None)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        if job.summed:  # 0 * inf, of a mean over nothing, is 0 as in torch
            dlosses = dlosses.masked_fill(targets.ignored.all(), 0)
        dw, ctx.weight_grad = ctx.weight_grad, None  # once; a backward that comes again computes it
        db, ctx.bias_grad = ctx.bias_grad, None
        again = _Grads(
            torch.empty_like(x) if need_x and dx is None else None,
            None,
            _zeros(bias, _summing(bias, lse)) if need_bias and db is None and bias is not None else None,
        )
        store = store_for(job.weight) if need_weight and dw is None else None
        if need_weight and dw is None and store is None:
            again = again._replace(weight=_room(weight, _summing(weight, lse), x))
        if again.are_wanted:
            _backward(x, weight, bias, lse, targets, job, dlosses, again)
        dx = again.x if dx is None or again.x is not None else (dx.to(_summing(dx, lse)) * dlosses).to(dx.dtype)
        reduction = _reduced(dx, job.columns)
        if store is not None:
            held = (x, lse, *targets)
            store.put(job.weight, _later(x, weight, bias, lse, targets, job, dlosses), held)
        if again.weight is not None:
            dw = again.weight
        elif dw is not None:  # scaled and rounded in one pass
            dw = torch.mul(dw, dlosses, out=dw if dw.dtype == weight.dtype else torch.empty_like(weight))
        db = again.bias if again.bias is not None else None if db is None else db.mul_(dlosses)
        if reduction is not None and dx is not None:
            if (active := active_store()) is not None:
                active.run_one_of_others()  # one of a microbatch before hides the collective
            turns.wait(reduction, dx)
        return dx, _cast(dw, weight), _cast(db, bias), None, None


class _Grads(NamedTuple):
    """Where gradients are added up, or None for those that are not computed: dx [N, H], dW [v, H], db [v].

    overwrites  there is nothing in dW before the first chunk
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    overwrites: bool = True

    @property
    def are_wanted(self) -> bool:
        return any(grad is not None for grad in (self.x, self.weight, self.bias))

    def add(self, chunk: _Chunk, lse: Tensor, dlosses: Tensor, weight: Tensor, job: _Job) -> None:
        """What the rows of a chunk give, from their lse and dlosses."""
        steps = job.row_steps(chunk.x.dtype)
        narrow = not steps and chunk.logits.dtype == weight.dtype
        dlogits = row_gradients(
            chunk.logits, lse, dlosses, chunk.targets, job.columns, job.terms, reuse=not chunk.kept, narrow=narrow
        )
        dz = differentiated(steps, chunk.kept, dlogits)
        if self.bias is not None:
            self.bias.add_(dz.sum(0, dtype=torch.promote_types(dz.dtype, self.bias.dtype)))
        dz = dz.to(weight.dtype)
        if self.x is not None:
            torch.mm(dz, weight, out=self.x[chunk.rows])
        if self.weight is not None:
            self._add_product(dz.t(), chunk.x, self.overwrites and chunk.rows.start == 0)

    def _add_product(self, dz: Tensor, x: Tensor, is_first: bool) -> None:
        dw = self.weight
        assert dw is not None
        same = dw.dtype == dz.dtype
        widens = dz.is_cuda and dw.dtype == torch.float32  # cuBLAS does from half precision, and not to fp64
        if same and is_first:
            torch.mm(dz, x, out=dw)
        elif same:
            dw.addmm_(dz, x)
        elif widens and is_first:
            torch.mm(dz, x, out_dtype=dw.dtype, out=dw)
        elif widens:
            torch.addmm(dw, dz, x, out_dtype=dw.dtype, out=dw)
        elif is_first:
            dw.copy_(dz.mm(x))
        else:
            dw.add_(dz.mm(x))


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _room(weight: Tensor, dtype: torch.dtype, x: Tensor) -> Tensor:
    """For dW, which the first chunk writes."""
    return torch.empty(weight.shape, dtype=dtype, device=weight.device) if len(x) else _zeros(weight, dtype)


def _wide(x: Tensor, steps: Sequence[Step]) -> torch.dtype:
    """What rows are computed in: fp64 where the steps leave logits in it, else fp32."""
    dtype = next((step.value for step in reversed(steps) if step.kind == "cast"), x.dtype)
    return torch.float64 if dtype == torch.float64 else torch.float32


def _summing(gradient: Tensor, lse: Tensor) -> torch.dtype:
    """What a gradient is added up in."""
    return torch.promote_types(gradient.dtype, lse.dtype)


def _cast(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return grad if grad is None or like is None else grad.to(like.dtype)


def _chunks(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, job: _Job) -> Iterator[_Chunk]:
    for start in range(0, x.shape[0], job.chunk):
        rows = slice(start, min(start + job.chunk, x.shape[0]))
        logits, kept = applied(job.row_steps(x.dtype), F.linear(x[rows], weight, bias))
        yield _Chunk(rows, x[rows], logits, kept, targets.part(rows.start, rows.stop))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, job: _Job) -> tuple[Tensor, Tensor]:
    """(lse, losses), with two collectives in all."""
    found = [
        row_shares(chunk.logits, chunk.targets, job.columns, job.terms)
        for chunk in _chunks(x, weight, bias, targets, job)
    ]
    wide = _wide(x, job.steps)
    peak = torch.cat([peak for peak, _ in found]) if found else x.new_empty(0, dtype=wide)
    shares = torch.cat([shares for _, shares in found], 1) if found else x.new_empty((3, 0), dtype=wide)
    lse, shares = joined(peak, shares, job.columns)
    return lse, row_losses(lse, shares, targets, job.columns, job.terms)


def _forward_at_once(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, job: _Job, grads: _Grads
) -> tuple[Tensor, Tensor]:
    """The same, with gradients for dloss = 1."""
    wide = _wide(x, job.steps)
    lses, losses = x.new_empty(x.shape[0], dtype=wide), x.new_empty(x.shape[0], dtype=wide)
    ones = torch.ones_like(lses)
    for chunk in _chunks(x, weight, bias, targets, job):
        rows, logits, part = chunk.rows, chunk.logits, chunk.targets
        lse, shares = joined(*row_shares(logits, part, job.columns, job.terms), job.columns)
        lses[rows], losses[rows] = lse, row_losses(lse, shares, part, job.columns, job.terms)
        grads.add(chunk, lse, ones[rows], weight, job)
    return lses, losses


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    targets: Targets,
    job: _Job,
    dlosses: Tensor,
    grads: _Grads,
) -> None:
    """Compute the logits again, and from them the gradients that are asked for."""
    dlosses = dlosses.to(lse.dtype).expand(lse.shape)
    for chunk in _chunks(x, weight, bias, targets, job):
        grads.add(chunk, lse[chunk.rows], dlosses[chunk.rows], weight, job)


def _later(
    x: Tensor, weight: Tensor, bias: Tensor | None, lse: Tensor, targets: Targets, job: _Job, dlosses: Tensor
) -> Any:
    """What computes dW when its turn comes."""

    def compute(into: Tensor | None) -> Tensor | None:
        dtype = _summing(weight, lse)
        fits = into is not None and into.dtype == dtype and into.shape == weight.shape
        dw = into if fits and into is not None else _room(weight, dtype, x)
        _backward(x, weight, bias, lse, targets, job, dlosses, _Grads(None, dw, None, overwrites=not fits))
        return None if fits else dw[: len(job.weight)].to(weight.dtype)

    return compute


def _reduced(dx: Tensor | None, columns: Columns) -> Any:
    """The running sum of dx over the ranks, in place; None where there is none to wait for."""
    if dx is None or columns.group is None or dx.is_meta:
        return None
    return dist.all_reduce(dx, group=columns.group, async_op=True)


def _through_formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Targets,
    job: _Job,
    dlosses: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves: of operations that autograd knows, with whole logits."""
    columns = job.columns
    opened = x if columns.group is None else copy_to_group(x, columns.group)
    logits, _ = applied(job.steps, F.linear(opened, weight, bias))
    if job.shard is not None and columns.group is not None:
        losses = written_out(logits, targets, job.shard, job.terms)
    else:
        smoothing, z_loss = job.terms
        target = targets.column.masked_fill(targets.ignored, -100)
        losses = F.cross_entropy(
            logits[:, : columns.length], target, reduction="none", label_smoothing=smoothing, ignore_index=-100
        )
        losses = losses + (z_loss * logits[:, : columns.length].logsumexp(1).square()).masked_fill(targets.ignored, 0)
    wanted = [tensor for tensor, need in zip((x, weight, bias), needed, strict=False) if need and tensor is not None]
    total = losses.sum() if job.summed else losses
    found = iter(torch.autograd.grad(total, wanted, dlosses.to(total.dtype), create_graph=True))
    grads = [
        next(found) if need and tensor is not None else None
        for tensor, need in zip((x, weight, bias), needed, strict=False)
    ]
    return tuple(grads)
