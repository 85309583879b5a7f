"""What a head and a criterion do, found out on every rank before the first step of each shape.

Only the rank with the last stage computes the loss. A loss that microbatches cannot compute would come to light there
alone, in the middle of a step, while the others wait for messages. So every rank keeps a copy of the whole model
without memory (on the meta device), runs it for the shapes of the microbatches, then the criterion, follows them as
`terms` does, and raises what comes of it: the same on all ranks.

The criterion runs twice, for n and for 2 n samples. A Python number that enters the arithmetic of both runs with
different values depends on the batch: as the result of `len()` it is known, else (`int(count)`, `1.0 / len(x)`) it
could not be followed and is refused.

A model or criterion that needs real numbers cannot be run like this. Then the last stage finds out by itself, in its
first microbatch.

Where the ranks of a tensor-parallel group hold some columns of the logits each, the criterion runs once more, on logits
that are split in this way. If it works on them, and no number in its arithmetic is another one, it is given split
logits; else they are gathered for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from ...logging import get_dist_logger
from ...models.dry_run import call_model, meta_copy, without_data
from ...models.layer_chain import Unit
from ...ops.vocab_mode import SplitVocabularyError, mark_vocab_sharded, vocab_parallel_loss
from ...ops.vocab_shard import VocabShard
from ...utils import pytree
from ..batch.microbatch import batch_size, items_of, shared_entries
from ..batch.ready import form_of
from .alike import AlikeLayers
from .criterion_copy import without_memory
from .facts import SAMPLES, Fact, Kind, Recipe, names, unknown
from .functions import ARITHMETIC
from .identity import identity
from .probes import difference, not_rows, resized, sample_dims, shapes_of, steered, without_images
from .router_loss import RouterLoss
from .rules import Call
from .terms import TermWatcher
from .weight import (
    HOW_TO_WEIGH,
    NOT_FOLLOWED,
    UNCOUNTED,
    Count,
    Criterion,
    LossError,
    Verdict,
    check_grad,
    check_linear,
    loss_of_output,
)

_LONGEST = 1_000_000  # elements of a tensor that is made a list
# What `int(tensor)` is in the second run; in the first it is 3. A criterion that compares it with a number in between
# does different things in them, and one that takes it for a size is none the slower.
_MANY, _FEW = 33, 5
_REMEMBERED = 256  # verdicts; the least recently used is forgotten


# Functions that are told how many rows there are, in every microbatch rightly.
_SIZED = ARITHMETIC | names(
    """view reshape expand unflatten zeros ones full empty new_zeros new_ones new_full new_empty broadcast_to repeat
    tile"""
)
# `len()` of something may stand in these
_CUTS = names("""getitem setitem arange narrow split chunk tensor_split select""")


def _uncounted(*_: Any) -> torch.Tensor:
    raise CannotFollow


def _buffers(model: nn.Module) -> frozenset[int]:
    return frozenset(id(buffer) for buffer in model.buffers())


def _counts(values: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """bincount"""
    return torch.empty(minlength, dtype=torch.long if weights is None else weights.dtype, device="meta")


def _ctc(log_probs: torch.Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> torch.Tensor:
    each = log_probs.sum((0, 2)) if log_probs.dim() == 3 else log_probs.sum()
    return each if "none" in (reduction, *args[4:5]) else each.sum()


_MADE_UP = {"bincount": _counts, "ctc_loss": _ctc}  # functions whose results have no shape without data


class _EndOfRun(Exception):
    pass


class CannotFollow(Exception):
    """The criterion needs real numbers."""


class _Asked(NamedTuple):
    """See `LossCheck.check`."""

    criterion: Criterion | None
    microbatch: Any
    shared: frozenset[Any]
    weighed: bool
    training: bool
    ready: bool = False  # microbatches are ready-made
    counting: bool = False  # and differ in more than their numbers of rows, so that each is counted in its own way


class LossCheck:
    """Verdicts about losses of one model.

    model  whole, not sharded, as the user gave it; copied here without memory
    units  its chain of layers, behind which the loss begins; empty: nothing is known of them

    split_heads  modules, by name, whose logits the model has split over the vocabulary since
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        trained = [parameter.requires_grad for parameter in model.parameters()]
        self._model = meta_copy(model)
        self._router_loss = RouterLoss(model)
        for parameter, requires_grad in zip(self._model.parameters(), trained, strict=True):
            parameter.requires_grad_(requires_grad)
        self._gate = units[-1].gate if units else None
        self._gate_calls = units[-1].call + 1 if units else 0  # of the gate in a forward, up to the end of the layers
        self._alike = AlikeLayers()
        for unit in [unit for unit in units[:-1] if unit.layer != units[-1].layer]:
            self._alike.run_one_of(self._model.get_submodule(unit.layer))
        self._verdicts: OrderedDict[Hashable, Verdict] = OrderedDict()
        self._held: dict[Hashable, Any] = {}  # criteria that are keys by their id
        self._dims: tuple[int, ...] = ()  # of one verdict, see there
        self._apart: frozenset[str] = frozenset()  # in one verdict functions whose results are no rows of samples
        self._shapes: dict[int, list[torch.Size]] = {}  # of what the last layer returns, by factor of the samples
        self.split_heads: Mapping[str, VocabShard] = {}
        self._warned = False

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[Unit]) -> LossCheck | None:
        """None for a model that cannot be copied: what its loss does is then found out while it runs."""
        try:
            return cls(model, units)
        except Exception:  # a lock or an open file among its attributes
            return None

    def check(
        self,
        criterion: Criterion | None,
        microbatches: Sequence[Any],
        keys: Sequence[Hashable],
        weighed: bool,
        training: bool,
        ready: bool = False,
    ) -> dict[int, Verdict]:
        """Verdict of every microbatch; raises ValueError where the loss is none, or cannot be that of the whole batch.

        keys     of the microbatches: equal where their shapes are
        weighed  microbatches are weighed by what the loss does; else it must just be a loss
        ready    microbatches were made by the user
        """
        whose = identity(criterion)
        found: dict[Hashable, Verdict] = {}
        shared = shared_entries(microbatches)
        counting = ready and weighed and len({form_of(microbatch, shared) for microbatch in microbatches}) > 1
        for key, microbatch in zip(keys, microbatches, strict=True):
            if key in found:
                continue
            known = (whose, key, shared, weighed, training, self._model.training, ready, counting)
            if known not in self._verdicts or not self._verdicts[known].lasting:
                self._verdicts[known] = self._judge(
                    _Asked(criterion, microbatch, shared, weighed, training, ready, counting)
                )
                self._held[known] = criterion
                if len(self._verdicts) > _REMEMBERED:
                    del self._held[self._verdicts.popitem(last=False)[0]]
            self._verdicts.move_to_end(known)
            found[key] = self._verdicts[known]
            if found[key].error is not None:
                raise LossError(found[key].error)
        return {index: found[key] for index, key in enumerate(keys)}

    def returns_of(
        self, names: Collection[str], last: str, inputs: Any, enter: tuple[str, Callable[..., None]]
    ) -> dict[str, Any]:
        """What modules return for `inputs` without data, by name; the forward ends behind the module `last`.

        `enter` is a module and what is called with its arguments as (module, args, kwargs).
        Those inside of layers that do not run because one that is alike has run are left out.
        """
        seen: dict[str, Any] = {}
        with ExitStack() as stack:
            stack.callback(self._alike.forget)
            stack.callback(
                self._model.get_submodule(enter[0]).register_forward_pre_hook(enter[1], with_kwargs=True).remove
            )
            for name in {*names, last}:

                def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                    seen[name] = output
                    if name == last:
                        raise _EndOfRun

                stack.callback(self._model.get_submodule(name).register_forward_hook(note).remove)
            stack.enter_context(without_data())
            stack.enter_context(torch.no_grad())
            with suppress(_EndOfRun):
                call_model(self._model, without_images(inputs))
        return seen

    @property
    def model(self) -> nn.Module:
        """The copy without memory."""
        return self._model

    def follow_mode(self, training: bool) -> None:
        """The model is in training or in evaluation mode."""
        if training != self._model.training:
            self._model.train(training)

    def _judge(self, asked: _Asked) -> Verdict:
        verdicts = []
        for guess in (True, False):  # what `if mask.any()` finds
            self._dims, self._shapes, self._apart = (), {}, frozenset()
            runs = self._runs(asked, guess)
            if asked.weighed and (dims := sample_dims(self._shapes.get(1, []), self._shapes.get(2, []))):
                self._dims = dims
                runs = self._runs(asked, guess)
            seen = [run.taken_for_rows for run in runs if not isinstance(run, Exception)]
            if len(seen) == 2 and (apart := not_rows(*seen)):
                self._apart = apart
                runs = self._runs(asked, guess)
            verdicts.append(replace(_verdict(runs, batch_size(asked.microbatch)), dims=self._dims))
            if self.split_heads and verdicts[-1].error is None:
                verdicts[-1] = self._with_split_logits(asked, guess, runs[0], verdicts[-1])
            if verdicts[-1].followed and verdicts[-1].error is None:
                return self._with_counts(asked, runs[0], verdicts[-1]) if asked.counting else verdicts[-1]
        verdict = next((verdict for verdict in verdicts if not verdict.followed), verdicts[0])
        return replace(verdict, error=UNCOUNTED) if asked.counting and verdict.error is None else verdict

    def _runs(self, asked: _Asked, guess: bool) -> list[_MetaWatcher | Exception]:
        runs: list[_MetaWatcher | Exception] = []
        for factor in (1, 2) if asked.weighed else (1,):
            for many in (_MANY, _FEW) if factor == 2 else (_FEW,):
                found: _MetaWatcher | Exception
                try:
                    found = self._alike.tried(partial(self._run, asked, factor, guess, many=many))
                except Exception as error:  # the user's own code: anything can happen
                    found = error
                if isinstance(found, _MetaWatcher | LossError):
                    break  # else there may be less of something than `many`
            runs.append(found)
        return runs

    @staticmethod
    def _with_counts(asked: _Asked, run: _MetaWatcher | Exception, verdict: Verdict) -> Verdict:
        """`verdict` with how to count in microbatches of this form; refused where that takes what only a real run
        has.
        """
        assert isinstance(run, _MetaWatcher)
        entries = {**dict(items_of(asked.microbatch)), SAMPLES: batch_size(asked.microbatch)}
        try:
            with torch.no_grad():
                made = [torch.as_tensor(count(entries)) for count in run.counts]
        except Exception:  # a tensor without data among the others
            return Verdict(error=UNCOUNTED)
        if any(count.is_meta for count in made):
            return Verdict(error=UNCOUNTED)
        return replace(verdict, counts=tuple(run.counts), lasting=not run.has_kept)

    def _with_split_logits(
        self, asked: _Asked, guess: bool, whole: _MetaWatcher | Exception, verdict: Verdict
    ) -> Verdict:
        """`verdict`, found on whole logits, with what becomes of them when they are split."""
        try:
            numbers: Any = self._alike.tried(partial(self._run, asked, 1, guess, split=True)).numbers
        except LossError as error:
            return Verdict(error=str(error))
        except Exception:
            numbers = None
        gathers = asked.criterion is not None and (isinstance(whole, Exception) or whole.numbers != numbers)
        if gathers and not self._warned:
            self._warned = True
            shard = next(iter(self.split_heads.values()))
            get_dist_logger().warning(
                f"the criterion needs all {shard.size} columns of the logits, of which each of {shard.group.size()} "
                "tensor-parallel ranks has some: they are gathered for it, whole on every one of them. F.cross_entropy "
                "needs no gathering, unless it has class weights or probabilities",
                ranks=[0],
            )
        return replace(verdict, gathers=gathers)

    def _run(self, asked: _Asked, factor: int, guess: bool, split: bool = False, many: int = _FEW) -> _MetaWatcher:
        """Follow head and criterion for `factor` times the samples.

        split  logits are split over the vocabulary; all that is asked is whether the criterion can read them
        """
        samples = batch_size(asked.microbatch)
        criterion, inputs = without_memory(asked.criterion), resized(asked.microbatch, samples, factor, asked.shared)
        watcher = _MetaWatcher(self._model, inputs, samples * factor, factor, guess, asked.shared, asked.ready)
        watcher.not_rows, watcher.many = self._apart, many
        watched = asked.weighed or bool(self.split_heads)
        with ExitStack() as stack:
            stack.callback(self._alike.forget)
            stack.enter_context(without_data())
            stack.enter_context(torch.set_grad_enabled(asked.training))
            if watched and self._gate is not None:
                gate, calls = self._model.get_submodule(self._gate), count(1)

                def enter(module: nn.Module, args: Any, output: Any) -> None:
                    if next(calls) != self._gate_calls:
                        return
                    self._shapes[factor] = shapes_of(output)
                    watcher.seed(output, self._dims)
                    stack.enter_context(watcher)
                    stack.enter_context(self._router_loss.weighed(watcher))

                handle = gate.register_forward_hook(enter)
                stack.callback(handle.remove)
            elif watched:
                stack.enter_context(watcher)
                stack.enter_context(self._router_loss.weighed(watcher))
            if split:
                self._split_logits(stack)
            output = call_model(self._model, without_images(inputs))
        with without_data(), torch.set_grad_enabled(asked.training), ExitStack() as stack:
            if split:
                stack.enter_context(vocab_parallel_loss(marked=True))
            if watched:
                watcher.enter_criterion(output)
                stack.enter_context(watcher)
            loss = loss_of_output(criterion, output, inputs)
        if split:
            if _is_lost(watcher, loss):
                raise CannotFollow
            return watcher
        if asked.weighed:
            check_linear(watcher, loss)
        if asked.training:
            check_grad(loss)
        return watcher

    def _split_logits(self, stack: ExitStack) -> None:
        """Until `stack` ends, let the heads return marked logits as wide as a rank's share of the vocabulary."""

        def refuse(kind: Any, error: Any, traceback: Any) -> None:
            if isinstance(error, SplitVocabularyError):
                raise LossError(f"{type(self._model).__name__}.forward: {error}") from error

        stack.push(refuse)
        stack.enter_context(vocab_parallel_loss())
        for name, shard in self.split_heads.items():

            def cut(module: nn.Module, args: Any, logits: torch.Tensor, shard: VocabShard = shard) -> torch.Tensor:
                columns = torch.empty((*logits.shape[:-1], shard.local), dtype=logits.dtype, device="meta")
                return mark_vocab_sharded(columns.requires_grad_(logits.requires_grad).clone(), shard)

            stack.callback(self._model.get_submodule(name).register_forward_hook(cut).remove)


class _MetaWatcher(TermWatcher):
    """Follows tensors without data. `factor` tells runs apart, `guess` is what truth values are taken to be."""

    def __init__(
        self,
        model: nn.Module,
        microbatch: Any,
        samples: int,
        factor: int,
        guess: bool,
        shared: frozenset[Any],
        ready: bool = False,
    ) -> None:
        def total(index: int, count: Count) -> torch.Tensor:
            self.counts.append(count)
            return torch.ones((), dtype=torch.float64, device="meta")

        buffers = partial(_buffers, model)
        super().__init__(microbatch, samples, total, buffers, shared=shared, ready=ready)
        self.counts: list[Count] = []  # what was asked of the whole batch
        self.has_kept = False  # whether counts hold tensors of the criterion's
        # function, number, its place if len() may have returned it
        self.numbers: list[tuple[str, float, int | None]] = []
        # functions of a head, with numbers beside their tensors: whether these may be sizes
        self.steering: dict[tuple[str, float], bool] = {}
        self.taken_for_rows: list[tuple[str, torch.Size]] = []  # results of functions that are not followed
        self.not_rows: frozenset[str] = frozenset()  # functions whose results must not be
        self.many = _FEW  # what int() of values is in the second run
        self._num_unseen = 0  # tensors of the model that came from somewhere else
        self._factor = factor
        self._guess = guess
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._real: dict[int, torch.Tensor] = {}  # the other way round
        self._is_made_up = False  # the function that runs stands in for one that has no shape without data
        self._truth: dict[int, bool] = {}
        self.counting = True

    def _run(self, func: Any, name: str, in_place: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("cpu", "cuda") or (name == "to" and not args[0].is_meta):
            func, args, kwargs = torch.Tensor.view_as, (args[0], args[0]), {}
        elif name == "to":
            args = (args[0], *(value for value in args[1:] if not isinstance(value, str | torch.device)))
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            if len(args) == 1 and not kwargs.keys() & {"dtype"}:
                func, args, kwargs = torch.Tensor.view_as, (args[0], args[0]), {}
        if self.trusting and (name in ARITHMETIC or name == "arange"):
            self.numbers += [
                (name, float(value), None)
                for value in (*args, *kwargs.values())
                if type(value) in (int, float) and not (name == "arange" and value in self.lengths)
            ]
        elif self.trusting:
            self._note_steering(name, (args, kwargs))
        elif name in ("tensor", "as_tensor") and args and isinstance(args[0], list | tuple):
            self.numbers.append((name, float(len(args[0])), None))
            self._note_numbers(name, args[0])
        elif name not in _SIZED and not self._takes_sample(name, args):
            self._note_numbers(name, (*args, *kwargs.values()))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        # Heads ask by unique_consecutive whether samples have equally many of something, and need one answer.
        if name == "unique" or (name == "unique_consecutive" and not self.trusting):
            func = self._distinct
        func = _MADE_UP.get(name, func)
        self._is_made_up = func in (self._distinct, *_MADE_UP.values())
        result = super()._run(func, name, in_place, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool and not result.dim():
            self._truth[id(result)] = self._truth_of(name, args)
        return result

    def _with_recipe(self, call: Call, fact: Fact, place: int) -> Fact:
        found = super()._with_recipe(call, fact, place)
        if self._is_made_up and found.recipe is not None:
            return found._replace(recipe=Recipe(None, _uncounted, (found.recipe,)))
        return found

    def _may_be_rows(self, call: Call, tensor: torch.Tensor) -> bool:
        if call.name in self.not_rows or not super()._may_be_rows(call, tensor):
            return False
        self.taken_for_rows.append((call.name, tensor.shape))
        return True

    def _unseen(self, tensor: torch.Tensor) -> Fact:
        found, name = super()._unseen(tensor), f"<unseen {self._num_unseen}>"
        self._num_unseen += 1
        if found.kind is Kind.ROWS and name in self.not_rows:
            found = unknown("a value of the model of which there are not twice as many for twice the samples")
            self._note(tensor, found)
        elif found.kind is Kind.ROWS:
            self.taken_for_rows.append((name, tensor.shape))
        return found

    def kept(self, constant: torch.Tensor) -> torch.Tensor:
        real = self._real.get(id(constant))
        self.has_kept |= real is not None
        return constant if real is None else real

    def _note_numbers(self, name: str, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, tuple | list):
                self._note_numbers(name, value)
            elif isinstance(value, slice):
                self._note_numbers(name, (value.start, value.stop, value.step))
            elif type(value) in (int, float) and not (name in _CUTS and value in self.lengths):
                self.numbers.append((name, float(value), None))

    def _takes_sample(self, name: str, args: tuple[Any, ...]) -> bool:
        if name != "getitem" or type(args[1]) is not int:
            return False
        fact = self.fact(args[0])
        return fact.kind is Kind.ROWS and fact.dim == 0

    def _note_steering(self, name: str, values: Any) -> None:
        """Numbers that tell a function of a head what to do, each once: heads may loop over samples. Numbers of
        samples, with which layers have been called, are sizes.
        """
        if name in _SIZED or not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(values[0])):
            return
        if self._takes_sample(name, values[0]):
            return
        slices = [one for one in pytree.tree_leaves(values) if isinstance(one, slice)]
        ends = [end for one in slices for end in (one.start, one.stop, one.step)]
        for value in (*pytree.tree_leaves(values), *ends):
            if type(value) in (int, float):
                self.steering[name, float(value)] = value == self.samples or value in self.lengths

    def _with_lengths(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name == "full" and not self.trusting:
            self.numbers += [(name, float(value), None) for value in args[1:] if type(value) in (int, float)]
        return super()._with_lengths(name, args, kwargs)

    def _plain_number(self, name: str, value: Any) -> Any:
        if type(value) not in (int, float):
            return value
        found = self.lengths.get(value)
        self.numbers.append((name, float(value), None if found is None else self.num_plain))
        self.num_plain += 1
        return value if found is None else found

    def _distinct(self, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """unique: how many there are is another number in each run."""
        found = [values.new_empty(1 + self._factor)]
        if kwargs.get("return_inverse"):
            found.append(torch.empty_like(values, dtype=torch.long))
        if kwargs.get("return_counts"):
            found.append(torch.empty(1 + self._factor, dtype=torch.long, device=values.device))
        return found[0] if len(found) == 1 else tuple(found)

    def _truth_of(self, name: str, args: tuple[Any, ...]) -> bool:
        """What guards ask: something is there (`count > 0`, `mask.any()`), and nothing is wrong (`isnan().any()`,
        `(ids < size).all()`).
        """
        if name in ("eq", "lt", "le", "isnan", "isinf", "logical_not"):
            return False
        if name == "any":
            return self._guess
        return True

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        return super()._loss(func, args, kwargs)

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        found = self._moved.get(id(tensor))
        if found is None:
            found = self._moved[id(tensor)] = (tensor, tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
            self._real[id(found[1])] = tensor
            self._note(found[1], self.fact(tensor))
        return found[1]

    def value(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not tensor.is_meta:
            return func(*args, **kwargs)
        if name in ("numpy", "__array__") or tensor.numel() > _LONGEST:
            raise CannotFollow(name)
        if name == "tolist":  # as many different values as there are elements
            return torch.arange(tensor.numel(), device="cpu").to(tensor.dtype).reshape(tensor.shape).tolist()
        if tensor.dtype == torch.bool:
            return self._truth.get(id(tensor), True)
        # Comparisons of what `.item()` returns are decided as the whole batch would.
        made_up = 1 + 2 * self._factor if name == "item" or self._factor == 1 else self.many
        return (
            True
            if name == "__bool__"
            else float(made_up)
            if tensor.is_floating_point() or name == "__float__"
            else made_up
        )


def _verdict(runs: Sequence[_MetaWatcher | Exception], samples: int) -> Verdict:
    """Of one run, or of two with `samples` and twice as many."""
    refused = next((run for run in runs if isinstance(run, LossError)), None)
    if refused is not None:
        return Verdict(error=str(refused))
    if isinstance(runs[0], Exception):
        if len(runs) == 2 and not isinstance(runs[1], Exception):
            return Verdict(
                error=f"the criterion works for {2 * samples} samples, but fails for a microbatch of {samples}: "
                f"{runs[0]}. If rows of "
                "the batch belong together, choose num_microbatches or microbatch_size so that no microbatch parts them"
            )
        return NOT_FOLLOWED
    if len(runs) == 1:
        return Verdict()
    if isinstance(runs[1], Exception):
        return NOT_FOLLOWED
    name, lengths = difference(runs[0].numbers, runs[1].numbers)
    if name is None:
        name = steered(runs[0].steering, runs[1].steering)
    if name is None:
        return Verdict(lengths=lengths)
    return Verdict(
        error="the loss cannot be made that of the whole batch from microbatches: a Python number that depends on the "
        "batch "
        f"enters {name}() in a way that cannot be followed (int(), float(), and a float on the left of * and / end "
        "it); write "
        f"the count as a tensor, .shape or .item(), on the right. {HOW_TO_WEIGH}"
    )


def _is_lost(watcher: TermWatcher, loss: torch.Tensor) -> bool:
    """Whether the loss was computed in a way that is not followed: it may have read the logits unseen."""
    fact = watcher.fact(loss)
    return fact.kind is Kind.UNKNOWN and not fact.coupled
