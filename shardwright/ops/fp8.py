"""Linears whose three products are computed in 8 bits.

With x [T, I], W [O, I], T tokens in any number of leading dims:

    forward   y  = x W^T       codes of x and W in e4m3
    dgrad     dx = dy W        codes of dy in e5m2, of W in e4m3
    wgrad     dW = dy^T x      codes of dy in e5m2, of x in e4m3

A product reads codes, one byte each, and multiplies its sums (in fp32) by the scales of both factors. What is kept for
backward is x and W as they came, as a linear in bf16 keeps them; they are turned into codes again there, which gives
the same codes.

[Note: scales]
A scale is the smallest power of two s with amax / s <= the largest number of the format. So codes are exact but for
their own rounding, and two scales that differ give the same numbers, except for those that are near the lower end of
the format: below 2^-14 of the largest for e4m3, 2^-30 for e5m2. That is why layouts whose tensors end elsewhere
(microbatches, data-parallel ranks) agree so closely.

    tensorwise   one scale for each of x, W and dy, of `amax` over all of it
    rowwise      a scale for each row of both factors, over what is summed: for x W^T over I, for dy W over O, for
                 dy^T x over T. Every product has codes of its own.
    current      amax is that of the tensor
    delayed      amax is the largest of the last steps (`history`); what exceeds it is clamped. Tensorwise alone, and as
                 current up to the first step in which a factor is not all zeros.

A factor that is not finite has nan as its scale, so that the product is nan: a loss scaler sees it.

[Note: the same scale on all ranks]
Where tensor parallelism cuts a factor along what an amax is taken of, the amax is that of all ranks. The codes are then
those of one process, and only sums over ranks are rounded in parts:

    column   W and dy are cut      tensorwise: W, dy    rowwise: dy and W of dgrad
    row      x and W are cut       tensorwise: x, W     rowwise: x and W of forward

Products that wait (`ops.weight_grad`) need no agreement when they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import turns
from ..comm.compat import reshaped, scaled_mm
from ..comm.quantised import power_of_two
from .weight_grad import store_for

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNED = 16  # sizes of factors must be multiples of it
X, W, DY = range(3)  # the factors of a linear
_FORMATS = {X: E4M3, W: E4M3, DY: E5M2}
# Both formats end at 0.875 of a power of two: 448 = 0.875 * 2^9, 57344 = 0.875 * 2^16.
_TOP_MANTISSA, _TOP_EXPONENT = 0.875, {E4M3: 9, E5M2: 16}


class History(Protocol):
    """Of the amax of the three factors of every linear, by its number."""

    def note(self, linear: int, factor: int, amax: Tensor) -> None:
        """That of one tensor of the running step."""

    def amax(self, linear: int, factor: int) -> Tensor | None:
        """The largest of the steps before; None where there is none yet."""


class Fp8Products:
    """How one linear multiplies.

    rowwise     instead of tensorwise; see [Note: scales]
    emulated    codes are turned back into numbers, and these are multiplied: on any device, and slower than without
    cut, group  what of the weight is dealt to the ranks of `group`: its outputs, its inputs, or nothing
    history     for delayed scaling, where this is linear `number`
    """

    def __init__(
        self,
        rowwise: bool = False,
        emulated: bool = False,
        cut: Literal["outputs", "inputs"] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rowwise, self.emulated = rowwise, emulated
        self.cut, self.group = cut, group
        self.history: History | None = None
        self.number = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Products:
        """For copies of a model, which are tried out: what they see is no part of the history."""
        return Fp8Products(self.rowwise, self.emulated, self.cut, self.group)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, param: Tensor, transposed: bool = False) -> Tensor:
        """y = x W^T + b. `weight` is what autograd differentiates, `param` the module's own parameter; `transposed`: it
        is [I, O].
        """
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return cast(Tensor, _Fp8Linear.apply(x, weight, bias, (param, bias), transposed, self, torch.is_grad_enabled()))

    def forward(self, x: Tensor, weight: Tensor, noting: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [T, I], weight [O, I]; y [T, O], and the scales that the gradients need."""
        if self.rowwise:
            scales = self._row_scales((X, x), (W, weight), agree=self.cut == "inputs")
            return self._product(x, weight, (X, W), scales), ()
        scales = self._scales({X: x, W: weight}, noting)
        return self._product(x, weight, (X, W), scales), tuple(scales)

    def grad_scale(self, dy: Tensor) -> Tensor | None:
        """Of dy, for both gradients; None: each has its own."""
        return None if self.rowwise else self._scales({DY: dy}, noting=True)[0]

    def input_grad(self, dy: Tensor, weight: Tensor, of_dy: Tensor | None, kept: Sequence[Tensor]) -> Tensor:
        """dx [T, I] of dy [T, O]."""
        columns = weight.t()
        if of_dy is None:
            scales = self._row_scales((DY, dy), (W, columns), agree=self.cut == "outputs")
        else:
            scales = [of_dy, kept[W]]
        return self._product(dy, columns, (DY, W), scales)

    def weight_grad(self, x: Tensor, dy: Tensor, of_dy: Tensor | None, kept: Sequence[Tensor]) -> Tensor:
        """dW [O, I] of dy [T, O]."""
        rest = -x.shape[0] % ALIGNED
        if rest:  # zeros add nothing
            x, dy = (torch.nn.functional.pad(each, (0, 0, 0, rest)) for each in (x, dy))
        a, b = dy.t(), x.t()
        scales = self._row_scales((DY, a), (X, b), agree=False) if of_dy is None else [of_dy, kept[X]]
        return self._product(a, b, (DY, X), scales)

    def _scales(self, tensors: dict[int, Tensor], noting: bool) -> list[Tensor]:
        """One for each tensor."""
        found = [_largest(tensor.abs().amax()) if tensor.numel() else _none(tensor, ()) for tensor in tensors.values()]
        history = None if found[0].is_meta else self.history
        if history is not None and noting:
            for factor, amax in zip(tensors, found, strict=True):
                history.note(self.number, factor, amax)
        before = [None if history is None else history.amax(self.number, factor) for factor in tensors]
        cut = {None: (), "outputs": (W, DY), "inputs": (X, W)}[self.cut]
        shared = [place for place, factor in enumerate(tensors) if factor in cut and before[place] is None]
        for place, amax in zip(shared, self._agree([found[place] for place in shared]), strict=True):
            found[place] = amax
        for place, then in enumerate(before):
            if then is not None:
                found[place] = torch.where(found[place] < torch.inf, then, torch.inf)
        return [scale_of(amax, _FORMATS[factor]) for factor, amax in zip(tensors, found, strict=True)]

    def _row_scales(self, *factors: tuple[int, Tensor], agree: bool) -> list[Tensor]:
        """One for each row of each tensor [rows, K]: [rows]."""
        found = [
            _largest(tensor.abs().amax(1)) if tensor.numel() else _none(tensor, tensor.shape[:1])
            for _, tensor in factors
        ]
        if agree:
            found = self._agree(found)
        return [scale_of(amax, _FORMATS[factor]) for (factor, _), amax in zip(factors, found, strict=True)]

    def _agree(self, amaxes: list[Tensor]) -> list[Tensor]:
        """The largest over the ranks, by one collective."""
        if not amaxes or self.group is None or self.group.size() == 1 or amaxes[0].is_meta:
            return amaxes
        joined = torch.cat([amax.reshape(-1) for amax in amaxes])
        turns.run(dist.all_reduce, joined, dist.ReduceOp.MAX, group=self.group)
        parts = joined.split([amax.numel() for amax in amaxes])
        return [part.view(amax.shape) for part, amax in zip(parts, amaxes, strict=True)]

    def _product(self, a: Tensor, b: Tensor, factors: tuple[int, int], scales: Sequence[Tensor]) -> Tensor:
        """a b^T of a [M, K] and b [N, K], in the dtype of b."""
        if not a.numel() or not b.numel():
            return a.new_zeros((a.shape[0], b.shape[0]), dtype=b.dtype)
        clamped = self.history is not None
        codes = [
            encode(factor, scale, _FORMATS[kind], clamped)
            for factor, scale, kind in zip((a, b), scales, factors, strict=True)
        ]
        multiply: Callable[..., Tensor] = _emulated_product if self.emulated else _device_product
        return multiply(*codes, *scales, b.dtype, DY not in factors)


def scale_of(amax: Tensor, kind: torch.dtype) -> Tensor:
    """The scale of fp32 `amax`; nan where it is not finite, 1 where it is 0."""
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - _TOP_EXPONENT[kind] + (mantissa > _TOP_MANTISSA).int()
    scale = torch.where(amax > 0, power_of_two(exponent.clamp(-126, 126)), 1.0)
    return torch.where(amax < torch.inf, scale, torch.nan)


def encode(x: Tensor, scale: Tensor, kind: torch.dtype, clamped: bool = False) -> Tensor:
    """Codes of x [rows, K], contiguous; `scale` is one, or one for each row."""
    values = x.float() if x.dtype == torch.float16 else x  # in which the inverse of a scale may be no number
    factor = scale.reciprocal().to(values.dtype)
    values = values * (factor if scale.dim() == 0 else factor.unsqueeze(1))
    if clamped:
        most = torch.finfo(kind).max
        values = values.clamp(-most, most)
    return (_to_odd(values) if values.dtype == torch.float64 else values).to(kind).contiguous()


def _to_odd(values: Tensor) -> Tensor:
    """fp64 that rounds to fewer bits as it should. torch goes by way of fp32, where what is next to the middle of two
    codes becomes the middle: what fp32 has no bits for is therefore cut off, and if it was not 0 the last bit is set.
    """
    bits, last = values.view(torch.int64), 1 << 29
    rest = bits & (last - 1)
    return torch.where(rest == 0, bits, (bits - rest) | last).view(torch.float64)


def _largest(amax: Tensor) -> Tensor:
    """In fp32; what is not a number is larger than all, also for a backend's maximum."""
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _none(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor.new_zeros(tuple(shape), dtype=torch.float32)


def _device_product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a in rows and b^T in columns, as the kernels want them; `fast`: sums of fewer bits, for what is no gradient."""
    if of_a.dim():
        of_a, of_b = of_a.unsqueeze(1), of_b.unsqueeze(0)
    return scaled_mm(a, b.t(), of_a, of_b, out_dtype=dtype, use_fast_accum=fast)


def _emulated_product(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sums = a.to(exact) @ b.to(exact).t()
    return (sums * (of_a.unsqueeze(1) if of_a.dim() else of_a) * of_b).to(dtype)


class _Fp8Linear(torch.autograd.Function):
    """The parameters travel in a tuple, past autograd, which would hand them back as aliases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        params: tuple[Tensor, Tensor | None],
        transposed: bool,
        products: Fp8Products,
        noting: bool,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        w = weight.t() if transposed else weight
        y, kept = products.forward(x.reshape(-1, x.shape[-1]), w, noting)
        if bias is not None:
            y += bias
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, *kept)
        ctx.x_shape, ctx.params, ctx.transposed, ctx.products = x.shape, params, transposed, products
        return reshaped(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True with linears in fp8 (precision='fp8' or use_fp8=True): rounding to 8 bits has no "
                "gradient of its own, so that there are no gradients of gradients; use precision='bf16'"
            )
        x, weight, *kept = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        transposed, products, (param, bias) = ctx.transposed, ctx.products, ctx.params
        flat_dy = dy.reshape(-1, dy.shape[-1])
        of_dy = products.grad_scale(flat_dy)
        dx = dw = db = None
        if need_x:
            w = weight.t() if transposed else weight
            dx = products.input_grad(flat_dy, w, of_dy, kept).view(ctx.x_shape)
        if need_weight:
            flat_x = x.reshape(-1, x.shape[-1])

            def weight_grad(_: Tensor | None) -> Tensor:
                found = products.weight_grad(flat_x, flat_dy, of_dy, kept)
                return cast(Tensor, found.t() if transposed else found)

            if (store := store_for(param)) is not None:
                store.put(param, weight_grad, (flat_x, flat_dy))
            else:
                dw = weight_grad(None)
        if need_bias:
            if (store := store_for(bias)) is not None:
                store.put(bias, lambda _: flat_dy.sum(0), (flat_dy,))
            else:
                db = flat_dy.sum(0)
        return dx, dw, db, None, None, None, None
