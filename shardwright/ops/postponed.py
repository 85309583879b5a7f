"""Products with parameters, and lookups in them, whose weight gradient a `WeightGradStore` can postpone.

`ops.linear` serves modules that are linears. Everything else multiplies in the middle of its own forward: routers and
heads with `F.linear`, experts with `F.linear` on a slice of a stacked parameter, with `torch.bmm` on rows of it, or
with a grouped product. So its forward runs under `PostponeWeightGrads`, which answers those calls:

    linear    x [..., I]      W [O, I]        y = x W^T (+ b)
    matmul    x [..., I]      W [I, O]        y = x W
    batched   x [E, T, I]     W [E, I, O]     y_e = x_e W_e, also with W first
    grouped   x [T, I]        W [E, I, O]     y_t = x_t W_e for the rows t of group e
    lookup    ids [...]       W [V, H]        y = W[ids]

W is a parameter, a view of one (a slice, a transpose), or rows of one that an index picked; any other tensor, and every
call with arguments that are not known here, is torch's business. dW of a view or of rows is added to the elements that
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from ..comm.compat import grouped_mm
from .linear import linear
from .weight_grad import Part, add_product, deferral_possible, store_for


class Strided(NamedTuple):
    """A view of a contiguous parameter; `offset` counts from the parameter's first element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, whole: Tensor) -> Tensor:
        assert whole.is_contiguous(), whole.stride()
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)

    def add(self, whole: Tensor, grad: Tensor) -> None:
        self.view(whole).add_(grad)


class Rows(NamedTuple):
    """What indexing with a tensor of whole numbers copied."""

    numbers: Tensor

    def view(self, whole: Tensor) -> None:
        return None

    def add(self, whole: Tensor, grad: Tensor) -> None:
        whole.index_put_((self.numbers,), grad.to(whole.dtype), accumulate=True)


class Use(NamedTuple):
    """The parameter that a tensor stands for, or that it stands for a part of."""

    param: Parameter
    part: Part | None


class Operation(Protocol):
    """A product y(x, W) and its two gradients; dW has the shape of W, and is added to `into` where it can."""

    def run(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor: ...
    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None: ...


class _Linear:
    """x [..., I], W [O, I]"""

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy.matmul(weight)

    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None:
        return add_product(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]), into)


class _Matmul:
    """x [..., I], W [I, O]"""

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return x.matmul(weight)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy.matmul(weight.t())

    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None:
        return add_product(x.reshape(-1, x.shape[-1]).t(), dy.reshape(-1, dy.shape[-1]), into)


class _Batched:
    """x [E, T, I], W [E, I, O]"""

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(dy, weight.transpose(1, 2))

    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None:
        return add_product(x.transpose(1, 2), dy, into)


class _BatchedFirst:
    """W [E, O, I], x [E, I, T]: y = W x"""

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(weight, x)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(weight.transpose(1, 2), dy)

    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None:
        return add_product(dy, x.transpose(1, 2), into)


class _Grouped(NamedTuple):
    """x [T, I], W [E, I, O]; `ends` [E] is where the rows of each group end."""

    ends: Tensor
    by_columns: bool  # how W lies in memory

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return grouped_mm(x, weight, offs=self.ends)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return grouped_mm(dy, weight.transpose(1, 2), offs=self.ends)

    def weight_grad(self, x: Tensor, dy: Tensor, into: Tensor | None = None) -> Tensor | None:
        if self.by_columns:  # as torch's own backward does: which factor comes first shows in the last bit
            return grouped_mm(dy.t(), x, offs=self.ends).transpose(1, 2)
        return grouped_mm(x.t(), dy, offs=self.ends)


class _Product(torch.autograd.Function):
    """y(x, W); `use` travels in a tuple, past autograd, which would hand the parameter back as an alias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, use: Use, operation: Operation) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.use, ctx.operation = use, operation
        return operation.run(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        operation, (param, part) = ctx.operation, ctx.use
        store = store_for(param)
        dx = operation.input_grad(dy, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            if store is None:
                dw = operation.weight_grad(x, dy)
            else:
                store.put(param, lambda into: operation.weight_grad(x, dy, into), (x, dy), part)
        return dx, dw, None, None


class _Lookup(torch.autograd.Function):
    """W[ids]"""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, use: Use, padding: int, scale_grad: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use, ctx.options = use, (weight.shape[0], padding, scale_grad)
        return F.embedding(ids, weight, None if padding < 0 else padding, scale_grad_by_freq=scale_grad)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (param, part), options = ctx.saved_tensors, ctx.use, ctx.options
        store = store_for(param)

        def weight_grad(into: Tensor | None) -> Tensor:
            return cast(Tensor, torch.ops.aten.embedding_dense_backward(dy, ids, *options))

        if store is None:
            return None, weight_grad(None), None, None, None
        store.put(param, weight_grad, (ids, dy), part)
        return None, None, None, None, None


class PostponeWeightGrads(TorchFunctionMode):
    """Active while a module's own forward runs."""

    def __init__(self) -> None:
        super().__init__()
        # by id: what indexing made (kept, so that the id stays its own), its version
        self._rows: dict[int, tuple[Tensor, int, Use]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None or not (deferral_possible() and torch.is_grad_enabled()):
            return func(*args, **(kwargs or {}))
        result = answer(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    def use_of(self, tensor: Any) -> Use | None:
        """What a tensor stands for; None where its gradient cannot be added later."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad or torch.is_autocast_enabled(tensor.device.type):
            return None
        if isinstance(tensor, Parameter):
            return Use(tensor, None)
        rows = self._rows.get(id(tensor))
        if rows is not None and rows[1] == tensor._version:
            return rows[2]
        return _view_of_parameter(tensor)

    def note_rows(self, rows: Tensor, use: Use) -> None:
        self._rows[id(rows)] = (rows, rows._version, use)


def _view_of_parameter(view: Tensor) -> Use | None:
    param = view._base
    if (
        not isinstance(param, Parameter)
        or not param.requires_grad
        or not param.is_contiguous()
        or view.dtype != param.dtype
    ):
        return None
    dims = sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size != 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:  # elements that overlap, as in an expanded view
            return None
        reach = stride * size
    return Use(
        param, Strided(tuple(view.shape), view.stride(), int(view.storage_offset()) - int(param.storage_offset()))
    )


# The arguments have torch's names; an answer declines (NotImplemented) what it does not know.


def _answer_linear(mode: PostponeWeightGrads, input: Any = None, weight: Any = None, bias: Any = None) -> Any:
    use = mode.use_of(weight)
    if use is None or weight.dim() != 2 or not isinstance(input, Tensor):
        return NotImplemented
    if use.part is None:
        return linear(input, weight, bias)
    y = _Product.apply(input, weight, use, _Linear())
    return y if bias is None else y + bias


def _answer_matmul(mode: PostponeWeightGrads, input: Any = None, other: Any = None, **unknown: Any) -> Any:
    if unknown:
        return NotImplemented
    if (
        isinstance(input, Tensor)
        and isinstance(other, Tensor)
        and input.dim() == other.dim() == 3
        and input.shape[0] == other.shape[0]
    ):
        return _answer_bmm(mode, input, other)
    use = mode.use_of(other)
    if use is None or other.dim() != 2 or not isinstance(input, Tensor) or input.dim() < 2:
        return NotImplemented
    return _Product.apply(input, other, use, _Matmul())


def _answer_bmm(mode: PostponeWeightGrads, input: Any = None, mat2: Any = None, **unknown: Any) -> Any:
    if unknown or not isinstance(input, Tensor):
        return NotImplemented
    if (use := mode.use_of(mat2)) is not None:
        return _Product.apply(input, mat2, use, _Batched())
    if (use := mode.use_of(input)) is not None:
        return _Product.apply(mat2, input, use, _BatchedFirst())
    return NotImplemented


def _answer_grouped(
    mode: PostponeWeightGrads, mat_a: Any = None, mat_b: Any = None, *, offs: Any = None, **others: Any
) -> Any:
    use = mode.use_of(mat_b)
    if (
        use is None
        or offs is None
        or mat_a.dim() != 2
        or mat_b.dim() != 3
        or any(other is not None for other in others.values())
    ):
        return NotImplemented
    return _Product.apply(mat_a, mat_b, use, _Grouped(offs, mat_b.stride(-2) == 1 and mat_b.stride(-1) > 1))


def _answer_embedding(
    mode: PostponeWeightGrads,
    input: Any = None,
    weight: Any = None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    use = mode.use_of(weight)
    if use is None or max_norm is not None or sparse:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Lookup.apply(input, weight, use, padding, scale_grad_by_freq)


def _answer_getitem(mode: PostponeWeightGrads, whole: Any, index: Any) -> Any:
    use = mode.use_of(whole)
    if (
        use is None
        or use.part is not None
        or not isinstance(index, Tensor)
        or index.dtype not in (torch.int64, torch.int32)
    ):
        return NotImplemented
    rows = whole[index]
    mode.note_rows(rows, Use(use.param, Rows(index)))
    return rows


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.linear: _answer_linear,
    torch.matmul: _answer_matmul,
    Tensor.matmul: _answer_matmul,
    Tensor.__matmul__: _answer_matmul,
    torch.mm: _answer_matmul,
    Tensor.mm: _answer_matmul,
    torch.bmm: _answer_bmm,
    Tensor.bmm: _answer_bmm,
    F.embedding: _answer_embedding,
    Tensor.__getitem__: _answer_getitem,
    grouped_mm: _answer_grouped,
}
