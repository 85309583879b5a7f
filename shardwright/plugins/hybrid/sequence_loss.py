"""What becomes of the loss where every rank of the sequence axis computes that of its part.

The loss of the whole sequences is a sum over the ranks, of which each differentiates its own summand. Gradients are
averaged over the ranks of the axis as over all others, so that each summand counts n times in backward, and what a
script adds that all ranks compute alike (a penalty on weights) counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.vocab_mode import view_of
from ...utils.tensors import map_tensors
from .sequence_axis import SequenceAxis

_COMPARED = 3  # backwards


class SequenceLoss:
    """Adds up what the ranks make of the loss.

    group   the ranks of the axis
    """

    def __init__(self, axis: SequenceAxis, group: dist.ProcessGroup) -> None:
        self.axis, self._group = axis, group
        self._to_compare = _COMPARED

    def divide(self, batch: Mapping[str, Any]) -> Any:
        """This rank's part of a batch. What a script computed gets its whole gradient on every rank."""
        return self.axis.divide(map_tensors(self._shared, dict(batch)))

    def divide_without_cache(self, batch: Any) -> Any:
        """The same for `execute_pipeline`."""
        return self.axis.divide_without_cache(map_tensors(self._shared, batch))

    def _shared(self, given: Tensor) -> Tensor:
        if not (given.requires_grad and torch.is_grad_enabled()):
            return given
        return cast(Tensor, _AddUpGradients.apply(given, self._group))

    def require_equal(self, loss: Tensor) -> None:
        """ValueError, in the first backwards, for losses that ranks of the axis do not have alike: something of them
        was computed from what a rank has a part of, seen by hooks for one.
        """
        if not self._to_compare or loss.numel() != 1:
            return
        self._to_compare -= 1
        mine = loss.detach().double().reshape(1)
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(every, mine, group=self._group)
        found = [float(each) for each in every]
        if not torch.allclose(mine.expand(len(found)), torch.cat(every), rtol=1e-4, equal_nan=True):
            raise ValueError(
                f"the loss is {', '.join(f'{each:.6g}' for each in found)} on the ranks of one sequence "
                f"(sequence_parallelism_mode={self.axis.mode!r}), which outputs.loss is not: what was added to it was "
                "computed from activations, of which every rank has a part; train on outputs.loss alone, add what all "
                "ranks compute alike, or use tp_size"
            )

    def of_whole(self, outputs: Any, batch: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
        """`outputs` of a part, with the loss of the whole sequences."""
        if self.axis.is_whole:
            return outputs
        if batch.get("labels") is None:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"a forward without labels that records gradients, with sequence_parallelism_mode="
                    f"{self.axis.mode!r}: a loss of logits that every rank has a part of would not be that of the "
                    "whole sequences; pass labels, and the model's own loss is exact, or evaluate under "
                    "torch.no_grad()"
                )
            return outputs
        outputs = self.axis.with_own_loss(outputs, batch)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs.loss
        counts = self.axis.count(batch, part)
        if counts is not None:
            mine, whole = (number.to(loss.device, non_blocking=True) for number in counts)
            share = (mine.double() / whole.double()).to(loss.dtype)
            loss = torch.where(mine > 0, loss, torch.zeros_like(loss)) * share
        loss = cast(Tensor, _AddUp.apply(loss, self._group))
        if isinstance(outputs, tuple):
            return (loss, *map_tensors(self._without_gradient, outputs[1:]))
        for name, value in list(outputs.items()):
            outputs[name] = loss if name == "loss" else map_tensors(self._without_gradient, value)
        return outputs

    def _without_gradient(self, of_part: Tensor) -> Tensor:
        """For a script to read: what it adds to the loss from this would be that of a part."""
        if not of_part.requires_grad:
            return of_part
        shown = view_of(of_part)
        shown.register_hook(_RefuseGradient(self.axis.mode))
        return shown

    def require_own(self, criterion: Callable[[Any, Any], Tensor] | None) -> None:
        """ValueError for a criterion that looks at anything but the model's loss: labels and logits of a part are not
        those that it expects.
        """
        if self.axis.is_whole:
            return
        self.axis.require_model_loss()
        if criterion is None or hasattr(criterion, "weight"):
            own = criterion is None
        else:
            outputs, inputs = _OnlyLoss(), _Nothing()
            try:
                own = isinstance(criterion(outputs, inputs), Tensor)
            except Exception:  # a criterion's own code, on what it did not expect
                own = False
            own = own and not outputs.was_read and not inputs.was_read
        if not own:
            raise ValueError(
                f"criterion={getattr(criterion, '__name__', criterion)!r} with sequence_parallelism_mode="
                f"{self.axis.mode!r}: every rank has the logits of a part of the sequences, and a criterion of one's "
                "own does not know which; pass labels in the batch and criterion=None, or one that reads outputs.loss "
                "alone"
            )


class _RefuseGradient:
    """A hook on what a script may read."""

    of_layout = True  # nothing of the script's

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __call__(self, _: Tensor) -> NoReturn:
        raise ValueError(
            f"a loss that reads outputs.logits, with sequence_parallelism_mode={self._mode!r}: every rank has the "
            "logits of a part of the sequences, so that what is made of them is not that of the whole; train on "
            "outputs.loss alone, give the model a loss_function before booster.boost, or use tp_size"
        )


class _Nothing(dict[str, Any]):
    """A mapping that seems to hold everything, and notes when it is looked at."""

    was_read = False

    def _read(self, *_: Any) -> Any:
        self.was_read = True
        raise LookupError("of a part of the sequences alone")

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, name: Any) -> Any:
        return self._read()

    def __getattr__(self, name: str) -> Any:
        return self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return int(self._read())

    get = keys = values = items = pop = copy = _read  # type: ignore[assignment]


_HELD = ("loss", "logits")


class _OnlyLoss(_Nothing):
    """The outputs of a model as `require_own` shows them: they have a loss and logits, which nobody may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.ones((), dtype=torch.float64, requires_grad=True)

    def __contains__(self, name: object) -> bool:
        return name in _HELD

    def __getitem__(self, name: Any) -> Any:
        if name in ("loss", 0):
            return self.loss
        return (
            self._read() if name == "logits" or not isinstance(name, str) else super(_Nothing, self).__getitem__(name)
        )

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            return self._read()
        raise AttributeError(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        return self[name] if name in _HELD else default


class _AddUp(torch.autograd.Function):
    """The sum of what the ranks of the axis have of a loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = loss.detach().clone()
        ctx.ranks = group.size()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


class _AddUpGradients(torch.autograd.Function):
    """A tensor of which every rank of the axis uses a part, its summand of the loss counting once for every rank."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole / ctx.group.size(), None
