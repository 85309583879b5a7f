"""Logits that are computed when somebody reads them, and a loss that does not.

    logits = LazyLogits.of(head, x)           in the place of head(x): the shape of it, no memory
    loss   = F.cross_entropy(logits.float().view(-1, V), target)

What models do to logits on the way to the loss (views, chosen rows, casts, scales, soft caps) is written down, not
done, as long as the model's forward runs. `F.cross_entropy` then takes head and loss in one (`linear_cross_entropy`).
Any other function, and any after the forward, gets the numbers: they are computed at once, with all that was derived
from them so far, and from then on these are logits like all others. Gradients are right either way, also where a
function goes past what Python sees of tensors: autograd has the head as a node, and asks it for its gradients. And
where autograd has other nodes between head and loss than those that were written down (a function of the script's own,
hooks on a module, a checkpoint), the loss is computed from the numbers.

What is written down are operators below autograd (`__torch_dispatch__`), so that there are few, and all that is not
known here is handled alike.

Numbers that are computed late need the weights that the forward had. When these have changed, reading is refused;
changes through `param.data` go unseen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import turns
from ..comm.compat import tensor_without_memory, without_torch_function
from ..ops.collective import reduce_from_group
from ..ops.vocab_mark import names
from ..ops.vocab_shard import VocabShard
from ..ops.weight_grad import add_product, store_for
from ..utils.pytree import tree_leaves, tree_map_only
from .linear_cross_entropy import linear_cross_entropy
from .logit_steps import Step

OFF = "enable_fused_cross_entropy=False keeps logits whole"
_aten: Any = torch.ops.aten


class Clock:
    """Counts how often an optimizer has changed the weights of a model."""

    def __init__(self) -> None:
        self.time = 0

    def tick(self, *_: Any) -> None:
        self.time += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return Clock()  # a copy has weights of its own


class Head(Protocol):
    """A linear over the vocabulary.

    weight, bias    [v, H], [v] or None
    shard           the rows of the vocabulary that it holds; None: all
    clock           of its weights
    head(x, then=f) is f(x, weight, bias), called like a module: whoever gathers weights for a call does
    """

    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None
    clock: Clock

    def __call__(self, x: Tensor, *, then: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor: ...


_here = threading.local()


@contextmanager
def loss_wanted(wanted: bool = True) -> Iterator[None]:
    """Around a model's forward that a loss is wanted of: heads may return lazy logits. Of this thread."""
    before = getattr(_here, "wanted", False)
    _here.wanted = wanted
    try:
        yield
    finally:
        _here.wanted = before


def is_loss_wanted() -> bool:
    return bool(getattr(_here, "wanted", False))


class _Source:
    """Where logits come from.

    was_fused   a loss has been computed without them
    is_used     as a tensor of autograd's: somebody waits for its gradient
    """

    def __init__(self, head: Head, x: Tensor) -> None:
        self.head, self.x = head, x
        self._then = self._now()
        self.was_fused = self.is_used = False
        self._derived: list[weakref.ref[_State]] = []

    def _now(self) -> tuple[int, ...]:
        bias = self.head.bias
        versions = self.head.weight._version, self.x._version, 0 if bias is None else bias._version
        return self.head.clock.time, *versions

    def require_fresh(self) -> None:
        if self._now() != self._then:
            raise ValueError(
                "the loss was computed without logits, and the weights that they would be computed from now have "
                f"changed since: read outputs.logits before optimizer.step(), or {OFF}"
            )

    def computed(self) -> Tensor:
        self.require_fresh()
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):  # as it was in the forward
            return self.head(self.x.detach(), then=F.linear)

    def note(self, state: _State) -> None:
        self._derived.append(weakref.ref(state))

    def compute_all(self) -> None:
        """Everything that stands for something: what is done to one in place must not be seen in another."""
        derived, self._derived = self._derived, []
        for reference in derived:
            if (state := reference()) is not None:
                state.value()


class _Op(NamedTuple):
    """`func(logits, *args, **kwargs)`: of the rows, `step` None, or of the numbers."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    step: Step | None


class _State:
    """What a tensor stands for: what the one before does, and an operation on it."""

    def __init__(self, source: _Source, before: _State | None = None, op: _Op | None = None) -> None:
        self.source, self._before, self.op = source, before, op
        self._value: Tensor | None = None
        source.note(self)

    def value(self) -> Tensor:
        """Computed once, so that views share memory."""
        if self._value is None:
            if self._before is None or self.op is None:
                self._value = self.source.computed()
            else:
                self._value = self.op.func(self._before.value(), *self.op.args, **self.op.kwargs)
        assert self._value is not None
        return self._value

    @property
    def is_computed(self) -> bool:
        return self._value is not None or (self._before is not None and self._before.is_computed)

    def ops(self) -> list[_Op]:
        """From the head's output on."""
        return [] if self._before is None or self.op is None else [*self._before.ops(), self.op]


class LazyLogits(Tensor):
    """See the head of this file."""

    _state: _State

    @staticmethod
    def of(head: Head, x: Tensor) -> Tensor:
        """What stands for head(x) [..., v]."""
        logits: Tensor = _Deferred.apply(x, head.weight, head.bias, head.shard, _Source(head, x))
        return logits

    @classmethod
    def _made(cls, state: _State, like: Tensor, device: torch.device) -> LazyLogits:
        made: LazyLogits = tensor_without_memory(LazyLogits, like.shape, like.stride(), like.dtype, device)
        made._state = state
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_use(func, args, kwargs)
        with without_torch_function():
            if func is F.cross_entropy and is_loss_wanted():
                loss = _cross_entropy(*args, **kwargs)
                return func(*args, **kwargs) if loss is None else loss
            name = getattr(func, "__name__", "")
            if name in _OF_MEMORY:
                args, kwargs = tree_map_only(LazyLogits, _numbers_of, (tuple(args), kwargs))
            elif name == "__get__" and getattr(func, "__self__", None) is _TENSOR.data:
                return args[0].detach()
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and is_loss_wanted():
            followed = _follow(first, func, args, kwargs)
            if followed is not None:
                return followed
        if func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, LazyLogits):
                    leaf._state.source.is_used = True  # its numbers are no longer those of the head
        given = tree_map_only(LazyLogits, _numbers_of, (tuple(args), kwargs))
        result = func(*given[0], **given[1])
        return first if func._schema.is_mutable and isinstance(first, LazyLogits) and result is given[0][0] else result


def _numbers_of(logits: LazyLogits) -> Tensor:
    value = logits._state.value()
    logits._state.source.compute_all()
    return value


_TENSOR: Any = Tensor
# What looks at the memory itself.
_OF_MEMORY = names(
    """tolist numpy __array__ __reduce_ex__ __deepcopy__ __dlpack__ data_ptr untyped_storage storage __repr__ __format__
    __str__ share_memory_ pin_memory"""
)
# What scripts call on logits that they will read later, perhaps when the weights are others.
_KEEPING = names("detach clone cpu data")
# What asks for the gradient of a tensor.
_WATCHING = names("register_hook retain_grad requires_grad_ register_post_accumulate_grad_hook")


def check_use(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to watch gradients that there are none of, and compute logits where they are to be watched or kept."""
    name = getattr(func, "__name__", "")
    if name in _KEEPING and isinstance(args[0], LazyLogits) and not is_loss_wanted():
        _numbers_of(args[0])
    if name not in _WATCHING and func is not torch.autograd.grad:
        return
    if any(getattr(hook, "of_layout", False) for hook in args[1:]):  # which does not change gradients
        return
    asked = args[:1] if name in _WATCHING else (kwargs.get("inputs", args[1] if len(args) > 1 else ()),)
    for leaf in tree_leaves(asked):
        if isinstance(leaf, LazyLogits):
            source = leaf._state.source
            if source.was_fused:
                raise ValueError(
                    f"{name}() of logits whose loss was computed without them, so that it has no gradient for them: "
                    f"{OFF}, and gives them one"
                )
            source.is_used = True


# Operators, by what they do to the rows [...] of logits [..., v]: arguments after the logits -> whether v stays as it
# is.


def _same(logits: Tensor, *_: Any) -> bool:
    return True


def _other_dim(logits: Tensor, dim: int = 0, *_: Any) -> bool:
    return dim % logits.ndim != logits.ndim - 1


def _by_index(logits: Tensor, indices: Sequence[Tensor | None]) -> bool:
    taken = 0
    for index in indices:
        taken += index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
    return taken < logits.ndim and not any(isinstance(index, LazyLogits) for index in indices)


def _keeps_last(logits: Tensor, dims: Sequence[int]) -> bool:
    return dims[-1] % logits.ndim == logits.ndim - 1


_ROWS: dict[Any, Callable[..., bool]] = {
    _aten.view.default: _same,
    _aten._unsafe_view.default: _same,
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.slice.Tensor: _other_dim,
    _aten.select.int: _other_dim,
    _aten.unsqueeze.default: lambda logits, dim: dim % (logits.ndim + 1) != logits.ndim,
    _aten.squeeze.dim: _other_dim,
    _aten.index.Tensor: _by_index,
    _aten.permute.default: _keeps_last,
    _aten.transpose.int: lambda logits, one, other: _other_dim(logits, one) and _other_dim(logits, other),
}
_STEPS: dict[Any, Any] = {
    _aten.mul.Tensor: "multiply",
    _aten.mul.Scalar: "multiply",
    _aten.div.Tensor: "divide",
    _aten.div.Scalar: "divide",
    _aten.tanh.default: "tanh",
}
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _follow(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyLogits | None:
    """What stands for `func(logits, ...)`; None where it is not known, or the numbers are there already."""
    if logits._state.is_computed:
        return None
    others, step = tree_map_only(Tensor, torch.clone, tuple(args[1:])), None  # who gave an index may change it
    if func in _ROWS:
        if not _ROWS[func](logits, *others) or kwargs.get("memory_format") not in (
            None,
            torch.contiguous_format,
            torch.preserve_format,
        ):
            return None
    elif func in _STEPS:
        if len(others) != (_STEPS[func] != "tanh") or kwargs or not all(type(one) in (int, float) for one in others):
            return None
        step = Step(_STEPS[func], *others)
    elif func is _aten._to_copy.default:
        if not _is_cast(logits, kwargs):
            return None
        step = Step("cast", kwargs["dtype"])
    else:
        return None
    plan = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    like = func(plan, *_on_meta(others), **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    if not like.ndim or like.shape[-1] != logits.shape[-1] or not like.dtype.is_floating_point:
        return None
    return LazyLogits._made(
        _State(logits._state.source, logits._state, _Op(func, others, kwargs, step)), like, logits.device
    )


def _is_cast(logits: Tensor, kwargs: Mapping[str, Any]) -> bool:
    known = {"dtype", "device", "layout", "pin_memory", "non_blocking", "memory_format"}
    return (
        kwargs.get("dtype") is not None
        and set(kwargs) <= known
        and kwargs.get("device") in (None, logits.device)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def _on_meta(others: Any) -> Any:
    """Arguments for a run without data. How many rows a mask selects is read from it, as torch does."""

    def move(index: Tensor) -> Tensor:
        if index.dtype in (torch.bool, torch.uint8):
            return index  # replaced below
        return index.to("meta")

    if others and isinstance(others[0], list | tuple) and any(isinstance(one, Tensor) for one in others[0]):
        indices: list[Tensor | None] = []
        for index in others[0]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                indices += [place.to("meta") for place in index.nonzero(as_tuple=True)]
            else:
                indices.append(None if index is None else move(index))
        return (indices, *others[1:])
    return others


class _Deferred(torch.autograd.Function):
    """x [..., H] -> what stands for x W^T + b; the gradient is that of the numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard | None, source: _Source
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shard, ctx.param = shard, source.head.weight
        width = weight.shape[0]
        like = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device="meta")
        return LazyLogits._made(_State(source), like, x.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        if isinstance(dy, LazyLogits):
            dy = _numbers_of(dy)
        flat_dy, flat_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = None
        if need_x:
            dx = flat_dy.mm(weight).view(x.shape)
            if ctx.shard is not None and ctx.shard.group.size() > 1:
                dx = _summed(dx, ctx.shard)
        if need_weight:
            store = None if torch.is_grad_enabled() else store_for(ctx.param)
            if store is None:
                dw = flat_dy.t().mm(flat_x)
            else:
                store.put(ctx.param, lambda into: add_product(flat_dy.t(), flat_x, into), (flat_x, flat_dy))
        return dx, dw, flat_dy.sum(0) if need_bias else None, None, None


def _summed(dx: Tensor, shard: VocabShard) -> Tensor:
    if torch.is_grad_enabled():
        return reduce_from_group(dx, shard.group)
    dx = dx.contiguous()
    turns.run(torch.distributed.all_reduce, dx, group=shard.group)
    return dx


# Of autograd, for operators that are followed.
_NODES = names(
    """ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 AliasBackward0 CloneBackward0 SliceBackward0
    SelectBackward0 UnsqueezeBackward0 SqueezeBackward1 IndexBackward0 PermuteBackward0 TransposeBackward0 TBackward0
    MulBackward0 DivBackward0 TanhBackward0 ToCopyBackward0"""
)


def _is_followed(logits: Tensor) -> bool:
    """Whether autograd has nothing between the head and `logits` but what is written down."""
    node: Any = logits.grad_fn
    while node is not None and node.name() in _NODES:
        node = node.next_functions[0][0]
    return node is None if not logits.requires_grad else getattr(node, "_forward_cls", None) is _Deferred


def fused_loss(
    logits: LazyLogits,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The cross entropy of logits [N, v] and target [N], at least fp32, without them; None where they must be there."""
    source = logits._state.source
    if logits._state.is_computed or source.is_used or logits.ndim != 2 or not _is_followed(logits):
        return None
    if torch.is_autocast_enabled(logits.device.type):  # which the head was not under
        return None
    source.require_fresh()
    head, x = source.head, source.x
    steps = []
    differentiable = logits.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(differentiable):
        for op in logits._state.ops():
            if op.step is not None:
                steps.append(op.step)
            elif op.func in _VIEWS:
                x = x.reshape(*op.args[0][:-1], x.shape[-1])
            elif op.func is not _aten.detach.default:
                x = op.func(x, *op.args, **op.kwargs)

        def loss_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy(
                x,
                weight,
                target,
                bias,
                shard=head.shard,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                steps=tuple(steps),
            )

        loss = head(x, then=loss_of)
    source.was_fused = True
    return loss


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """With the signature of torch; None: torch computes it."""
    if (
        not isinstance(input, LazyLogits)
        or isinstance(target, LazyLogits)
        or weight is not None
        or size_average is not None
        or reduce is not None
        or target.is_floating_point()
        or target.ndim != 1
        or target.shape != input.shape[:1]
    ):
        return None
    loss = fused_loss(input, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    return None if loss is None else loss.to(input.dtype)
