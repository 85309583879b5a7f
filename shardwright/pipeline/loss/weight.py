"""The loss of the global batch: what each microbatch contributes so that the sum is what one process computes from
everything.

How a microbatch's loss is weighted, first rule that applies:

    one microbatch, one rank     the loss itself
    criterion.weight(inputs)     loss * weight / (sum of weights over microbatches and data-parallel ranks)
    a sum over samples           the head's and the criterion's means are taken over the global batch one by one
                                 (`terms`)
    else                         ValueError: how microbatches weigh cannot be known

Weights, parts and totals are at least fp32, whatever the model computes in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...ops.vocab_mode import vocab_parallel_loss, whole_logits
from ...utils.tensors import map_tensors
from ..batch.microbatch import Path, batch_size, exact, items_of, shared_entries, tensors_by_path
from ..batch.ready import Microbatches, form_of
from .facts import SAMPLES, Kind
from .router_loss import RouterLoss
from .samples import is_whole
from .terms import TermWatcher

Criterion = Callable[..., torch.Tensor]
Count = Callable[[Mapping[Any, Any]], Any]  # of the entries of a batch
_LOSS: Path = ("loss",)  # of what a model returns as its loss

HOW_TO_WEIGH = (
    "Pass a criterion with criterion.weight(inputs) -> number (for example the number of label tokens): the loss is "
    "then the mean of the microbatches' losses with these weights; see docs/losses.md. Or use one microbatch on one "
    "data-parallel rank (microbatch_size=None, num_microbatches=1)"
)


UNCOUNTED = (
    "the ready-made microbatches differ in more than their number of samples, and what the loss counts in them "
    "(tokens, samples, weights) cannot be told ahead for each: counts must follow from the batch's entries by "
    f"functions of torch, without tensors that are made for one length (torch.arange) or by the model. {HOW_TO_WEIGH}"
)


@dataclass(frozen=True)
class Verdict:
    """What following a criterion on the meta device has shown.

    error    why the loss is refused
    lengths  places in its arithmetic where the plain int that len() returned stands
    followed False when it could not be followed
    gathers  logits of which every rank holds some columns must be gathered for the criterion, which reads all of them
    counts   what head and criterion ask of the whole batch, in order: how to count it in a microbatch of this form;
             None: as in the first
    lasting  it holds for other microbatches of this form as well
    dims     of the tensors that the last layer returns, which dim counts samples; (): dim 0
    """

    error: str | None = None
    lengths: frozenset[int] = frozenset()
    followed: bool = True
    gathers: bool = False
    counts: tuple[Count, ...] | None = None
    lasting: bool = True
    dims: tuple[int, ...] = ()


NOT_FOLLOWED = Verdict(followed=False, gathers=True)


class LossError(ValueError):
    """What a model or criterion returns is no loss, or none that microbatches can compute."""


def loss_of_output(criterion: Criterion | None, output: Any, microbatch: Any) -> torch.Tensor:
    """The loss of one microbatch, a scalar."""
    if criterion is not None:
        loss: Any = criterion(output, microbatch)
    else:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        kind = next((base for base in (bool, int, float) if isinstance(loss, base)), type(loss)).__name__
        what = "the criterion" if criterion is not None else "the model"
        hint = " (the loss must be the only thing that it returns)" if isinstance(loss, tuple | list | dict) else ""
        raise LossError(
            f"no loss: {what} returned {kind}{hint}; pass labels in the batch so that the model computes one, or a "
            "criterion(outputs, inputs) -> scalar tensor. To get outputs alone leave the optimizer out and pass "
            "return_loss=False"
        )
    if loss.dim() != 0:
        raise LossError(
            f"the loss must be a scalar, but {'the criterion' if criterion is not None else 'the model'} returned a "
            f"tensor of shape {tuple(loss.shape)}; end it with .mean() or .sum()"
        )
    return loss


def check_grad(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise LossError(
            "the loss does not require grad: it was detached (.item(), .detach(), torch.no_grad()), or every parameter "
            "that it depends on is frozen; leave the optimizer out to evaluate"
        )


def check_linear(watcher: TermWatcher, loss: torch.Tensor) -> None:
    """Refuse a loss that is not the sum of what microbatches contribute."""
    if watcher.decided:
        raise LossError(
            "the loss cannot be made that of the whole batch from microbatches: the criterion compares values of this "
            "microbatch with < or > and may do different things in different microbatches; choose with torch.where or "
            f"clamp. {HOW_TO_WEIGH}"
        )
    fact = watcher.fact(loss)
    if fact.kind is Kind.SUM or (fact.kind is Kind.ROWS and is_whole(fact)):
        return
    why = {
        Kind.CONST: "it is the same number for every batch",
        Kind.ROWS: "it belongs to a single sample; a batch of more would have several",
        Kind.WHOLE: "it is computed from the batch's entries alone, without the model's outputs",
        Kind.UNKNOWN: fact.why,
    }[fact.kind]
    raise LossError(f"the loss cannot be made that of the whole batch from microbatches: {why}. {HOW_TO_WEIGH}")


def needs_no_weights(num_microbatches: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a microbatch is the whole global batch."""
    return num_microbatches == 1 and (group is None or dist.get_world_size(group) == 1)


class GlobalLoss:
    """Weights of one step's microbatches. Collectives over `group` run in an order that is the same on all its ranks.

    batch         of this data-parallel rank, or its ready-made microbatches; nobody writes to it
    microbatches  its parts, which the model and the criterion get, and may write to
    criterion     (outputs, inputs) -> loss, or None for the loss that the model computed itself
    group         ranks whose microbatches belong to the same global batch (data parallel; None: just this process)
    device        where the loss lives
    constants     ids of the model's buffers, see `TermWatcher`
    split_logits  the model's logits are split over the vocabulary, see `ops.vocab_mode`
    router_loss   of the model, which has one
    """

    def __init__(
        self,
        batch: Any,
        microbatches: Sequence[Any],
        criterion: Criterion | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
        constants: Callable[[], frozenset[int]] = frozenset,
        split_logits: bool = False,
        router_loss: RouterLoss | None = None,
    ) -> None:
        self.microbatches = list(microbatches)
        self.is_ready = isinstance(batch, Microbatches)
        self._counted = list(batch) if self.is_ready else [batch]  # batches in which tokens and the like are counted
        self.criterion = criterion
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.device = device
        self.total: torch.Tensor | None = None  # of this rank, over the microbatches done
        self.checked: Mapping[int, Verdict] = {}  # by microbatch, what is known of the criterion before it runs
        self._constants = constants
        self._split_logits = split_logits
        self.router_loss = router_loss
        self._answers: list[torch.Tensor] = []
        self._watchers: dict[int, TermWatcher] = {}
        self._num_questions: int | None = None
        self._watched_one = False
        self._whole = needs_no_weights(len(self.microbatches), self.group)
        self._weights = None if self._whole else given_weights(criterion, self.microbatches, alone=self.group is None)
        self._samples = [batch_size(microbatch) for microbatch in self.microbatches]
        self._shared = shared_entries(self.microbatches)
        self._weight_sum: torch.Tensor | None = None
        self.summed_entries: dict[Path, torch.Tensor] = {}  # of the model's outputs: global means, once reported
        self.is_outputs_own = True  # whether all losses are what the model returns as such, or nobody knows

    @property
    def is_watched(self) -> bool:
        """Whether weights follow from what head and criterion do."""
        return not self._whole and self._weights is None

    def follow_as_part(self) -> None:
        """Compute the loss of a batch that is alone as that of one among several, of which weights are needed."""
        self._whole = False
        self._weights = given_weights(self.criterion, self.microbatches, alone=False)

    def refuse_uncounted(self) -> None:
        """Nobody has looked ahead, so ready-made microbatches must be alike for the first one to tell how to count
        in all.
        """
        if (
            self.is_ready
            and self.is_watched
            and len({form_of(microbatch, self._shared) for microbatch in self.microbatches}) > 1
        ):
            raise LossError(UNCOUNTED)

    def watch(self, index: int, seen: Any = None) -> AbstractContextManager[Any]:
        """Context for the head of microbatch `index`; `seen` is what the last layer returned."""
        if not self.is_watched:
            return nullcontext()
        watcher = TermWatcher(
            self.microbatches[index],
            self._samples[index],
            self._answer,
            self._constants,
            recording=not self._watched_one,
            shared=self._shared,
            ready=self.is_ready,
        )
        self._watched_one = True
        watcher.seed(seen, self.checked.get(index, NOT_FOLLOWED).dims)
        self._watchers[index] = watcher
        return watcher if self.router_loss is None else _both(watcher, self.router_loss.weighed(watcher))

    def contribution(self, index: int, output: Any) -> torch.Tensor:
        """This microbatch's part of the global loss, a scalar with gradient."""
        watcher = self._watchers.pop(index, None)
        if self._split_logits and self.criterion is not None and self.checked.get(index, NOT_FOLLOWED).gathers:
            output = _gathered(output, watcher)
        with vocab_parallel_loss(marked=True) if self._split_logits else nullcontext():
            if watcher is None:
                loss = loss_of_output(self.criterion, output, self.microbatches[index])
                self._compare_own(loss, output)
                part = self._weighted(loss, index)
            else:
                part = self._followed(watcher, index, output)
        detached = part.detach()
        self.total = detached if self.total is None else self.total + detached
        return part

    def reported(self) -> torch.Tensor:
        """The loss of the global batch, the same on every rank of the group, and with it the entries of outputs that
        are such losses.
        """
        assert self.total is not None
        if self.group is None:
            return self.total.clone()
        # Where the loss is the model's own it goes as an entry, too: on another rank the criterion may have done
        # something with it, depending on the batch, and all ranks must send equally much.
        own = {_LOSS: self.total} if self.is_watched and self.is_outputs_own else {}
        summed = dict(sorted({**own, **self.summed_entries}.items(), key=lambda entry: entry[0] != _LOSS))
        mine = [self.total, *summed.values()]
        widest = functools.reduce(torch.promote_types, (part.dtype for part in mine))
        sums = torch.stack([part.to(widest) for part in mine])
        dist.all_reduce(sums, group=self.group)
        total, *entries = (value.to(part.dtype) for part, value in zip(mine, sums.unbind(), strict=True))
        self.summed_entries = dict(zip(summed, entries, strict=True))
        return total

    def _followed(self, watcher: TermWatcher, index: int, output: Any) -> torch.Tensor:
        verdict = self.checked.get(index, NOT_FOLLOWED)
        watcher.enter_criterion(output)
        watcher.lengths_at, watcher.counting = verdict.lengths, bool(verdict.lengths)
        with watcher:
            loss = loss_of_output(self.criterion, output, self.microbatches[index])
        check_linear(watcher, loss)
        if not verdict.followed and (watcher.unfollowed or watcher.lengths):
            raise LossError(
                "the loss cannot be made that of the whole batch from microbatches: the criterion reads counts of the "
                "batch with len(), int(), float() or numpy, which leaves open what it does with them; use tensors, "
                f".shape or .item(). {HOW_TO_WEIGH}"
            )
        if self._num_questions is None:
            self._num_questions = watcher.num_questions
        if watcher.num_questions != self._num_questions:
            raise LossError(
                f"the loss has {self._num_questions} means or counts in the first microbatch and "
                f"{watcher.num_questions} in microbatch {index}: it takes another way there. {HOW_TO_WEIGH}"
            )
        owned = self.total if self.is_outputs_own else None  # of microbatches that gave it back as it was
        self._compare_own(loss, output)
        for path, value in tensors_by_path(output):
            if path == _LOSS and self.is_outputs_own:
                continue  # which `total` is
            if not value.dim() and watcher.is_sum(value):
                part, before = exact(value.detach()), self.summed_entries.get(path, owned if path == _LOSS else None)
                self.summed_entries[path] = part if before is None else before + part
        watcher.close()
        return exact(loss)

    def _compare_own(self, loss: torch.Tensor, output: Any) -> None:
        is_own = any(value is loss for path, value in tensors_by_path(output) if path == _LOSS)
        self.is_outputs_own = self.is_outputs_own and is_own

    def _weighted(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        if self._whole:
            return loss
        assert self._weights is not None
        if self._weight_sum is None:
            self._weight_sum = self._summed([torch.as_tensor(weight).reshape(()) for weight in self._weights])
        wide = exact(loss)
        return wide * (self._weights[index] / self._weight_sum).to(device=wide.device, dtype=wide.dtype)

    def _answer(self, index: int, count: Count) -> torch.Tensor:
        """`count(entries)` of the global batch, computed when the first microbatch asks question `index`."""
        if index == len(self._answers):
            if self._num_questions is not None:
                raise LossError(
                    "the loss takes another way in this microbatch than in the one before: it counts "
                    f"more. {HOW_TO_WEIGH}"
                )
            with torch.no_grad():
                self._answers.append(self._summed([torch.as_tensor(part) for part in self._parts(index, count)]))
        return self._answers[index]

    def _parts(self, index: int, count: Count) -> list[Any]:
        """What question `index` comes to in this rank's batch, or in each of its ready-made microbatches; `count` is
        the first one's.
        """
        if not self.is_ready:
            return [count({**dict(items_of(self._counted[0])), SAMPLES: sum(self._samples)})]
        parts = []
        for place, (batch, samples) in enumerate(zip(self._counted, self._samples, strict=True)):
            counts = self.checked.get(place, NOT_FOLLOWED).counts
            if counts is not None and index >= len(counts):
                raise LossError(
                    f"the loss counts more in this microbatch than was found when it was followed ahead. {HOW_TO_WEIGH}"
                )
            parts.append((count if counts is None else counts[index])({**dict(items_of(batch)), SAMPLES: samples}))
        return parts

    def _summed(self, counts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.stack(
            [count.to(device=self.device, dtype=torch.float64, non_blocking=True) for count in counts]
        ).sum(0)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _gathered(output: Any, watcher: TermWatcher | None) -> Any:
    """What the model returned, with all columns of logits of which this rank holds some."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        whole = whole_logits(tensor)
        if watcher is not None and whole is not tensor:
            watcher.hand_on(tensor, whole)
        return whole

    return map_tensors(gather, output)


def given_weights(criterion: Criterion | None, microbatches: Sequence[Any], alone: bool) -> list[Any] | None:
    """criterion.weight of every microbatch, or None without such a method. `alone`: no other rank has microbatches
    of the batch.
    """
    weigh = getattr(criterion, "weight", None)
    if not callable(weigh):
        return None
    weights = [weigh(microbatch) for microbatch in microbatches]
    known = []
    for index, weight in enumerate(weights):
        if isinstance(weight, torch.Tensor):
            is_number, number = weight.numel() == 1, weight.detach() if weight.device.type == "cpu" else None
        else:
            is_number, number = isinstance(weight, int | float) and not isinstance(weight, bool), weight
        if not is_number:
            shown = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
            raise ValueError(
                f"criterion.weight(inputs) returned {shown} for microbatch {index}; it must return one number, such as "
                "(inputs['labels'] != -100).sum()"
            )
        if number is not None:
            known.append(float(number))
            if not (math.isfinite(known[-1]) and known[-1] >= 0):
                raise ValueError(
                    f"criterion.weight(inputs) returned {known[-1]} for microbatch {index}; a weight must be finite "
                    "and not negative"
                )
    if alone and len(known) == len(weights) and not sum(known):
        raise ValueError(
            "criterion.weight(inputs) returned 0 for every microbatch of the batch, so its loss is a mean over nothing"
        )
    return weights
