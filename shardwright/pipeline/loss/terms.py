"""Loss terms inside a model's own head and criterion: found, and scaled to the whole batch, while they run.

A head computes means (`cross_entropy(..., reduction="mean")`) over the tokens of its microbatch. A mean over the whole
batch is not the mean of such means when the microbatches have unequal numbers of tokens. So while the part behind the
last layer and the criterion run, means over samples are answered with

    sum over this microbatch's elements / number of elements of the whole batch

and a count of this microbatch that something is divided by with the count of the whole batch. Both must be known when
the first microbatch runs. They follow from the entries of the batch by steps (labels shifted, clamped, compared,
selected) that are recorded for the first microbatch (`Recipe`) and repeated once on the whole batch of this rank, so no
rule per head is needed and heads with several terms get a divisor for each.

Every tensor on the way carries what is known about it (`facts`), so that a loss with a part that microbatches cannot
compute is refused instead of being wrong. The sums are computed in fp32 or fp64, whatever the model computes in.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import chain, repeat
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...ops.vocab_mode import sharded_cross_entropy
from ...utils import pytree
from ...utils.objects import tensors_within
from ..batch.microbatch import OTHER_ROWS, find_batch_dim, items_of
from .elements import elements_of
from .facts import (
    ANY_RECIPE,
    CONST,
    LOOSE,
    SAMPLES,
    SUM,
    Axis,
    Fact,
    Kind,
    Recipe,
    first_unknown,
    number,
    unknown,
)
from .functions import (
    ARITHMETIC,
    COMPARISONS,
    RANDOM,
    READ_BY_HOST,
    SHAPED,
    SIGNATURES,
    SILENT,
    SIZES,
    operation,
    with_lost_weight,
)
from .grad_fns import grad_fns_of
from .index import CREATORS, INDEX_RULES, NUMBERS, are_numbers, created, of_numbers
from .products import PRODUCT_RULES
from .rules import RULES, Call, elementwise, is_elementwise, recomputed
from .samples import holds_samples, single_samples
from .shapes import SHAPE_RULES

_RULES = {**RULES, **PRODUCT_RULES, **SHAPE_RULES, **INDEX_RULES}


class TermWatcher(TorchFunctionMode):
    """Active while the part of the model behind its last layer, and the criterion, run for one microbatch.

    total(index, count) -> count(entries) of the global batch, for the question number `index`
    constants() -> ids of tensors that are the same in every microbatch though they are no parameters (buffers)
    recording  recipes are needed; False where all questions have been answered for another microbatch
    shared  keys of entries that every microbatch has whole
    ready   microbatches were made by the user: other entries without samples belong to this one alone
    """

    def __init__(
        self,
        microbatch: Any,
        samples: int,
        total: Callable[[int, Callable[[Mapping[Any, Any]], Any]], torch.Tensor],
        constants: Callable[[], frozenset[int]] = frozenset,
        recording: bool = True,
        shared: frozenset[Any] = frozenset(),
        ready: bool = False,
    ) -> None:
        super().__init__()
        self.entries = {**dict(items_of(microbatch)), SAMPLES: samples}
        self.samples = samples
        self.num_questions = 0
        self.lengths: dict[int, Any] = {}  # what len() returned as a plain int, and what it was the size of
        self.counting = False  # whether plain numbers are told apart by their place
        self.lengths_at: frozenset[int] = frozenset()  # places in the criterion's arithmetic where such an int stands
        self.num_plain = 0  # plain numbers that have entered the criterion's arithmetic
        self._selected: set[Any] = set()  # grad_fn of what a head has selected
        self._asking = False
        self.decided = False  # values of this microbatch alone have decided what to do
        self._orders: dict[int, torch.Tensor] = {}  # results of comparing values that are not those of the whole batch
        self.unfollowed = False  # the host has read values of the batch where they can be followed no further
        self.trusting = True  # what a model's forward does is taken to keep samples apart; what a criterion does is not
        self._recording = recording
        self._total = total
        self._constants = constants
        self._facts: dict[int, tuple[weakref.ref[torch.Tensor], Fact]] = {}
        for key, value in items_of(microbatch):
            if isinstance(value, torch.Tensor):
                dim = None if key in shared else find_batch_dim(key, value, samples)
                if dim is None:
                    self._note(value, LOOSE if ready and key not in shared else CONST)
                elif dim == OTHER_ROWS:
                    self._note(value, Fact(Kind.ROWS, 0, None, "rows that are not samples", Recipe(key)))
                else:
                    self._note(value, Fact(Kind.ROWS, dim, Axis(), recipe=Recipe(key)))

    def close(self) -> None:
        """Let go of the batch: numbers that the criterion has kept hold on to this."""
        self.entries, self._facts, self.lengths, self._orders = {}, {}, {}, {}
        self._total = _ended

    # Facts -----------------------------------------------------------------------------------------------------------

    def fact(self, tensor: torch.Tensor) -> Fact:
        found = self._facts.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        return self._foreign(tensor)

    def _note(self, tensor: torch.Tensor, fact: Fact) -> None:
        self._facts[id(tensor)] = (weakref.ref(tensor), fact)
        of_some = fact.kind is Kind.ROWS and (fact.axis is None or fact.axis.base is not None)
        if of_some and self.trusting and tensor.grad_fn is not None:
            self._selected.add(tensor.grad_fn)

    def _foreign(self, tensor: torch.Tensor) -> Fact:
        """A tensor that was made before the watch began, or behind its back."""
        if isinstance(tensor, torch.nn.Parameter):
            return LOOSE
        if tensor.requires_grad:
            if self.trusting:
                return self._unseen(tensor)
            return LOOSE if tensor.is_leaf else unknown("a value that was computed in a way that is not followed")
        if not self.trusting or id(tensor) in self._constants():
            return CONST
        found = self.assumed(tensor)
        return found if found.kind is Kind.ROWS else LOOSE

    def _unseen(self, tensor: torch.Tensor) -> Fact:
        """What a model computed before the watch began, or while nobody saw it (`torch.vmap`)."""
        if self._selected and any(grad_fn in self._selected for grad_fn in grad_fns_of(tensor)):
            found = unknown("a function that is not followed here got elements that were selected", coupled=True)
        else:
            found = self.assumed(tensor)
        self._note(tensor, found)
        return found

    def assumed(self, tensor: torch.Tensor, dim: int = 0) -> Fact:
        """What a model computes has its samples on dim 0, where nothing else is known."""
        if tensor.dim() and tensor.shape[dim] % self.samples == 0:
            return Fact(Kind.ROWS, dim, Axis(None, Fraction(tensor.shape[dim], self.samples)))
        return unknown("a value that the model computed before its last layer, or in a way that is not followed")

    def seed(self, tree: Any, dims: Sequence[int] = ()) -> None:
        """Note the values that a model's layers return; `dims` of their tensors count samples, 0 where left out."""
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tensor, dim in zip(tensors, chain(dims, repeat(0)), strict=False):
            if tensor.dim():
                self._note(tensor, self.assumed(tensor, dim))

    def hand_on(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """`other` holds the same samples as `tensor`, with more columns."""
        self._note(other, self.fact(tensor).without_origin())

    def enter_criterion(self, output: Any) -> None:
        """From now on what is not understood is not trusted; outputs that nobody has seen have their samples on dim
        0.
        """
        for leaf in tensors_within(output):
            found = self._facts.get(id(leaf))
            if found is None or found[0]() is not leaf:
                self._note(leaf, self._foreign(leaf))
        self.trusting = False
        self._selected.clear()

    def is_sum(self, tensor: torch.Tensor) -> bool:
        return self.fact(tensor).kind is Kind.SUM

    # Questions about the whole batch
    # -------------------------------------------------------------------------------------

    def rows(self, axis: Axis) -> torch.Tensor:
        return self._ask(axis.rows)

    def total(self, count: Callable[[Mapping[Any, Any]], Any], local: torch.Tensor) -> torch.Tensor:
        exact = self._ask(count)
        if exact.is_meta:
            return local
        low = local.dtype in (torch.float16, torch.bfloat16)
        return exact.to(device=local.device, dtype=torch.float32 if low else local.dtype)

    def part_of_mean(
        self, mean: Callable[[], Any], local: Any, count: Callable[[Mapping[Any, Any]], Any] | None
    ) -> Any:
        """`mean()`, taken over `local` of what `count` counts, as this microbatch's part of a mean over all; nobody
        looks into it.
        """
        self._asking = True
        try:
            value = mean()
        finally:
            self._asking = False
        if not isinstance(value, torch.Tensor):
            return value
        if count is None:
            self._note(value, unknown("a router loss of tokens that do not follow from the batch's entries alone"))
            return value
        whole = self._ask(count)
        self._asking = True
        try:
            if not value.is_meta:
                value = value * (local / whole).to(device=value.device, dtype=value.dtype)
        finally:
            self._asking = False
        self._note(value, SUM)
        return value

    def _ask(self, count: Callable[[Mapping[Any, Any]], Any]) -> torch.Tensor:
        self.num_questions += 1
        self._asking = True  # the answer is computed from entries of other microbatches, which nobody follows
        try:
            return self._total(self.num_questions - 1, count)
        finally:
            self._asking = False

    # Calls -----------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._asking:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._property(func, args)
        if name in SILENT or name == "__set__":
            return func(*args, **kwargs)
        if name in SIZES:
            return self._size(name, func, args, kwargs)
        if func in SIGNATURES:
            return self._loss(func, args, kwargs)
        if name in READ_BY_HOST:
            return self._read(name, func, args, kwargs)
        return self._run(func, *operation(name), args, kwargs)

    def _run(self, func: Any, name: str, in_place: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.lengths or self.counting:
            args, kwargs = self._with_lengths(name, args, kwargs)
        call = Call(self, func, name, args, kwargs, in_place)
        if name in CREATORS:
            made = created(call)
            self._note(call.result, CONST if made is None else self._with_recipe(call, made, 0))
            return call.result
        if not call.facts:
            return call.result
        if not call.numbers and call.is_constant:
            return self._keep_constant(call)
        if any(holds_samples(fact.order) for fact in call.facts):
            rule: Any = single_samples
        else:
            rule = _RULES.get(name) or (elementwise if is_elementwise(name) else self._not_followed)
            if rule is not elementwise and name != "getitem" and any(one.axis is None for one in call.numbers):
                rule = self._steered
        facts = of_numbers(call, rule) if any(map(are_numbers, call.facts)) else rule(call)
        if in_place:
            self._changed(call, facts if isinstance(facts, Fact) else facts[0])
            return call.result
        result = call.result
        if isinstance(result, torch.Tensor):
            self._made(call, facts if isinstance(facts, Fact) else facts[0], 0, result)
        else:
            for place, leaf in enumerate(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                self._made(call, facts if isinstance(facts, Fact) else facts[place], place, leaf)
        return result

    def _made(self, call: Call, fact: Fact, place: int, tensor: torch.Tensor) -> None:
        if (
            fact.kind is Kind.UNKNOWN
            and self.trusting
            and not fact.coupled
            and tensor.dim()
            and tensor.shape[0] % self.samples == 0
        ):
            fact = self.assumed(tensor) if self._may_be_rows(call, tensor) else fact._replace(coupled=True)
        self._note(tensor, self._with_recipe(call, fact, place))
        if call.name in COMPARISONS and not self.trusting and not tensor.dim() and fact.kind is not Kind.WHOLE:
            self._orders[id(tensor)] = tensor

    def _may_be_rows(self, call: Call, tensor: torch.Tensor) -> bool:
        """Whether a model's forward may have made rows of all samples, in a way that is not known here. Of selected
        rows it has not: how many there are in other microbatches does not follow from how many are here.
        """
        return all(
            fact.kind is not Kind.ROWS or (fact.axis is not None and fact.axis.base is None) for fact in call.facts
        )

    def _with_lengths(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Plain ints that came from len(), by their value in shapes, by their place in arithmetic, where constants
        stand beside them.
        """
        if self.trusting and name != "arange":  # which numbers the samples of a head, too
            return args, kwargs
        if name in ARITHMETIC and self.counting:
            return tuple(self._plain_number(name, value) for value in args), {
                k: self._plain_number(name, value) for k, value in kwargs.items()
            }
        if name in SHAPED:
            return pytree.tree_map_only(
                int, lambda value: self.lengths.get(value, value) if type(value) is int else value, (args, kwargs)
            )
        return args, kwargs

    def _plain_number(self, name: str, value: Any) -> Any:
        if type(value) not in (int, float):
            return value
        self.num_plain += 1
        if self.num_plain - 1 not in self.lengths_at:
            return value
        if value not in self.lengths:
            raise ValueError(f"{name}() took the result of len() in other microbatches, and {value} here")
        return self.lengths[value]

    def _keep_constant(self, call: Call) -> Any:
        """Results with gradient are noted, since unknown tensors with gradient are taken for the model's
        activations.
        """
        loose = LOOSE in call.facts
        if loose or self.trusting:
            for leaf in [call.result] if isinstance(call.result, torch.Tensor) else pytree.tree_leaves(call.result):
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf, LOOSE if loose else CONST)
        return call.result

    @staticmethod
    def _steered(call: Call) -> Fact:
        why = f"{call.name} does what a number read from this microbatch says, which is another one in the whole batch"
        return first_unknown(call.facts) or unknown(why, coupled=True)

    @staticmethod
    def _not_followed(call: Call) -> Fact:
        return first_unknown(call.facts) or unknown(
            f"what {call.name} does to the samples of a batch is not known here"
        )

    def _with_recipe(self, call: Call, fact: Fact, place: int) -> Fact:
        """`fact` with how to make the tensor in other microbatches, where all that went in follows from the entries."""
        if (
            fact.kind not in (Kind.ROWS, Kind.UNKNOWN)
            or fact.recipe is not None
            or call.name in RANDOM
            or holds_samples(fact.order)
        ):
            return fact
        made = bool(call.numbers)
        for known in call.facts:
            if known.recipe is not None:
                made = True
            elif known is not CONST:
                return fact
        if not made:
            return fact
        if not self._recording:
            return fact._replace(recipe=ANY_RECIPE)
        func, args, kwargs = call.func, call.args, call.kwargs
        if call.name in ("view", "reshape") and fact.dim == 0:
            # Written with the sizes of this microbatch, perhaps; the first one varies with its samples.
            func, args, kwargs = torch.reshape, (args[0], (-1, *call.result.shape[1:])), {}
        args, kwargs = pytree.tree_map(self._named, (args, kwargs))
        return fact._replace(recipe=Recipe(None, func, args, kwargs, place))

    def _named(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.fact(leaf).recipe or self.kept(leaf)
        return leaf

    def kept(self, constant: torch.Tensor) -> torch.Tensor:
        """What counts in other microbatches use for a tensor that is the same in all of them."""
        return constant

    def _changed(self, call: Call, fact: Fact) -> None:
        """An in-place operation: what its target holds is what the operation made of it, and views of the same
        memory are not known to.
        """
        target = call.args[0]
        if not isinstance(target, torch.Tensor):
            return
        recipe = None
        if not target._is_view() and all(known.recipe is not None or known is CONST for known in call.facts):
            args, kwargs = pytree.tree_map(self._named, (call.args, call.kwargs))
            recipe = Recipe(None, call.func, args, kwargs, in_place=True) if call.facts[0].recipe is not None else None
        call.result  # noqa: B018  runs the call
        base = target._base if target._is_view() else target
        memory = _address(target)
        for key, (reference, known) in list(self._facts.items()):
            tensor = reference()
            if tensor is None:
                del self._facts[key]
            elif tensor is base or tensor._base is base or (memory and _address(tensor) == memory):
                spoilt = fact if fact.kind is Kind.UNKNOWN else known
                self._facts[key] = (reference, spoilt._replace(recipe=None, samples=False, mask=None))
        self._note(target, fact._replace(recipe=recipe, samples=False, mask=None))

    # Reading sizes and values
    # --------------------------------------------------------------------------------------------

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        result, name = func(*args), func.__self__.__name__
        if name == "shape":
            fact = self.fact(args[0])
            if fact.kind is Kind.ROWS and fact.dim is not None:
                return torch.Size(
                    [self._tracked(size, fact, 1) if dim == fact.dim else size for dim, size in enumerate(result)]
                )
        elif name in ("T", "mT", "H", "mH"):
            return self._run(func, name, False, args, {}) if args[0].dim() == 2 or name[0] == "m" else result
        elif name in ("data", "real") and isinstance(result, torch.Tensor):
            self._note(result, self.fact(args[0])._replace(recipe=None))
        return result

    def _size(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        fact = self.fact(args[0])
        if fact.kind is not Kind.ROWS or fact.dim is None:
            return result
        shape = tuple(args[0].shape)
        if isinstance(result, torch.Size):
            return torch.Size(
                [self._tracked(size, fact, 1) if dim == fact.dim else size for dim, size in enumerate(result)]
            )
        if name in ("numel", "nelement"):
            return self._tracked(result, fact, math.prod(shape[: fact.dim] + shape[fact.dim + 1 :]))
        if name == "__len__":
            if fact.dim == 0:
                # Python's len() strips what it gets of all but the number
                self.lengths[result] = self._tracked(result, fact, 1)
            return result
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return self._tracked(result, fact, 1) if dim is not None and dim % len(shape) == fact.dim else result

    def _tracked(self, size: int, fact: Fact, times: int) -> Any:
        """A size that depends on the number of samples."""
        if fact.axis is None:
            return number(
                size,
                None,
                "the number of elements that were selected by something that does not follow from the batch alone",
            )
        axis = fact.axis.times(times)
        return number(
            size,
            cache(partial(self.rows, axis)),
            axis=axis,
            decides=None if self.trusting else self._decide,
            rows=self.rows,
        )

    def _read(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fact = self.fact(args[0])
        if name == "__bool__":
            return self._decided(fact, func, args, kwargs)
        value = self.value(name, func, args, kwargs)
        if fact.kind is Kind.CONST:
            return value
        if fact.kind is Kind.WHOLE or fact.recipe is not None:
            # Python strips what int() and float() return of everything but the number, and numpy does not know of
            # facts.
            self.unfollowed |= name != "item" and not (name == "tolist" and args[0].is_meta)
        elif fact.kind is Kind.UNKNOWN or fact.kind is Kind.SUM:  # float(loss) is for the log
            self.unfollowed |= name in ("__int__", "__index__") or (name == "__float__" and fact.kind is Kind.UNKNOWN)
        decides = None if self.trusting else self._decide
        if fact.kind is Kind.WHOLE:
            return number(value, fact.whole, decides=decides)
        return _numbers(value, fact.why or f"{name.strip('_')}() reads values of this microbatch's samples", decides)

    def _decided(self, fact: Fact, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """What a truth value makes a criterion do: what the whole batch would make it do."""
        if fact.whole is not None:
            whole = fact.whole()
            if not whole.is_meta:
                return bool(whole)
        elif id(args[0]) in self._orders:
            self._decide()
        return bool(self.value("__bool__", func, args, kwargs))

    def _decide(self) -> None:
        self.decided = True

    def value(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the host reads from a tensor."""
        return func(*args, **kwargs)

    # Torch's loss functions
    # ------------------------------------------------------------------------------------------------

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = with_lost_weight(func, kwargs)
        bound = SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        old_style = arguments.get("size_average") is not None or arguments.get("reduce") is not None
        call = Call(self, func, func.__name__, args, kwargs)
        if not call.numbers and call.is_constant:
            return self._keep_constant(call)
        if any(holds_samples(known.order) for known in call.facts):
            self._note(call.result, single_samples(call))
            return call.result
        if any(map(are_numbers, call.facts)):
            self._note(call.result, unknown(NUMBERS.format(name=call.name), coupled=True))
            return call.result
        reduction = "none" if old_style else arguments["reduction"]
        elements = elements_of(self, call, arguments)
        # weights that follow from the whole batch have been put in
        if call.args is not args or call.kwargs is not kwargs:
            bound = SIGNATURES[func].bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
        if isinstance(elements, Fact):
            fact = elements
            result = call.result
        elif old_style:
            fact, result = (
                unknown(f"{call.name} with size_average or reduce, deprecated in torch; reduction= works"),
                call.result,
            )
        elif reduction == "none":
            fact, result = elements[0], call.result
        else:
            fact, result = self._reduced(func, arguments, elements)
        self._note(result, fact)
        return result

    def _reduced(self, func: Any, arguments: dict[str, Any], elements: tuple[Fact, Any]) -> tuple[Fact, torch.Tensor]:
        logits, reduction = next(iter(arguments.values())), arguments["reduction"]
        if (
            "input" in arguments
            and logits.dtype in (torch.float16, torch.bfloat16)
            and func is not sharded_cross_entropy
        ):
            # A sum over many tokens exceeds what these can hold. Targets that are no indices have the same dtype.
            for key, value in arguments.items():
                if isinstance(value, torch.Tensor) and value.dtype == logits.dtype:
                    arguments[key] = value.float()
        total = func(**{**arguments, "reduction": "sum"})
        if reduction == "sum":
            return SUM, total
        rows, count = elements
        if reduction == "batchmean":
            if rows.dim != 0:
                return SUM, total / logits.shape[0]
            count = rows.axis.rows if rows.axis is not None else None
        if count is None:
            return unknown("a mean over elements whose number in other microbatches is not known"), total
        if again := recomputed(func.__name__):
            return again, total
        divisor = self._ask(count)
        return SUM, total / divisor.to(device=total.device, dtype=total.dtype)


def _ended(index: int, count: Any) -> torch.Tensor:
    raise ValueError(
        "a number that a criterion read from its batch was used in arithmetic with tensors after the "
        "step; keep float(number)"
    )


def _numbers(value: Any, why: str, decides: Callable[[], None] | None) -> Any:
    return (
        [_numbers(one, why, decides) for one in value]
        if isinstance(value, list)
        else number(value, None, why, decides=decides)
    )


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 where there is none, and -1 for tensors that are computed when they are read, which may share
    it.
    """
    if tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return -1
