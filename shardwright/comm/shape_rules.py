"""Rules by which both ends of a message know its shapes from the sizes of the batch, without telling each other.

Every dim of every tensor is a number that never changes, one of the sizes, or the product of two of them (router logits
have a row per token: samples x length). Which of these it is follows from shapes that were seen for several sizes: what
does not fit is struck out. Where what is left does not agree about new sizes, there is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations_with_replacement
from operator import mul
from typing import Any, NamedTuple

from .payload import Header

Sizes = tuple[int, ...]
Shapes = tuple[tuple[int, ...], ...]  # of the tensors of a message
Divisors = Sequence[tuple[int, ...]]  # by tensor and dim


class MessageKey(NamedTuple):
    """What messages are alike that have equal keys.

    kind   equal for messages that differ in nothing but shapes
    sizes  that shapes may depend on, as many for all messages of a kind
    """

    kind: tuple[Any, ...]
    sizes: Sizes


def split_sizes(key: Hashable) -> tuple[Hashable, Sizes]:
    """What is no size in nested tuples that describe shapes, and all whole numbers in them, in their order."""
    sizes: list[int] = []

    def look(part: Any) -> Hashable:
        if isinstance(part, tuple):
            return tuple(map(look, part))
        if type(part) is int:
            sizes.append(part)
            return ...
        return part

    return look(key), tuple(sizes)


class _Term(NamedTuple):
    """A number, or the product of the sizes at these places."""

    number: int
    places: tuple[int, ...]

    def of(self, sizes: Sizes) -> int:
        return math.prod(sizes[place] for place in self.places) if self.places else self.number


class ShapeRule:
    """What the shapes of one kind of message are.

    base   sizes that have been seen
    header  the description of the message with these
    fixed  places of sizes that have always been the same: nothing is known for others
    most   sizes beyond which nothing is known; None: there are none
    terms  by tensor and dim what it may be
    divisors  of what it is, by tensor and dim, where several ranks send a part each
    """

    def __init__(
        self,
        base: Sizes,
        header: Header,
        fixed: Collection[int],
        most: Sizes | None,
        terms: Sequence[Sequence[Sequence[_Term]]],
        divisors: Divisors,
    ) -> None:
        self._divisors = divisors
        self._base, self._header, self._fixed, self._most, self._terms = base, header, tuple(fixed), most, terms

    def header(self, sizes: Sizes) -> Header | None:
        """The description of a message for `sizes`; None where it is not known."""
        if any(sizes[place] != self._base[place] for place in self._fixed):
            return None
        if self._most is not None and any(size > most for size, most in zip(sizes, self._most, strict=True)):
            return None
        known: dict[int, int] = {}  # most tensors are alike, and share their terms
        metas = []
        for meta, dims, divisors in zip(self._header.tensors, self._terms, self._divisors, strict=True):
            for terms, divisor in zip(dims, divisors, strict=True):
                if id(terms) not in known:
                    values = {term.of(sizes) for term in terms}
                    if len(values) > 1:
                        return None
                    known[id(terms)] = values.pop()
                if known[id(terms)] % divisor:
                    return None
            shape = (known[id(terms)] // divisor for terms, divisor in zip(dims, divisors, strict=True))
            metas.append(meta._replace(shape=tuple(shape)))
        return self._header._replace(tensors=tuple(metas))


def find_divisors(header: Header, whole: Shapes, ranks: int) -> Divisors | None:
    """By what dims of `whole`, the shapes of a rank that shares nothing, are divided in `header`: by nothing, or all
    ranks; None where it is something else.
    """
    divisors = []
    for meta, shape in zip(header.tensors, whole, strict=False):
        divisors.append(tuple(ranks if size != part else 1 for part, size in zip(meta.shape, shape, strict=False)))
        if tuple(part * divisor for part, divisor in zip(meta.shape, divisors[-1], strict=False)) != shape:
            return None
    shapes = [len(meta.shape) for meta in header.tensors]
    return divisors if shapes == [len(shape) for shape in whole] else None


def find_rule(
    base: Sizes,
    header: Header,
    seen: Sequence[tuple[Sizes, Shapes]],
    most: Sizes | None = None,
    divisors: Divisors | None = None,
) -> ShapeRule | None:
    """The rule that explains `header` and everything in `seen`; None where there is none. `most`: see `ShapeRule`.

    divisors    of what it explains, `seen` among it, to what `header` has
    """
    divisors = divisors or [(1,) * len(meta.shape) for meta in header.tensors]
    fixed = [place for place, size in enumerate(base) if all(sizes[place] == size for sizes, _ in seen)]
    varied = [place for place in range(len(base)) if place not in fixed]
    products = [places for count in (1, 2) for places in combinations_with_replacement(varied, count)]
    shapes = tuple(tuple(map(mul, meta.shape, factors)) for meta, factors in zip(header.tensors, divisors, strict=True))
    ranks = tuple(map(len, shapes))
    if any(tuple(map(len, found)) != ranks for _, found in seen):
        return None
    terms = []
    by_values: dict[Sizes, list[_Term]] = {}
    for tensor, shape in enumerate(shapes):
        dims = []
        for dim, size in enumerate(shape):
            values = (size, *(found[tensor][dim] for _, found in seen))
            if values not in by_values:
                possible = [_Term(size, ()), *(_Term(0, places) for places in products)]
                by_values[values] = [
                    term for term in possible if values == tuple(map(term.of, (base, *(sizes for sizes, _ in seen))))
                ]
            if not by_values[values]:
                return None
            dims.append(by_values[values])
        terms.append(dims)
    return ShapeRule(base, header, fixed, most, terms, divisors)
