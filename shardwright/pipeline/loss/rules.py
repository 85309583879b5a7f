"""What functions of torch make of facts (`facts`): one rule per kind of function, by its name.

A rule is `rule(call) -> Fact | list of Facts`, with the result of the call in `call.result`, which a few rules compute
themselves. Functions without a rule make UNKNOWN of everything that comes from the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from .facts import CONST, SUM, Axis, Fact, Kind, Number, Recipe, first_unknown, names, number, unknown, whole_beside

HALVES = (
    "{name} picks particular samples of the batch (halves, pairs, one of them), which are others in every microbatch. "
    "Give the rows that belong together as one sample, [samples, 2, ...]"
)
TOGETHER = "{name} brings samples of the batch together, so no microbatch can compute it alone"


class Watch(Protocol):
    """What rules ask of the watcher."""

    def fact(self, tensor: torch.Tensor) -> Fact: ...
    def rows(self, axis: Axis) -> torch.Tensor:
        """Rows of the whole batch, 0-d."""

    def total(self, count: Callable[[Any], Any], local: torch.Tensor) -> torch.Tensor:
        """Sum of count(entries) over all microbatches, in the shape and dtype of `local`, this microbatch's."""

    @property
    def trusting(self) -> bool: ...

    @property
    def samples(self) -> int: ...

    @property
    def entries(self) -> Mapping[Any, Any]: ...

    def kept(self, constant: torch.Tensor) -> torch.Tensor:
        """A constant as recipes keep it."""


class Call:
    """One call of a torch function: its arguments, and the facts about the tensors among them, in order."""

    def __init__(
        self,
        watch: Watch,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_place: bool = False,
    ) -> None:
        self.watch, self.func, self.name, self.args, self.kwargs, self.in_place = (
            watch,
            func,
            name,
            args,
            kwargs,
            in_place,
        )
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Number] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, list | tuple | Number):
                self._collect(value)
        self.facts = [watch.fact(tensor) for tensor in self.tensors]
        self._result: Any = None
        self._called = False

    def _collect(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, list | tuple):
            for one in value:
                self._collect(one)
        elif isinstance(value, Number):
            self.numbers.append(value)

    @property
    def result(self) -> Any:
        if not self._called:
            self.result = self.func(*self.args, **self.kwargs)
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        self._result, self._called = value, True

    @property
    def is_constant(self) -> bool:
        return all(fact.kind is Kind.CONST for fact in self.facts)

    @property
    def first(self) -> torch.Tensor:
        return self.tensors[0]

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default


Rule = Callable[[Call], "Fact | list[Fact]"]


def recomputed(name: str) -> Fact | None:
    """What replaces a value of the microbatch by one of the whole batch is not there when a checkpointed function
    runs again.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return unknown(
                f"{name} needs a count of the whole batch inside torch.utils.checkpoint, whose second run would take "
                "that of the "
                'microbatch; let the checkpointed function return sums (reduction="sum" or "none") and divide outside'
            )
        frame = frame.f_back
    return None


# Elementwise
# -----------------------------------------------------------------------------------------------------------

_ELEMENTWISE = names(
    """to float double half bfloat16 int long bool type type_as cpu cuda detach contiguous alias requires_grad_ dropout
    log_sigmoid logsigmoid relu6 selu celu softsign tanhshrink hardsigmoid hardswish threshold prelu rrelu and or xor
    invert truediv floordiv floor_divide isin masked_fill where maximum minimum zeros_like ones_like full_like
    empty_like rand_like randn_like bernoulli fill zero copy nan_to_num square xlogy special_xlogy not_equal greater
    less greater_equal less_equal pos positive rdiv rsub rpow rfloordiv mod rmod multiply divide subtract"""
)
_LIKE = names("""zeros_like ones_like full_like""")
_LINEAR = names(
    """to float double half bfloat16 type type_as cpu cuda detach clone contiguous alias neg pos positive requires_grad_
    squeeze unsqueeze view reshape flatten sum mean stack cat concat transpose permute expand select getitem unbind
    split chunk"""
)


@cache
def is_elementwise(name: str) -> bool:
    """Whether every element of the result depends on the elements in its place alone."""
    if name in _ELEMENTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def elementwise(call: Call) -> Fact:
    kinds = {fact.kind for fact in call.facts}
    if blame := first_unknown(call.facts):
        return blame
    if Kind.ROWS in kinds or Kind.SUM in kinds:
        lost = next((number for number in call.numbers if number.whole is None), None)
        if lost is not None:
            return unknown(lost.why, coupled=True)
        if Kind.WHOLE in kinds or call.numbers:
            if again := recomputed(call.name):
                return again
            _take_whole(call)
    if Kind.SUM in kinds:
        return _linear(call)
    if Kind.ROWS in kinds:
        fact = _aligned(call)
        return _filled(call, fact) if call.name in _LIKE and fact.kind is Kind.ROWS else fact
    return _follows_from_wholes(call)


def _filled(call: Call, fact: Fact) -> Fact:
    """ones_like, zeros_like, full_like: of rows that can be counted ahead, whatever they hold."""
    if fact.dim is None or fact.axis is None:
        return fact
    sizes = [number(size, axis=fact.axis) if dim == fact.dim else size for dim, size in enumerate(call.result.shape)]
    if call.name == "full_like":
        if not isinstance(call.argument(1, "fill_value"), int | float) or call.numbers:
            return fact
        value = call.argument(1, "fill_value")
    else:
        value = float(call.name == "ones_like")
    return fact._replace(
        recipe=Recipe(None, torch.full, (sizes, value), {"dtype": call.result.dtype, "device": call.result.device})
    )


def _take_whole(call: Call) -> None:
    """Put the whole batch's value in the place of this microbatch's."""
    dtype = call.first.dtype

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fact = call.watch.fact(value)
            return fact.whole() if fact.whole is not None else value
        return whole_beside(value, dtype)

    call.args = tuple(put(value) for value in call.args)
    call.kwargs = {name: put(value) for name, value in call.kwargs.items()}


def _follows_from_wholes(call: Call) -> Fact:
    if not call.numbers and all(fact.kind is Kind.CONST for fact in call.facts):
        return CONST
    lost = next((number for number in call.numbers if number.whole is None), None)
    if lost is not None:
        return unknown(lost.why)
    args, kwargs, func = call.args, call.kwargs, torch.as_tensor if call.name == "tensor" else call.func
    dtype = call.first.dtype if call.tensors else torch.get_default_dtype()
    known = {
        id(tensor): fact.whole for tensor, fact in zip(call.tensors, call.facts, strict=True) if fact.whole is not None
    }

    def put(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(put(one) for one in value)
        found = known.get(id(value))
        return found() if found is not None else whole_beside(value, dtype)

    return Fact(
        Kind.WHOLE,
        whole=cache(
            lambda: func(*(put(value) for value in args), **{name: put(value) for name, value in kwargs.items()})
        ),
    )


def _linear(call: Call) -> Fact:
    """SUM stays SUM under linear functions alone."""
    name, sums = call.name, [fact.kind is Kind.SUM for fact in call.facts]
    others = [fact.kind for fact, is_sum in zip(call.facts, sums, strict=True) if not is_sum]
    if Kind.ROWS in others:
        return unknown(
            f"{name} mixes a sum over the samples of the microbatch with values of single samples", coupled=True
        )
    if name in _LIKE:
        return CONST
    if name in ("add", "sub", "radd", "rsub"):
        if not others and not any(isinstance(value, int | float) and value != 0 for value in call.args[:2]):
            return SUM
        if any(fact.kind not in (Kind.SUM, Kind.WHOLE) and fact is not CONST for fact in call.facts):
            return unknown(f"{name} adds a parameter to the loss, of which every microbatch would add the whole")
        if again := recomputed(name):
            return again
        _share(call, sums)
        return SUM
    if name in ("mul", "div", "true_divide", "truediv"):
        is_first = sums[0] and isinstance(call.args[0], torch.Tensor)
        if sum(sums) == 1 and (name == "mul" or is_first):
            return SUM
    elif name in _LINEAR and all(sums):
        return SUM
    return unknown(f"{name} of a sum over samples is not the sum over microbatches of {name}", coupled=True)


def _share(call: Call, sums: Sequence[bool]) -> None:
    """What is added to a sum over samples and is the same for every batch is shared by all samples of the whole
    batch.
    """
    known = [tensor for tensor, is_sum in zip(call.tensors, sums, strict=True) if is_sum]
    part = (call.watch.samples / call.watch.rows(Axis())).to(known[0].device, known[0].dtype)

    def shared(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if any(value is one for one in known) else value * part
        return value * part if isinstance(value, int | float) else value

    first, *rest = call.args
    if call.in_place and isinstance(first, torch.Tensor):
        call.args = (first if sums[0] else first.mul_(part), *map(shared, rest))
    else:
        call.args = (shared(first), *map(shared, rest))
    call.kwargs = {key: value if key == "alpha" else shared(value) for key, value in call.kwargs.items()}


def _aligned(call: Call) -> Fact:
    """All rows must stand in the same place."""
    rows = [(tensor, fact) for tensor, fact in zip(call.tensors, call.facts, strict=True) if fact.kind is Kind.ROWS]
    tensor, fact = rows[0]
    place = from_right(tensor, fact)
    axis = fact.axis
    for other, known in rows[1:]:
        if from_right(other, known) != place:
            return unknown(TOGETHER.format(name=call.name), coupled=True)
        if known.order != fact.order:
            return unknown(f"{call.name} combines rows of the batch that were ordered in different ways", coupled=True)
        axis = axis or known.axis
    if place is not None:
        for other, known in zip(call.tensors, call.facts, strict=True):
            if (
                known.kind is Kind.CONST
                and other.dim() >= -place
                and other.shape[place] != 1
                and not call.watch.trusting
            ):
                return unknown(f"{call.name} gives every place in the batch a value of its own")
    widest = max(one.dim() for one in call.tensors)
    if place is not None and widest + place == fact.dim and axis is fact.axis:
        return fact.without_origin()
    return Fact(Kind.ROWS, None if place is None else widest + place, axis, fact.order)


def from_right(tensor: torch.Tensor, fact: Fact) -> int | None:
    return None if fact.dim is None else fact.dim - tensor.dim()


# Reductions
# ------------------------------------------------------------------------------------------------------------


def _dims(call: Call, place: int = 1) -> tuple[list[int], bool]:
    """Dims that a reduction runs over, and whether they stay with size 1."""
    dim = call.argument(place, "dim", "axis")
    if isinstance(dim, bool):  # `unbiased` of std and var
        dim = None
    keepdim = bool(call.argument(place + 1, "keepdim", "keepdims", default=False))
    ndim = call.first.dim()
    if dim is None or isinstance(dim, torch.dtype) or (isinstance(dim, tuple | list) and not dim):
        return list(range(ndim)), keepdim
    given = dim if isinstance(dim, tuple | list) else (dim,)
    return [one % max(ndim, 1) for one in given], keepdim


def _left_over(fact: Fact, dims: Sequence[int], keepdim: bool) -> Fact:
    """Rows whose other dims have been reduced."""
    assert fact.dim is not None
    return fact.without_origin()._replace(dim=fact.dim if keepdim else fact.dim - sum(dim < fact.dim for dim in dims))


def _reduces_samples(fact: Fact, dims: Sequence[int], ndim: int) -> bool:
    return fact.dim in dims or (fact.dim is None and len(dims) == ndim)


def reduction(call: Call) -> Fact:
    """Sums and means over samples add up; other reductions work within samples."""
    fact = call.facts[0]
    if blame := first_unknown(call.facts):
        return blame
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    dims, keepdim = _dims(call, 2 if call.name in ("norm", "linalg_norm", "linalg_vector_norm") else 1)
    if not _reduces_samples(fact, dims, call.first.dim()):
        return fact.without_origin() if fact.dim is None else _left_over(fact, dims, keepdim)
    if fact.recipe is not None and call.name in ("sum", "count_nonzero", "mean"):
        return _summed_ahead(call, fact, dims, keepdim)
    if fact.recipe is not None and call.name in ("any", "all") and not keepdim:
        return _truth_ahead(call, fact.recipe, dims)
    if call.name in ("sum", "nansum", "count_nonzero"):
        if (
            call.name != "count_nonzero"
            and call.first.dtype in (torch.float16, torch.bfloat16)
            and call.kwargs.get("dtype") is None
        ):
            call.kwargs = {**call.kwargs, "dtype": torch.float32}
        return SUM
    if call.name != "mean":
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if fact.axis is None:
        return unknown(
            "mean() averages over elements whose number in other microbatches is unknown: they were selected by "
            "something that does not follow from the batch's entries alone"
        )
    if again := recomputed("mean"):
        return again
    dtype = call.kwargs.get("dtype") or (
        torch.float32 if call.first.dtype in (torch.float16, torch.bfloat16) else call.first.dtype
    )
    axis = fact.axis.times(math.prod(call.first.shape[dim] for dim in dims if dim != fact.dim))
    total = call.first.sum(dims, keepdim=keepdim, dtype=dtype) if call.first.dim() else call.first.to(dtype)
    call.result = total / call.watch.rows(axis).to(device=total.device, dtype=total.dtype)
    return SUM


def _summed_ahead(call: Call, fact: Fact, dims: Sequence[int], keepdim: bool) -> Fact:
    """The sum of something that follows from the batch's entries can be known for the whole batch before any
    microbatch runs.
    """
    watch, local, dtype = call.watch, call.result, call.kwargs.get("dtype")
    if call.name == "count_nonzero":
        recipe = Recipe(None, torch.count_nonzero, (fact.recipe, list(dims)))
    else:
        recipe = Recipe(None, torch.sum, (fact.recipe, list(dims)), {"keepdim": keepdim, "dtype": dtype})
    if call.name != "mean":
        return Fact(Kind.WHOLE, whole=cache(lambda: watch.total(recipe.make, local)))
    if fact.axis is None:
        return unknown("mean() over a number of elements that is not known in other microbatches")
    axis = fact.axis.times(math.prod(call.first.shape[dim] for dim in dims if dim != fact.dim))
    return Fact(Kind.WHOLE, whole=cache(lambda: watch.total(recipe.make, local) / watch.rows(axis).to(local.dtype)))


def _truth_ahead(call: Call, recipe: Recipe, dims: Sequence[int]) -> Fact:
    """any and all, of the whole batch: how many elements are set, or not set."""
    watch, local, is_any = call.watch, call.result.long(), call.name == "any"
    counted = Recipe(
        None, torch.count_nonzero, (recipe if is_any else Recipe(None, torch.logical_not, (recipe,)), list(dims))
    )

    def whole() -> torch.Tensor:
        count = watch.total(counted.make, local)
        return count > 0 if is_any else count == 0

    return Fact(Kind.WHOLE, whole=cache(whole))


def extremum(call: Call) -> Fact:
    """max and min: of two tensors, or over a dim."""
    two = (len(call.args) > 1 and isinstance(call.args[1], torch.Tensor)) or isinstance(
        call.kwargs.get("other"), torch.Tensor
    )
    return elementwise(call) if two else reduction(call)


_WITHOUT_DIM = names("log_softmax softmax softmin roll quantile")  # these take all elements for one row, or guess
_DIM_IS_THIRD = names("normalize kthvalue topk quantile roll diff fft_fft fft_ifft fft_rfft fft_irfft")


def within(call: Call) -> Fact:
    """Functions along one dim that keep the shape: softmax, cumsum, sort, topk, normalize."""
    fact = call.facts[0]
    if blame := first_unknown(call.facts):
        return blame
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    default = {"normalize": 1, **dict.fromkeys(_WITHOUT_DIM)}.get(call.name, -1)
    place = 2 if call.name in _DIM_IS_THIRD else 1
    dim = call.argument(place, "dim", "axis", "dims", default=default)
    if isinstance(dim, bool):
        return unknown(f"{call.name} is not followed here")
    if call.name in ("flip", "roll", "fliplr", "flipud"):
        return _moved(call, fact, dim)
    if not isinstance(dim, int) or fact.dim == dim % max(call.first.dim(), 1) or fact.dim is None:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if call.name == "kthvalue" or call.name == "quantile":
        left = _left_over(fact, [dim % call.first.dim()], bool(call.argument(3, "keepdim", default=False)))
        wanted = call.argument(1, "q") if call.name == "quantile" else None
        several = isinstance(wanted, torch.Tensor) and wanted.dim() == 1  # these come in front
        return left._replace(dim=left.dim + 1) if several and left.dim is not None else left
    return fact.without_origin()


def _moved(call: Call, fact: Fact, given: Any) -> Fact:
    """Elements that change places along some dims."""
    if call.name in ("fliplr", "flipud"):
        dims: tuple[Any, ...] = (int(call.name == "fliplr"),)
    else:
        dims = tuple(given) if isinstance(given, tuple | list) else (given,)
        if call.name == "flip" and len(call.args) > 2:
            dims = tuple(call.args[1:])
    within_samples = fact.dim is not None and all(isinstance(dim, int) for dim in dims)
    if not within_samples or fact.dim in [dim % call.first.dim() for dim in dims]:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return fact.without_origin()


def along(call: Call) -> Fact:
    """gather, scatter and the like: along a dim that does not hold the samples, rows meet rows."""
    if blame := first_unknown(call.facts):
        return blame
    if all(fact.kind is Kind.CONST for fact in call.facts):
        return CONST
    rows = [fact for fact in call.facts if fact.kind is Kind.ROWS]
    dim = call.argument(2 if call.name == "take_along_dim" else 1, "dim", "axis")
    if len(rows) == 0 or not isinstance(dim, int):
        return unknown(f"{call.name} is not known to keep samples apart")
    dim %= call.first.dim()
    same = all(fact.dim == rows[0].dim and fact.order == rows[0].order for fact in rows)
    index = call.facts[1] if len(call.facts) > 1 else CONST
    if not same or dim == rows[0].dim or (call.name != "index_select" and call.facts[0].kind is not Kind.ROWS):
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    if call.name == "index_select" and index.kind is not Kind.CONST:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return rows[0].without_origin()


def distinct(call: Call) -> Fact:
    """unique: what there is in this microbatch."""
    return first_unknown(call.facts) or unknown(TOGETHER.format(name=call.name), coupled=True)


def named(rule: Rule, functions: str) -> dict[str, Rule]:
    return dict.fromkeys(functions.split(), rule)


RULES: dict[str, Rule] = {
    **named(
        reduction,
        "sum mean nansum nanmean amax amin argmax argmin logsumexp special_logsumexp prod any all std var median ",
    ),
    **named(reduction, "nanmedian count_nonzero aminmax mode std_mean var_mean norm linalg_norm linalg_vector_norm"),
    **named(extremum, "max min"),
    **named(
        within,
        "softmax log_softmax softmin special_softmax special_log_softmax cumsum cumprod logcumsumexp sort "
        "argsort topk flip fliplr flipud",
    ),
    **named(within, "normalize kthvalue quantile diff cummax cummin roll fft_fft fft_ifft fft_rfft fft_irfft"),
    **named(distinct, "unique unique_consecutive"),
    **named(along, "scatter scatter_add scatter_reduce take_along_dim index_select index_fill index_add"),
}
