"""Rules by which both ends of a message know its shapes from the sizes of the batch, without telling each other.

Every dim of every tensor is a number that never changes, one of the sizes, or the product of two of them (router logits
have a row per token: samples x length). Which of these it is follows from shapes that were seen for several sizes: what
does not fit is struck out. Where what is left does not agree about new sizes, there is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from .payload import Header

Sizes = tuple[int, ...]
Shapes = tuple[tuple[int, ...], ...]  # of the tensors of a message


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
    """

    def __init__(
        self,
        base: Sizes,
        header: Header,
        fixed: Collection[int],
        most: Sizes | None,
        terms: Sequence[Sequence[Sequence[_Term]]],
    ) -> None:
        self._base, self._header, self._fixed, self._most, self._terms = base, header, tuple(fixed), most, terms

    def header(self, sizes: Sizes) -> Header | None:
        """The description of a message for `sizes`; None where it is not known."""
        if any(sizes[place] != self._base[place] for place in self._fixed):
            return None
        if self._most is not None and any(size > most for size, most in zip(sizes, self._most, strict=True)):
            return None
        known: dict[int, int] = {}  # most tensors are alike, and share their terms
        metas = []
        for meta, dims in zip(self._header.tensors, self._terms, strict=True):
            for terms in dims:
                if id(terms) not in known:
                    values = {term.of(sizes) for term in terms}
                    if len(values) > 1:
                        return None
                    known[id(terms)] = values.pop()
            metas.append(meta._replace(shape=tuple(known[id(terms)] for terms in dims)))
        return self._header._replace(tensors=tuple(metas))


def find_rule(
    base: Sizes, header: Header, seen: Sequence[tuple[Sizes, Shapes]], most: Sizes | None = None
) -> ShapeRule | None:
    """The rule that explains `header` and everything in `seen`; None where there is none. `most`: see `ShapeRule`."""
    fixed = [place for place, size in enumerate(base) if all(sizes[place] == size for sizes, _ in seen)]
    varied = [place for place in range(len(base)) if place not in fixed]
    products = [places for count in (1, 2) for places in combinations_with_replacement(varied, count)]
    shapes = tuple(meta.shape for meta in header.tensors)
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
    return ShapeRule(base, header, fixed, most, terms)
