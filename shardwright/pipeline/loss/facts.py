"""What is known about the values between a model's last layer and its loss: how each of them, taken for one microbatch,
belongs to the value that one process would compute for the whole batch.

    CONST     the same in every microbatch and in the whole batch (parameters, class weights, numbers)
    ROWS      the whole batch's value is those of the microbatches laid end to end along `dim`
    SUM       the whole batch's value is the sum of those of the microbatches: what a loss must be
    WHOLE     follows from the batch's entries by sums, so `whole()` can compute the whole batch's value ahead (a count
              of tokens)
    UNKNOWN   none of these; `why` says which step is to blame

`rules` knows how functions turn facts into facts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ...utils import pytree


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAMPLES = "<samples>"  # entry that holds the number of samples of a microbatch


@dataclass(frozen=True)
class Recipe:
    """How a tensor was made from the entries of the microbatch: an entry itself, or a function of recipes and
    constants.

    Of what is ROWS it makes those of the whole batch from the whole batch's entries.
    """

    key: Any = None
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    output: int = 0  # which tensor of the function's result
    in_place: bool = False  # the result is the changed first argument

    def make(self, entries: Mapping[Any, Any]) -> torch.Tensor:
        """The tensor for other entries."""
        if self.function is None:
            return entries[self.key]
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs or {})))
        args, kwargs = pytree.tree_unflatten([_made(leaf, entries) for leaf in leaves], spec)
        if self.in_place:
            target = args[0].clone()
            self.function(target, *args[1:], **kwargs)
            return target
        return [leaf for leaf in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)][
            self.output
        ]


def _made(leaf: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(leaf, Recipe):
        return leaf.make(entries)
    return leaf.axis.rows(entries) if isinstance(leaf, Count) and leaf.axis is not None else leaf


@dataclass(frozen=True)
class Axis:
    """Where the size of a ROWS dim comes from: `factor` rows per sample, or per element that the mask `base`
    selects.
    """

    base: Recipe | None = None
    factor: Fraction = Fraction(1)

    def rows(self, entries: Mapping[Any, Any]) -> Any:
        """Rows for these entries: an int, or a 0-d tensor where they are counted."""
        if self.base is None:
            rows = entries[SAMPLES] * self.factor
            assert rows.denominator == 1, f"{entries[SAMPLES]} samples are not a multiple of {self.factor.denominator}"
            return int(rows)
        count = self.base.make(entries).count_nonzero()
        return count if self.factor == 1 else count * self.factor.numerator / self.factor.denominator

    def times(self, factor: Fraction | int) -> Axis:
        return replace(self, factor=self.factor * factor)


class Kind(Enum):
    CONST = "const"
    ROWS = "rows"
    SUM = "sum"
    WHOLE = "whole"
    UNKNOWN = "unknown"


class Fact(NamedTuple):
    """See the head of this file.

    dim      of ROWS: which dim holds the samples; None when it had size 1 and was squeezed away
    axis     of ROWS: how many rows the dim has in any microbatch; None when that is not known
    order    of ROWS: () when rows follow the samples, else how they have been mixed; rows of different orders must not
             meet
    recipe   how to make the value in other microbatches, where it follows from the entries
    whole    of WHOLE: the value for the whole batch
    why      of UNKNOWN
    coupled  of UNKNOWN: samples are known to meet, so not even a model's forward makes rows of it
    samples  of ROWS: the tensor is `arange(rows)` of an axis without a mask
    mask     of ROWS: (fact of a mask, i): the tensor holds the indices along dim i of what the mask selects; i is None:
             along all dims, one column each
    """

    kind: Kind
    dim: int | None = None
    axis: Axis | None = None
    order: Hashable = ()
    recipe: Recipe | None = None
    whole: Callable[[], Any] | None = None
    why: str = ""
    coupled: bool = False
    samples: bool = False
    mask: tuple[Fact, int | None] | None = None

    def without_origin(self) -> Fact:
        """The same rows, of other values."""
        if self.recipe is None and self.mask is None and not self.samples:
            return self
        return self._replace(recipe=None, samples=False, mask=None)


ANY_RECIPE = Recipe()  # stands for what has been recorded before
CONST = Fact(Kind.CONST)
LOOSE = Fact(Kind.CONST, why="a parameter, or made of what nobody followed")  # CONST, but never part of a recipe
SUM = Fact(Kind.SUM)


def unknown(why: str, *, coupled: bool = False) -> Fact:
    return Fact(Kind.UNKNOWN, why=why, coupled=coupled)


def first_unknown(facts: list[Fact]) -> Fact | None:
    """The fact that makes a result of all these unknown, couplings first."""
    found = [fact for fact in facts if fact.kind is Kind.UNKNOWN]
    return next((fact for fact in found if fact.coupled), found[0] if found else None)


class Number:
    """A Python number read from a tensor: of this microbatch where it is used as a size, of the whole batch where it
    scales a loss.

    whole    its value for the whole batch; None when that is not known, and `why` says why not
    axis     of sizes: see `Axis`
    rows     of sizes: counts an axis in the whole batch, where microbatches may have other factors (lengths) than this
             one
    """

    rows: Callable[[Axis], Any] | None = None
    whole: Callable[[], Any] | None = None
    why: str = ""
    axis: Axis | None = None
    decides: Callable[[], None] | None = None  # called when an order of numbers that nobody can know decides something

    def __eq__(self, other: Any) -> Any:
        """Whether there is none at all is asked of the whole batch; sizes are compared as they are."""
        if type(other) is int and not other and self.whole is not None:
            return _compare(operator.eq, self, other)
        return _plain(self) == (_plain(other) if isinstance(other, Number) else other)

    def __ne__(self, other: Any) -> Any:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __lt__(self, other: Any) -> Any:
        return _compare(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _compare(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compare(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compare(operator.ge, self, other)

    def __add__(self, other: Any) -> Any:
        return _combine(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _combine(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _combine(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _combine(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _combine(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _combine(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _combine(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _combine(operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _combine(operator.floordiv, self, other)

    def __pow__(self, other: Any) -> Any:
        return _combine(operator.pow, self, other)

    def __neg__(self) -> Any:
        return _combine(operator.mul, self, -1)


class Count(Number, int):  # type: ignore[misc]  # its operators return more
    __hash__ = int.__hash__

    def __reduce__(self) -> Any:
        return int, (_plain(self),)


class Measure(Number, float):  # type: ignore[misc]
    __hash__ = float.__hash__

    def __reduce__(self) -> Any:
        return float, (_plain(self),)


def number(
    value: Any,
    whole: Callable[[], Any] | None = None,
    why: str = "",
    axis: Axis | None = None,
    decides: Callable[[], None] | None = None,
    rows: Callable[[Axis], Any] | None = None,
) -> Any:
    """`value` as a tracked number; truth values and others stay what they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    made = Count(value) if isinstance(value, int) else Measure(value)
    made.whole, made.why, made.axis, made.decides, made.rows = whole, why, axis, decides, rows
    return made


def whole_of(value: Any) -> Any:
    return value.whole() if isinstance(value, Number) and value.whole is not None else value


def whole_beside(value: Any, dtype: torch.dtype) -> Any:
    """The whole batch's value of a number that stands beside tensors of `dtype`, which Python numbers do not
    promote.
    """
    whole = whole_of(value)
    if not isinstance(whole, torch.Tensor) or not isinstance(value, Number):
        return whole
    if isinstance(value, int):
        return whole.round().to(torch.int64)
    if not dtype.is_floating_point:
        return whole.to(torch.get_default_dtype())
    return whole.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)


def _compare(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """An order decides what is done: as it is in the whole batch (`max(count, 1)`), so that all microbatches do the
    same.
    """
    if not isinstance(right, int | float):
        return NotImplemented
    if left.decides is not None and left.whole is None:
        left.decides()
    if left.decides is not None and left.whole is not None:
        one, other = left.whole(), whole_of(right)  # asked by all ranks, or by none
        # the whole batch has at least as many: nothing to wait for
        sure = left.axis is not None and _plain(left) > _plain(right)
        if not sure and not any(isinstance(value, torch.Tensor) and value.is_meta for value in (one, other)):
            return bool(function(one, other))
    return function(_plain(left), _plain(right))


def _combine(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return NotImplemented
    parts = [part for part in (left, right) if isinstance(part, Number)]
    axis = _axis_of(function, left, right)
    rows = parts[0].rows
    # samples x length: as many as all microbatches have
    if function is operator.mul and axis is not None and rows is not None:
        return number(
            function(_plain(left), _plain(right)),
            cache(partial(rows, axis)),
            axis=axis,
            decides=parts[0].decides,
            rows=rows,
        )
    why = next((part.why for part in parts if part.whole is None), None)
    return number(
        function(_plain(left), _plain(right)),
        (lambda: function(whole_of(left), whole_of(right))) if why is None else None,
        why or "",
        axis,
        next((part.decides for part in parts if part.decides is not None), None),
    )


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) else float(value)


def _axis_of(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Axis | None:
    """Of multiples and whole fractions of a size."""
    size, other = (left, right) if isinstance(left, Number) else (right, left)
    if size.axis is None or isinstance(other, Number) or not isinstance(other, int) or not other:
        return None
    if function is operator.mul:
        return size.axis.times(other)
    if function is operator.floordiv and size is left and int(size) % other == 0:
        return size.axis.times(Fraction(1, other))
    return None
