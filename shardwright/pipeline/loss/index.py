"""Rules for selections (`rules`): indexing, masks, and tensors made for a number of samples.

A mask that follows from the batch's entries selects a number of rows that can be counted in every microbatch ahead, so
what it selects is ROWS again, with the mask as the base of its axis. What other masks select is ROWS of unknown number:
it has a sum, but no mean.
"""

from __future__ import annotations

import inspect
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from .facts import CONST, Axis, Count, Fact, Kind, Number, first_unknown, names, unknown
from .rules import HALVES, TOGETHER, Call, Rule, along, elementwise, named
from .samples import sample_of

NUMBERS = (
    "{name} takes the numbers that samples have in their microbatch (torch.arange, nonzero) for values, and in the "
    "whole batch they have others; they may only say which row of the same batch is meant, as in "
    "x[torch.arange(len(x)), columns]"
)
_SAME_VALUES = names("to long int contiguous clone detach alias cpu cuda")
_KEEPS_NUMBERS = _SAME_VALUES | names("view reshape flatten squeeze unsqueeze expand expand_as broadcast_to")
_PICKS_COLUMN = names("getitem select")
_TAKES_PLACES = names("getitem setitem index_select gather")


def are_numbers(fact: Fact) -> bool:
    """Whether values are numbers of samples in their microbatch, or some of them are."""
    return fact.samples or (fact.mask is not None and fact.mask[1] in (fact.mask[0].dim, None))


def of_numbers(call: Call, rule: Rule) -> Fact | list[Fact]:
    """What functions make of `arange(samples)` and `mask.nonzero()`, whose numbers begin anew in every microbatch."""
    first = call.facts[0]
    if call.name in ("zeros_like", "ones_like", "full_like", "empty_like"):
        return rule(call)
    lost = unknown(NUMBERS.format(name=call.name), coupled=True)
    if any(fact.mask is not None and fact.mask[1] is None for fact in call.facts):
        return _of_matrix(call, first) or lost
    if not any(fact.samples for fact in call.facts):  # places that a mask selects
        if call.name in _SAME_VALUES:
            return first._replace(recipe=None)
        if not are_numbers(first) and call.name in _TAKES_PLACES:
            is_value = call.name == "setitem" and isinstance(call.args[2], torch.Tensor)
            return lost if is_value and are_numbers(call.watch.fact(call.args[2])) else rule(call)
        if call.name in _PICKS_COLUMN and call.first.dim() == 2 and first.dim == 0 and _column(call) is not None:
            return first._replace(recipe=None)  # [k, 1], of a mask with one dim
        if call.name in _KEEPS_NUMBERS:
            made = rule(call)
            return made if isinstance(made, Fact) and (made.mask is not None or made.kind is Kind.UNKNOWN) else lost
        return lost
    if call.name in ("getitem", "setitem") and not first.samples:
        is_value = call.name == "setitem" and isinstance(call.args[2], torch.Tensor)
        if first.kind is Kind.ROWS and not (is_value and call.watch.fact(call.args[2]).samples):
            return rule(call)
    elif call.name in _KEEPS_NUMBERS or call.name == "getitem":
        made = rule(call)
        same = isinstance(made, Fact) and made.kind is Kind.ROWS and made.axis == first.axis
        if same and isinstance(made, Fact) and (call.name != "getitem" or made.samples):
            return made._replace(samples=True)
    return lost


def _of_matrix(call: Call, fact: Fact) -> Fact | list[Fact] | None:
    """Columns of `mask.nonzero()` [k, dims], or of it transposed: each is what `nonzero(as_tuple=True)` returns.
    None: some other function of all columns together.
    """
    if fact.mask is None or fact.mask[1] is not None:
        return None
    if call.name in _SAME_VALUES:
        return fact._replace(recipe=None)
    if call.name in ("t", "T", "transpose"):
        return fact._replace(dim=1 - (fact.dim or 0), recipe=None)
    mask, columns = fact.mask[0], call.first.shape[1 - (fact.dim or 0)]
    single = fact._replace(dim=0, recipe=None)
    if call.name == "unbind" and call.argument(1, "dim", default=0) % 2 != fact.dim:
        return [single._replace(mask=(mask, place)) for place in range(columns)]
    column = _column(call)
    return None if column is None else single._replace(mask=(mask, column))


def _column(call: Call) -> int | None:
    """Of [k, columns] or [columns, k] the column that `matrix[:, column]`, or select, takes."""
    place = 1 - (call.facts[0].dim or 0)  # of columns
    if call.name == "select":
        index = call.argument(2, "index") if call.argument(1, "dim") % 2 == place else None
    elif call.name == "getitem":
        items = list(call.args[1]) if isinstance(call.args[1], tuple) else [call.args[1]]
        if place == 1 and len(items) == 2 and (items[0] is Ellipsis or items[0] == slice(None)):
            index = items[1]
        else:
            index = items[0] if place == 0 and len(items) == 1 else None
    else:
        return None
    return index % call.first.shape[place] if type(index) is int else None


def get_item(call: Call) -> Fact:
    fact = call.facts[0]
    if blame := first_unknown(call.facts):
        return blame
    if fact.kind is not Kind.ROWS:
        if any(one.kind is Kind.ROWS for one in call.facts[1:]):
            return _looked_up(call)
        return unknown("indexing with a number that depends on the batch") if call.numbers else elementwise(call)
    if fact.dim is None:
        return fact.without_origin()
    index = call.args[1]
    return _indexed(call, fact, list(index) if isinstance(index, tuple) else [index])


def _looked_up(call: Call) -> Fact:
    """table[ids]: a constant table, one row of ids."""
    index = call.args[1]
    if (
        call.facts[0].kind is Kind.CONST
        and isinstance(index, torch.Tensor)
        and index.dtype not in (torch.bool, torch.uint8)
    ):
        return call.facts[1].without_origin()
    return unknown(
        "indexing something that has no samples with values of samples", coupled=call.facts[0].kind is not Kind.CONST
    )


def _indexed(call: Call, fact: Fact, items: list[Any]) -> Fact:
    assert fact.dim is not None
    source, target = 0, 0  # dims of the tensor and of the result
    taken = sum(_width(item) for item in items)
    place: int | None = None
    found = fact
    advanced: list[tuple[int, int, torch.Tensor, Fact]] = []  # dim of the tensor, of the result, index and its fact
    for item in items:
        if item is None:
            target += 1
        elif item is Ellipsis:
            skipped = call.first.dim() - taken
            if source <= fact.dim < source + skipped:
                place = target + fact.dim - source
            source, target = source + skipped, target + skipped
        elif isinstance(item, slice):
            if source == fact.dim:
                sliced = _sliced(call, fact, item)
                if sliced.kind is not Kind.ROWS:
                    return sliced
                found, place = sliced, target
            elif any(_depends(call, part) for part in (item.start, item.stop, item.step)):
                return unknown("a slice whose ends depend on the batch", coupled=True)
            source, target = source + 1, target + 1
        elif isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype != torch.bool:
            if source == fact.dim or call.watch.fact(item).kind is not Kind.CONST:
                return unknown(HALVES.format(name="an index"), coupled=True)
            source += 1
        elif isinstance(item, torch.Tensor | list | range):
            tensor = item if isinstance(item, torch.Tensor) else torch.as_tensor(item)
            advanced.append(
                (source, target, tensor, call.watch.fact(tensor) if isinstance(item, torch.Tensor) else CONST)
            )
            source += _width(item)
            target += 1
        elif isinstance(item, bool):
            return unknown("indexing with a bool")
        else:
            if source == fact.dim:
                return _sample(call, fact, item, items)
            if _depends(call, item):
                return unknown("an index that depends on the batch", coupled=True)
            source += 1
    if place is None and not any(at <= fact.dim < at + _width(index) for at, _, index, _ in advanced):
        place = target + fact.dim - source
    if not advanced:
        # arange(samples)[:, None]: still the number of each sample, as masks of transformers index with
        kept = fact.samples and all(item is None or item is Ellipsis or item == slice(None) for item in items)
        return found.without_origin()._replace(dim=place, samples=kept)
    return _advanced(call, found, place, advanced)


def _depends(call: Call, part: Any) -> bool:
    """Whether an end of a slice, or an index, follows from values of this microbatch. Sizes do in a criterion alone:
    heads cut to them what they have made longer.
    """
    if isinstance(part, torch.Tensor):
        return call.watch.fact(part).kind is not Kind.CONST
    return isinstance(part, Number) and not (call.watch.trusting and part.axis is not None)


def _sample(call: Call, fact: Fact, index: Any, items: list[Any]) -> Fact:
    """x[i], x[i, :3]: one sample."""
    plain = all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in items)
    if not plain or call.numbers or call.watch.trusting or call.name != "getitem":
        return unknown(HALVES.format(name="an index"), coupled=True)
    return sample_of(fact, index, call.first.shape[fact.dim or 0])


def _width(item: Any) -> int:
    """Dims of the tensor that an item of the index covers."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _sliced(call: Call, fact: Fact, item: slice) -> Fact:
    """All samples, or every n-th of them."""
    assert fact.dim is not None
    size = call.first.shape[fact.dim]
    start, stop, step = item.start, item.stop, item.step
    whole = stop is None or (isinstance(stop, Count) and stop.axis == fact.axis and fact.axis is not None)
    if start in (None, 0) and step in (None, 1) and whole:
        return fact
    every = (
        isinstance(step, int)
        and step > 1
        and whole
        and (start is None or (isinstance(start, int) and 0 <= start < step))
    )
    if every and fact.axis is not None and fact.order == () and fact.axis.base is None:
        if (Fraction(size) / step).denominator == 1:
            return fact.without_origin()._replace(axis=fact.axis.times(Fraction(1, step)), order=())
        return unknown(
            f"[{start or 0}::{step}] takes rows that belong together in groups of {step}, and a microbatch has {size} "
            f"of them; choose microbatches whose number of samples is a multiple of {step}",
            coupled=True,
        )
    return unknown(HALVES.format(name="a slice"), coupled=True)


def _advanced(call: Call, fact: Fact, place: int | None, advanced: list[tuple[int, int, torch.Tensor, Fact]]) -> Fact:
    """Indices that are tensors. `place`: where the samples are if no such index takes their dim."""
    if len(advanced) == 1 and advanced[0][2].dtype in (torch.bool, torch.uint8):
        return _masked(fact, place, *advanced[0])
    if any(index.dtype in (torch.bool, torch.uint8) for _, _, index, _ in advanced):
        return unknown("indexing with a mask and other indices together")
    if all(known.mask is not None for *_, known in advanced):  # x[mask.nonzero(as_tuple=True)]
        masks = {id(known.mask[0]) for *_, known in advanced if known.mask is not None}
        order = [known.mask[1] for *_, known in advanced if known.mask is not None]
        mask = advanced[0][3].mask
        assert mask is not None
        if len(masks) == 1 and order == list(range(len(order))) and fact.dim == advanced[0][0] + (mask[0].dim or 0):
            return advanced[0][3]._replace(dim=advanced[0][1], mask=None, recipe=None)
        return unknown(TOGETHER.format(name="an index"), coupled=True)
    rows = [(at, to, index, known) for at, to, index, known in advanced if known.kind is Kind.ROWS]
    if any(known.kind not in (Kind.ROWS, Kind.CONST) for *_, known in advanced):
        return unknown("indexing with values that sum over samples")
    if place is not None:
        if rows or any(at + 1 < after for (at, *_), (after, *_) in pairwise(advanced)):
            return unknown(TOGETHER.format(name="an index"), coupled=True)
        wider = max(index.dim() for _, _, index, _ in advanced) - len(advanced)
        return fact.without_origin()._replace(dim=place + (wider if place > advanced[0][1] else 0))
    # x[arange(samples), columns], or of as many rows of each sample as x has
    axis = Axis() if fact.axis is None else fact.axis
    own = [known for at, _, _, known in rows if at == fact.dim and known.samples and known.axis == axis]
    aligned = {None if known.dim is None else known.dim - index.dim() for _, _, index, known in rows}
    if not own or len(aligned) != 1 or None in aligned or advanced[0][0] != fact.dim:
        return unknown(HALVES.format(name="an index"), coupled=True)
    if sum(known.samples for *_, known in advanced) > 1:  # the diagonal: columns that are numbers of samples
        return unknown(NUMBERS.format(name="an index"), coupled=True)
    widest = max(index.dim() for _, _, index, _ in advanced)
    return fact.without_origin()._replace(dim=advanced[0][1] + widest + next(one for one in aligned if one is not None))


def _masked(fact: Fact, place: int | None, source: int, target: int, mask: torch.Tensor, known: Fact) -> Fact:
    if place is not None:
        if known.kind is Kind.CONST:
            return fact.without_origin()._replace(dim=place)
        return unknown("a mask of samples selects along another dim than theirs", coupled=True)
    if known.kind is not Kind.ROWS or known.dim is None or fact.dim != source + known.dim:
        return unknown(HALVES.format(name="a mask"), coupled=True)
    if known.dim > 0 and any(size != 1 for size in mask.shape[: known.dim]):
        return _selected(fact, known)._replace(dim=target, order=("masked", known.dim, fact.order))
    return _selected(fact, known)._replace(dim=target)


def _selected(fact: Fact, mask: Fact) -> Fact:
    """Rows that a mask leaves."""
    return Fact(Kind.ROWS, 0, Axis(mask.recipe) if mask.recipe is not None else None, fact.order)


def masked_select(call: Call) -> Fact:
    fact = elementwise(call)
    if fact.kind is not Kind.ROWS:
        return fact
    mask = call.facts[-1]
    copies = call.tensors[0].numel() // max(call.tensors[-1].numel(), 1)
    selected = _selected(fact, mask)
    if mask.kind is not Kind.ROWS or (copies != 1 and selected.axis is None):
        return unknown("masked_select with a mask that is the same for every batch")
    if fact.dim != 0 and any(size != 1 for size in call.first.shape[: fact.dim]):
        selected = selected._replace(order=("masked", fact.dim, fact.order))
    return selected._replace(axis=selected.axis.times(copies) if selected.axis is not None else None)


def nonzero(call: Call) -> Fact | list[Fact]:
    """Indices of what is set: as many rows as are set."""
    mask = call.facts[0]
    if mask.kind is not Kind.ROWS:
        return elementwise(call)
    selected = _selected(mask, mask)
    if isinstance(call.result, tuple):
        return [selected._replace(mask=(mask, place)) for place in range(len(call.result))]
    return selected._replace(mask=(mask, 0 if call.first.dim() == 1 else None))


def where(call: Call) -> Fact | list[Fact]:
    return nonzero(call) if len(call.args) + len(call.kwargs) == 1 else elementwise(call)


def set_item(call: Call) -> Fact:
    """x[index] = value: as the elementwise choice between x and the value."""
    fact = call.facts[0]
    if blame := first_unknown(call.facts):
        return blame
    if fact.kind is Kind.CONST and all(one.kind is Kind.CONST for one in call.facts):
        return CONST
    if fact.kind is not Kind.ROWS or call.numbers:
        return unknown("an assignment to a part of a tensor that has no samples, from values that have")
    index = call.args[1]
    chosen = _indexed(call, fact, list(index) if isinstance(index, tuple) else [index])
    if chosen.kind is not Kind.ROWS:
        return chosen
    value = call.args[2]
    if isinstance(value, torch.Tensor):
        known = call.watch.fact(value)
        if known.kind is Kind.ROWS and known.dim is not None and chosen.dim is not None:
            there = _result_ndim(call) - chosen.dim
            if value.dim() - known.dim != there or known.order != chosen.order:
                return unknown("an assignment moves values between samples", coupled=True)
        elif known.kind is not Kind.CONST or value.numel() != 1:
            return unknown("an assignment of values that are not those of single samples")
    return fact.without_origin()


def _result_ndim(call: Call) -> int:
    assert isinstance(call.args[0], torch.Tensor)
    with torch.no_grad():
        return call.args[0].detach()[call.args[1]].dim()


def index_select(call: Call) -> Fact:
    """x.index_select(dim, mask.nonzero().squeeze()): as x[..., index]. Rows of a table have those of the index."""
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    fact = call.facts[0]
    known = call.watch.fact(index)
    if fact.kind is Kind.ROWS and known.mask is not None and isinstance(dim, int):
        return _indexed(call, fact, [slice(None)] * (dim % call.first.dim()) + [index])
    if fact.kind is Kind.CONST and known.kind is Kind.ROWS and known.dim == 0 and isinstance(dim, int):
        return known.without_origin()._replace(dim=dim % call.first.dim())
    return along(call)


def gather(call: Call) -> Fact:
    """x.gather(0, mask.nonzero().expand(-1, width)): rows that a mask selects, column by column. Else along a dim."""
    fact, known = call.facts[0], call.facts[1] if len(call.facts) > 1 else CONST
    dim = call.argument(1, "dim")
    if fact.kind is not Kind.ROWS or known.mask is None or dim != fact.dim or known.dim != fact.dim:
        return along(call)
    mask, place = known.mask
    same = (mask.axis or Axis()) == (fact.axis or Axis()) and mask.order == fact.order
    if place or dim or mask.dim != 0 or not same:
        return unknown(TOGETHER.format(name=call.name), coupled=True)
    return known.without_origin()


_RANGE = ("start", "end", "step")


def _arange(start: Any = None, end: Any = None, step: Any = 1) -> None:
    """How arange is called; a single number is where it ends."""


def created(call: Call) -> Fact | None:
    """zeros(samples, ...), arange(samples), tensor(number): tensors made of numbers that were read from others.
    None: of none such.
    """
    if call.name in ("tensor", "as_tensor", "scalar_tensor", "asarray"):
        return elementwise(call) if call.numbers or call.facts else None
    if not call.numbers:
        return None
    sizes: Any = call.argument(1 if call.name.startswith("new_") else 0, "size")
    if call.name in ("arange", "range"):
        given = inspect.getcallargs(_arange, *call.args[:3], **{k: v for k, v in call.kwargs.items() if k in _RANGE})
        start, end, step = (
            (0, given["start"], given["step"]) if given["end"] is None else (given[name] for name in _RANGE)
        )
        plain = type(start) is int and start == 0 and type(step) is int and step == 1
        if plain and isinstance(end, Count) and end.axis is not None and call.name == "arange":
            return Fact(Kind.ROWS, 0, end.axis, samples=end.axis.base is None)
        return unknown(f"{call.name} of a number that depends on the batch", coupled=True)
    if call.name in ("eye", "linspace"):
        return unknown(f"{call.name} of a number that depends on the batch", coupled=True)
    if isinstance(sizes, int):
        sizes = call.args[1 if call.name.startswith("new_") else 0 :]
    places = [place for place, size in enumerate(sizes or ()) if isinstance(size, Number)]
    if (
        len(places) == 1
        and len(call.numbers) == 1
        and isinstance(sizes[places[0]], Count)
        and sizes[places[0]].axis is not None
    ):
        return Fact(Kind.ROWS, places[0], sizes[places[0]].axis)
    if call.name == "full" and not places:
        return elementwise(call)
    return unknown(f"{call.name} of a size that depends on the batch")


CREATORS = names(
    """zeros ones empty full rand randn randint new_zeros new_ones new_empty new_full new_tensor arange range eye tensor
    as_tensor scalar_tensor asarray linspace"""
)

INDEX_RULES: dict[str, Rule] = {
    **named(get_item, "getitem"),
    **named(set_item, "setitem"),
    **named(masked_select, "masked_select"),
    **named(nonzero, "nonzero argwhere"),
    **named(where, "where"),
    **named(index_select, "index_select"),
    **named(gather, "gather"),
}
