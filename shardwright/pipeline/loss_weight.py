"""The loss of the global batch: what each microbatch contributes so that the sum is what one process computes from everything.

How a microbatch's loss is weighted, first rule that applies:

    criterion.weight(inputs)     loss * weight / (sum of weights over microbatches and data-parallel ranks)
    loss terms found             the head's or criterion's means are taken over the global batch one by one (`loss_terms`)
    no integer labels in batch, and no division by a number that follows from the batch (a masked mean written by hand)
                                 loss * samples / (all samples)
    else                         ValueError: the tokens that count cannot be known
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from .loss_terms import SAMPLES, Elements, TermWatcher
from .microbatch import batch_size, items_of


class GlobalLoss:
    """Weights of one step's microbatches. Collectives over `group` run in an order that is the same on all its ranks.

    microbatches  all microbatches of this data-parallel rank
    criterion     (outputs, inputs) -> loss, or None for the loss that the model computed itself
    group         ranks whose microbatches belong to the same global batch (data parallel; None: just this process)
    device        where the loss lives
    """

    def __init__(
        self,
        microbatches: Sequence[Any],
        criterion: Callable[..., torch.Tensor] | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.microbatches = list(microbatches)
        self.criterion = criterion
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.device = device
        self.total: torch.Tensor | None = None  # of this rank, over the microbatches done
        self._divisors: list[torch.Tensor] = []
        self._watchers: dict[int, TermWatcher] = {}
        self._num_terms: int | None = None
        self._weights: list[Any] | None = None
        weigh = getattr(criterion, "weight", None)
        if callable(weigh):
            self._weights = [weigh(microbatch) for microbatch in self.microbatches]
        self._whole = self.group is None and len(self.microbatches) == 1
        self._samples = [batch_size(microbatch) for microbatch in self.microbatches]
        self._weight_sum: torch.Tensor | None = None
        self.summed_entries: frozenset[str] = frozenset()  # names of the model's outputs that are parts of global means

    def watch(self, index: int) -> AbstractContextManager[Any]:
        """Context for the head of microbatch `index`."""
        if self._whole or self._weights is not None:
            return nullcontext()
        watcher = TermWatcher(self.microbatches[index], self._divisor)
        watcher.entries[SAMPLES] = self._samples[index]
        self._watchers[index] = watcher
        return watcher

    def contribution(self, index: int, output: Any) -> torch.Tensor:
        """This microbatch's part of the global loss, a scalar with gradient."""
        watcher = self._watchers.pop(index, None)
        with watcher if watcher is not None else nullcontext():
            loss = self._loss(output, index)
        if loss.dim() != 0:
            raise ValueError(f"the loss must be a scalar, but the criterion returned a tensor of shape {tuple(loss.shape)}")
        part = self._weighted(loss, index, watcher)
        if watcher is not None and isinstance(output, dict):
            self.summed_entries = frozenset(
                key for key, value in output.items() if isinstance(value, torch.Tensor) and watcher.is_linear(value)
            )
        detached = part.detach()
        self.total = detached if self.total is None else self.total + detached
        return part

    def reported(self) -> torch.Tensor:
        """The loss of the global batch, the same on every rank of the group."""
        assert self.total is not None
        total = self.total.clone()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def _loss(self, output: Any, index: int) -> torch.Tensor:
        if self.criterion is not None:
            loss: Any = self.criterion(output, self.microbatches[index])
        else:
            loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"no loss: {'the criterion' if self.criterion is not None else 'the model'} returned {type(loss).__name__}; pass labels in "
                "the batch so that the model computes one, or a criterion(outputs, inputs) -> scalar tensor"
            )
        return loss

    def _weighted(self, loss: torch.Tensor, index: int, watcher: TermWatcher | None) -> torch.Tensor:
        if self._whole:
            return loss
        if self._weights is not None:
            return self._by_weight(loss, self._weights, index)
        assert watcher is not None
        if self._num_terms is None:
            self._num_terms = watcher.num_terms
        if watcher.num_terms != self._num_terms:
            raise ValueError(
                f"the loss has {self._num_terms} mean terms in the first microbatch and {watcher.num_terms} in microbatch {index}; "
                "pass a criterion with criterion.weight(inputs) -> number"
            )
        if watcher.num_terms and watcher.is_linear(loss):
            return loss
        labels = [
            key
            for key, value in items_of(self.microbatches[index])
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and ("label" in str(key) or "position" in str(key))
            if str(key) not in ("position_ids", "positions")
        ]
        if watcher.num_terms or watcher.counts_itself or labels:
            raise ValueError(
                "the loss cannot be made that of the whole batch from microbatches: it is not a sum of means that torch's loss functions "
                f"computed ({watcher.num_terms} were found), so how microbatches weigh is unknown. Mixture-of-experts auxiliary losses are "
                "such parts (set output_router_logits=False). Pass a criterion with criterion.weight(inputs) -> number (for example the "
                "number of label tokens), or use one microbatch"
            )
        return self._by_weight(loss, self._samples, index)

    def _by_weight(self, loss: torch.Tensor, weights: Sequence[Any], index: int) -> torch.Tensor:
        if self._weight_sum is None:
            self._weight_sum = self._summed([torch.as_tensor(weight) for weight in weights])
        return loss * (weights[index] / self._weight_sum.to(loss.device)).to(loss.dtype)

    def _divisor(self, index: int, elements: Elements) -> torch.Tensor:
        """Elements of term `index` in the global batch, counted when the first microbatch meets the term."""
        if index == len(self._divisors):
            counts = []
            for microbatch, samples in zip(self.microbatches, self._samples, strict=True):
                entries = dict(items_of(microbatch))
                entries[SAMPLES] = samples
                with torch.no_grad():
                    counts.append(torch.as_tensor(elements.count(entries)))
            self._divisors.append(self._summed(counts))
        return self._divisors[index]

    def _summed(self, counts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([count.to(device=self.device, dtype=torch.float64, non_blocking=True) for count in counts]).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total
