"""Gradients of a sharded model in a plain training loop: summed as backward runs, and seen whole by what looks at all
of them.

A rank's `param.grad` is that of its shard. Optimizers that work element by element need no more, but
`torch.nn.utils.clip_grad_norm_` would scale every rank by a norm of its own, and `torch.amp.GradScaler` would skip a
step on some ranks only. So gradients are of a class of their own: a norm of one is that of the whole parameter, a norm
over many is reduced once, and what is not finite on one rank is not finite on all. Every other operation acts on the
shard, as on the parameter itself.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.compat import without_torch_function
from ..ops.shared_grads import sum_in_backward
from ..ops.weight_grad import takes_none
from ..optim.kind import is_elementwise
from ..precision.grad_norm import power_sum, total_norm
from ..spec import ParamSpec, get_spec, set_spec
from .layer.parallel_module import ParallelModule

_NOTE = "_shardwright_gradient_of"
# Of a square matrix these have the same shape.
_REORDER = frozenset(["t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "adjoint", "rot90"])


class _Step:
    """Whether an optimizer steps: what it makes of gradients is its state, and no gradient."""

    runs = False


_step = _Step()


def follow_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every backward through a sharded model, or through a copy of a part of it, leave the whole model's
    gradients, as far as this rank holds them.
    """
    if group.size() == 1:
        return
    for name, param in model.named_parameters():
        _follow(param, name, group)
    _followed.add(model)
    _watch_optimizers()


def _follow(param: nn.Parameter, name: str, group: dist.ProcessGroup) -> None:
    sum_in_backward([param], group)
    if hasattr(param, _NOTE):
        return
    whole = _Whole.of(get_spec(param) or ParamSpec(name, tuple(param.shape)), group)
    setattr(param, _NOTE, whole)
    trained = param.requires_grad
    # torch takes hooks only while it does
    param.requires_grad_(True).register_post_accumulate_grad_hook(whole.mark)
    param.requires_grad_(trained)
    param.__deepcopy__ = functools.partial(_copied, weakref.ref(param))  # type: ignore[method-assign]


def _copied(reference: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a parameter is sharded as it is, and followed; torch copies its numbers alone."""
    param = reference()
    assert param is not None
    copied = type(param).__deepcopy__(param, memo)
    spec, note = get_spec(param), getattr(param, _NOTE)
    if spec is not None and get_spec(copied) is None:
        set_spec(copied, spec)
    _follow(copied, note.name, note.group)
    return copied  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Whole:
    """What a rank's gradient is of.

    dim, runs   (offset, length) of what this rank counts in norms along `dim`; None: all of it, and () nothing
    """

    group: dist.ProcessGroup
    name: str
    is_sharded: bool
    dim: int
    runs: tuple[tuple[int, int], ...] | None

    @classmethod
    def of(cls, spec: ParamSpec, group: dist.ProcessGroup) -> _Whole:
        rank = group.rank()
        runs: tuple[tuple[int, int], ...] | None = None if rank == 0 else ()
        if spec.is_sharded:
            # Gradients of padding are zero, so only what another rank counts must be left out.
            runs = tuple(spec.owned(rank)) if spec.shared_runs else None
        return cls(group, spec.name, spec.is_sharded, spec.dim or 0, runs)

    @takes_none
    def mark(self, param: Tensor) -> None:
        _step.runs = False  # also after a step that failed
        grad = param.grad
        if type(grad) is Tensor:
            grad.__class__ = ShardedGradient
            setattr(grad, _NOTE, self)

    def counted(self, grad: Tensor) -> list[Tensor]:
        grad = grad.detach()
        return [grad] if self.runs is None else [grad.narrow(self.dim, offset, length) for offset, length in self.runs]


class ShardedGradient(Tensor):
    """`param.grad` of a model that `ShardFormer` has sharded."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with without_torch_function():
            if name in ("linalg_vector_norm", "norm", "linalg_norm"):
                partial = _norm(*args, **kwargs)
                if partial is not None:
                    return partial if name == "linalg_vector_norm" else partial.complete()
            elif name == "_foreach_norm":
                return _norms(*args, **kwargs)
            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                note: _Whole = next(getattr(grad, _NOTE) for grad in args[0] if hasattr(grad, _NOTE))
                dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=note.group)
            elif name == "detach" or getattr(func, "__self__", None) is Tensor.data:
                return _as_gradient(result, args[0])
            elif type(result) is Tensor and not _step.runs and name not in _REORDER and name != "__get__":
                return _noted(result, args)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class PartialNorm(Tensor):
    """This rank's part of norms of order `order`: norms over many gradients are put together before one reduction over
    the ranks.

    It is what torch makes clip_grad_norm_ of. Whatever else is done with it, it is reduced first.
    """

    group: dist.ProcessGroup
    order: float
    dtype_of_result: torch.dtype

    @classmethod
    def make(cls, values: Tensor, like: PartialNorm | None = None, **facts: Any) -> PartialNorm:
        norm = values.as_subclass(PartialNorm)
        norm.__dict__.update(facts if like is None else like.__dict__)
        return norm

    def complete(self) -> Tensor:
        """The norms of the whole gradients, elementwise; collective."""
        with without_torch_function():
            values = self.as_subclass(Tensor)
            infinite = math.isinf(self.order)
            powers = values if infinite else values.pow(self.order)
            return total_norm(powers, self.group, self.order).to(self.dtype_of_result)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with without_torch_function():
            if name == "to":
                return cls.make(func(*args, **kwargs), args[0])
            if name == "stack" and not kwargs:
                return _stacked(*args)
            if name == "linalg_vector_norm" and len(args) <= 2 and not kwargs and _order(*args[1:]) == args[0].order:
                return cls.make(
                    torch.linalg.vector_norm(args[0].as_subclass(Tensor), args[0].order), args[0]
                ).complete()
            completed = [_completed(arg) for arg in args]
            return func(*completed, **{key: _completed(value) for key, value in kwargs.items()})


def _completed(value: Any) -> Any:
    if isinstance(value, PartialNorm):
        return value.complete()
    return [_completed(item) for item in value] if isinstance(value, list | tuple) else value


def _as_gradient(result: Tensor, grad: Any) -> Tensor:
    result = result.as_subclass(ShardedGradient)
    setattr(result, _NOTE, getattr(grad, _NOTE))
    return result


def _noted(result: Tensor, args: Sequence[Any]) -> Tensor:
    """What a script computes from a gradient, in its shape (`grad / 2`, `grad.clone()`), may become one, and is
    followed like it.
    """
    if result.is_floating_point() and not any(result is arg for arg in args):  # not what was written to in place
        for arg in args:
            if isinstance(arg, ShardedGradient) and arg.shape == result.shape and hasattr(arg, _NOTE):
                return _as_gradient(result, arg)
    return result


def _order(order: Any = 2) -> float:
    return 2.0 if order in (None, "fro") else float(order)


def _norm(
    grad: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, **other: Any
) -> PartialNorm | None:
    """None for norms that are not of the whole tensor."""
    order = _order(other.pop("p", other.pop("ord", order)))
    if dim is not None or keepdim or other or not hasattr(grad, _NOTE):
        return None
    note: _Whole = getattr(grad, _NOTE)
    if order <= 0:
        raise ValueError(
            f"norm of order {order} of the gradient of {note.name}, of which this rank holds a part; use "
            "a positive order"
        )
    local = power_sum(note.counted(grad), grad.device, order)
    values = local if math.isinf(order) else local.pow(1.0 / order)
    return PartialNorm.make(values, group=note.group, order=order, dtype_of_result=dtype or grad.dtype)


def _norms(grads: Iterable[Any], order: Any = 2, dtype: torch.dtype | None = None, **other: Any) -> list[Tensor]:
    order = other.pop("ord", order)
    return [
        partial if (partial := _norm(grad, order, dtype=dtype)) is not None else torch.linalg.vector_norm(grad, order)
        for grad in grads
    ]


def _stacked(norms: Sequence[Any], dim: int = 0) -> Tensor:
    first = next(norm for norm in norms if isinstance(norm, PartialNorm))
    if any(isinstance(norm, PartialNorm) and norm.order != first.order for norm in norms):
        return torch.stack([_completed(norm) for norm in norms], dim)
    # Norms of tensors outside of the model are the same on every rank, and count once.
    once = float(first.group.rank() == 0)
    parts = [
        norm.as_subclass(Tensor) if isinstance(norm, PartialNorm) else norm.to(first.dtype) * once for norm in norms
    ]
    return PartialNorm.make(torch.stack(parts, dim), first)


# What each optimizer held when it was looked at: the number of parameters of every group, and those that are noted.
_known: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[Tensor]]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []
_followed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _watch_optimizers() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))
        _watching.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    known = _known.get(optimizer)
    if known is None or known[0] != sizes:
        noted = [param for group in optimizer.param_groups for param in group["params"] if hasattr(param, _NOTE)]
        _check_optimizer(optimizer, noted)
        _refuse_late_parameters(optimizer)
        known = _known[optimizer] = (sizes, noted)
    for param in known[1]:
        grad = param.grad
        if type(grad) is Tensor and grad._version:
            _refuse_replaced(param)
    _step.runs = True


def _after_step(*_: Any) -> None:
    _step.runs = False


def _check_optimizer(optimizer: Optimizer, noted: Iterable[Tensor]) -> None:
    sharded = next((note for note in (getattr(param, _NOTE) for param in noted) if note.is_sharded), None)
    if sharded is not None and not is_elementwise(optimizer):
        name = type(optimizer).__name__
        elsewhere = (
            ""
            if isinstance(optimizer, torch.optim.LBFGS)
            else f"; {name} trains under LowLevelZeroPlugin, which gives it whole parameters"
        )
        raise ValueError(
            f"{name} looks at whole parameters, but this rank holds a part of {sharded.name}: its updates would not be "
            f"those of the whole model. Use an element-wise optimizer such as AdamW or SGD{elsewhere}; if it does work "
            f"element by element, say so with {name}.elementwise = True"
        )


def _refuse_late_parameters(optimizer: Optimizer) -> None:
    """What was put into sharded layers after sharding sees a part of their features, so its gradient is a part."""
    late = {param for group in optimizer.param_groups for param in group["params"] if not hasattr(param, _NOTE)}
    for model in list(_followed) if late else []:
        for path, module in model.named_modules():
            base = getattr(module, "base_layer", None)
            if not path or not (isinstance(module, ParallelModule) or isinstance(base, ParallelModule)):
                continue
            for name, param in module.named_parameters():
                if param in late:
                    raise ValueError(
                        f"{path}.{name} was added to a layer after it was sharded: every rank would train it on its "
                        "own part of the features. Add adapters first (peft.get_peft_model(model, ...)), then give the "
                        "model to ShardFormer or to Booster.boost"
                    )


def _refuse_replaced(param: Tensor) -> NoReturn:
    """A gradient that backward did not leave and that was written to: if it was clipped or unscaled, then by this
    rank's part alone.
    """
    note: _Whole = getattr(param, _NOTE)
    raise ValueError(
        f"the gradient of {note.name} was replaced by a plain tensor and then changed in place, as clip_grad_norm_ and "
        "GradScaler do: they saw this rank's part alone, and ranks would go apart. Let backward() make gradients "
        "(loss.backward(inputs=[...]) instead of torch.autograd.grad), write into them (param.grad.copy_(...)), or "
        "compute new ones from them (param.grad / 2); with DistributedDataParallel use gradient_as_bucket_view=False"
    )
