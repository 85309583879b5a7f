"""What a rank of the sequence axis gets of a batch, and what becomes of the loss.

All ranks of the axis are given the same, whole batch. Each takes its part of every sequence:

    [B, S, ...] -> [B, S', ...] -> [B, S'/n, ...]      S' = S padded to what divides

Positions are given explicitly, since a part does not begin at 0. Labels are shifted before they are cut, and handed to
transformers' loss as `shift_labels`. Padding has labels of -100 and is seen by nobody. The mask goes on for the whole
sequence, as the documents of `attention.masks`: these numbers are the only thing that is as long as the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.zigzag import Share

IGNORED = -100
_TOKENS = ("input_ids", "inputs_embeds")
_ALONG = (*_TOKENS, "token_type_ids", "labels", "shift_labels")
_FLAGS = ("output_attentions", "output_router_logits")


class SequenceFacts(NamedTuple):
    """What was found out of a model by trying a small copy of it.

    causal           tokens see only those before them
    shifts           the loss compares a token's logits with the next token's label, and takes `shift_labels`; else
                     with its own label
    own_positions    positions that the model makes up are 0, 1, 2, ... also under a mask
    parts_documents  tokens of a packed row see their own document alone
    """

    causal: bool
    shifts: bool
    own_positions: bool
    parts_documents: bool


class SequenceAxis:
    """Cuts batches for one rank, and adds up what the ranks make of the loss.

    share   which positions this rank holds
    group   the ranks of the axis
    pads_in_front  whether tokens that see nothing but padding come out as in the model itself
    """

    def __init__(
        self,
        mode: str,
        share: Share,
        group: dist.ProcessGroup,
        model: nn.Module,
        facts: SequenceFacts,
        pads_in_front: bool = True,
    ) -> None:
        self._mode, self.shares, self._group, self._facts = mode, share, group, facts
        self._pads_in_front = pads_in_front
        self._name = type(model).__name__
        self._config = getattr(model, "config", None)
        self._arguments = list(inspect.signature(model.forward).parameters)

    # Batches.

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self._arguments, args, strict=False)), **kwargs}

    def divide(self, batch: Any) -> Any:
        """This rank's part of a batch."""
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"a batch of type {type(batch).__name__} with sequence_parallelism_mode={self._mode!r}: entries are "
                "cut by their names; give a dict with input_ids, labels, ..."
            )
        if isinstance(batch.get("attention_mask"), Tensor) and batch["attention_mask"].dim() != 2:
            raise ValueError(
                f"attention_mask of {batch['attention_mask'].dim()} dims with split sequences: give the mask of "
                "padding [batch, length], or position_ids that begin again with every document of a packed row"
            )
        tokens = next((batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor)), None)
        if tokens is None or tokens.dim() < 2:
            raise ValueError(f"a batch without {' or '.join(_TOKENS)} [batch, length] has no sequences to cut")
        samples, length = tokens.shape[:2]
        self._refuse_foreign(batch, length)
        missing = -length % self.shares.multiple
        divided: dict[str, Any] = {}
        for name, value in batch.items():
            if not isinstance(value, Tensor) or name not in _ALONG:
                if name not in ("attention_mask", "position_ids"):
                    divided[name] = value
                continue
            filler = IGNORED if name.endswith("labels") else 0
            divided[name] = self._part(value, missing, filler)
            if name == "labels" and self._facts.shifts and batch.get("shift_labels") is None:
                moved = pad(value[:, 1:], (0, 1), value=IGNORED)
                divided["shift_labels"] = self._part(moved, missing, filler)
        divided["position_ids"] = self._part(self._positions(batch, samples, length, tokens.device), missing, 0)
        divided["attention_mask"] = self._documents(batch, samples, length, missing, tokens.device)
        return divided

    def _part(self, value: Tensor, missing: int, filler: int) -> Tensor:
        if missing:
            value = pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=filler)
        return self.shares.part(value, 1).contiguous()

    def _refuse_foreign(self, batch: Mapping[str, Any], length: int) -> None:
        for name, value in batch.items():
            if name in _FLAGS and value:
                raise ValueError(
                    f"{name}={value!r} with split sequences: no rank has it for whole sequences; leave it out"
                )
            if name == "past_key_values" and value is not None:
                raise ValueError("past_key_values with split sequences: a cache belongs to whole ones; leave it out")
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            known = name in (*_ALONG, "attention_mask", "position_ids")
            if not known or value.dim() < 2 or value.shape[1] != length:
                raise ValueError(
                    f"entry {name!r} of shape {tuple(value.shape)} cannot be cut along sequences of {length} tokens; "
                    f"sequence_parallelism_mode={self._mode!r} takes {', '.join(_ALONG)}, attention_mask and "
                    "position_ids [batch, length, ...]"
                )

    def _positions(self, batch: Mapping[str, Any], samples: int, length: int, device: torch.device) -> Tensor:
        given = batch.get("position_ids")
        if isinstance(given, Tensor):
            return given.expand(samples, length)
        if batch.get("attention_mask") is not None and not self._facts.own_positions:
            raise ValueError(
                f"position_ids=None with an attention_mask: {self._name} counts positions by the mask, which a part of "
                "a sequence cannot; pass position_ids [batch, length]"
            )
        return torch.arange(length, device=device).expand(samples, length)

    def _documents(
        self, batch: Mapping[str, Any], samples: int, length: int, missing: int, device: torch.device
    ) -> Tensor | None:
        """[B, 1, 1, S'], see `attention.masks`; None where `causal` says it all."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if mask is not None:
            if mask.device.type == "cpu" and bool(mask.all()):
                mask = None
            numbers = None if mask is None else (mask != 0).long()
            if not self._pads_in_front and mask is not None and not bool(mask[:, 0].all()):
                raise ValueError(
                    f"attention_mask with padding in front and sequence_parallelism_mode={self._mode!r}: the eager "
                    f"attention of {self._name} gives padding there the mean of all values, which a ring does not; "
                    "pad behind the tokens, or use sequence_parallelism_mode='all_to_all'"
                )
        else:
            numbers = self._packed(batch, positions)
        if numbers is None:
            if not missing or self._facts.causal:  # padding comes last, where no token looks
                return None
            numbers = torch.ones(samples, length, dtype=torch.long, device=device)
        return pad(numbers.expand(samples, length), (0, missing), value=-1)[:, None, None].contiguous()

    def _packed(self, batch: Mapping[str, Any], positions: Tensor | None) -> Tensor | None:
        """The documents of packed rows, as transformers sees them: a new one begins where positions do not go on."""
        cached = batch.get("use_cache", getattr(self._config, "use_cache", False))
        if positions is None or cached or not self._facts.parts_documents:
            return None
        begins = positions.diff(dim=1) != 1
        if begins.device.type == "cpu" and not bool(begins.any()):
            return None
        return pad(begins.long().cumsum(1), (1, 0)) + 1

    # Losses.

    def count(self, batch: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """(labels of this rank, labels of all); None where the loss is divided by a number that was given."""
        if batch.get("labels") is None or batch.get("num_items_in_batch") is not None:
            return None
        whole = batch["labels"][:, 1:] if self._facts.shifts else batch["labels"]
        if batch.get("shift_labels") is not None:
            whole = batch["shift_labels"]
        mine = part["shift_labels"] if self._facts.shifts else part["labels"]
        return (mine != IGNORED).sum(), (whole != IGNORED).sum()

    def with_whole_loss(self, outputs: Any, batch: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
        """`outputs` of a part, with the loss of the whole sequences."""
        if batch.get("labels") is None:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"a forward without labels that records gradients, with sequence_parallelism_mode={self._mode!r}: "
                    "a loss of logits that every rank has a part of would not be that of the whole sequences; pass "
                    "labels, and the model's own loss is exact, or evaluate under torch.no_grad()"
                )
            return outputs
        loss = outputs[0] if isinstance(outputs, tuple) else outputs.loss
        counts = self.count(batch, part)
        if counts is not None:
            mine, whole = (number.to(loss.device) for number in counts)
            share = (mine.double() / whole.double()).to(loss.dtype)
            loss = torch.where(mine > 0, loss, torch.zeros_like(loss)) * share
        loss = cast(Tensor, _AddUp.apply(loss, self._group))
        if isinstance(outputs, tuple):
            return (loss, *outputs[1:])
        outputs.loss = loss
        return outputs

    def require_own_loss(self, criterion: Callable[[Any, Any], Tensor] | None) -> None:
        """ValueError for a criterion that looks at anything but the model's loss: labels and logits of a part are not
        those that it expects.
        """
        if criterion is None or hasattr(criterion, "weight"):
            own = criterion is None
        else:
            try:
                own = isinstance(criterion(_OnlyLoss(), _Nothing()), Tensor)
            except Exception:  # a criterion's own code, on what it did not expect
                own = False
        if not own:
            raise ValueError(
                f"criterion={getattr(criterion, '__name__', criterion)!r} with sequence_parallelism_mode="
                f"{self._mode!r}: every rank has the logits of a part of the sequences, and a criterion of one's own "
                "does not know which; pass labels in the batch and criterion=None, or one that reads outputs.loss alone"
            )


class _OnlyLoss(dict[str, Tensor]):
    """The outputs of a model as `require_own_loss` shows them."""

    def __init__(self) -> None:
        super().__init__(loss=torch.ones((), dtype=torch.float64, requires_grad=True))

    @property
    def loss(self) -> Tensor:
        return self["loss"]


class _Nothing:
    """Inputs that nobody may look at."""

    __slots__ = ()


class _AddUp(torch.autograd.Function):
    """The sum of what the ranks of the axis have of a loss; each differentiates its own part, and the optimizer adds
    gradients up over them.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
