"""What a rank of the sequence axis gets of a batch.

All ranks of the axis are given the same, whole batch. Each takes its part of every sequence:

    [B, S, ...] -> [B, S', ...] -> [B, S'/n, ...]      S' = S padded to what divides

Positions are given explicitly, since a part does not begin at 0. Labels are shifted before they are cut, and handed to
transformers' loss as `shift_labels`. Padding has labels of -100 and is seen by nobody. The mask goes on for the whole
sequence, as the documents of `attention.masks`: these numbers are the only thing that is as long as the sequence.

What becomes of the loss of parts: `sequence_loss`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.model_needs import has_soft_cap
from ...attention.zigzag import Share
from ...models.caches import makes_cache
from ...models.config import text_config
from ...models.dry_run import forward_defaults
from ...models.layer_chain import Unit
from ...pipeline.handover import Handover

IGNORED = -100
_TOKENS = ("input_ids", "inputs_embeds")
_ALONG = (*_TOKENS, "token_type_ids", "labels", "shift_labels")
_LATTER = ("logits_to_keep", "num_logits_to_keep")


class Positions(NamedTuple):
    """The positions that a model makes up, where a call has none.

    first       of the first token; None: they follow no rule that is known here, and must be given
    of_padding  the token that is padding, which has this number as its position and is not counted; None: all count
    under_mask  whether they are the same under a mask
    """

    first: int | None
    of_padding: int | None
    under_mask: bool


class SequenceFacts(NamedTuple):
    """What was found out of a model by trying a small copy of it.

    causal           tokens see only those before them
    shifts           the loss compares a token's logits with the next token's label, and takes `shift_labels`; else
                     with its own label
    divides          the loss is divided by `num_items_in_batch`, where that is given; else it takes no notice
    positions        that the model makes up
    parts_documents  tokens of a packed row see their own document alone: without a cache, with one, and with one in
                     training
    adds_types       token types are features of the tokens; else they say who sees whom, or mean nothing
    """

    causal: bool
    shifts: bool
    divides: bool
    positions: Positions
    parts_documents: tuple[bool, bool, bool]
    adds_types: bool = True


class SequenceAxis:
    """Cuts batches for one rank.

    share   which positions this rank holds
    pads_in_front  whether tokens that see nothing but padding come out as in the model itself
    """

    # What a call may ask for beside the loss, and no part of a sequence can give.
    is_whole = False  # whether the loss, and what is around layers, is that of whole sequences on every rank
    _flags: tuple[str, ...] = ("output_attentions", "output_hidden_states", "output_router_logits")

    def __init__(
        self,
        mode: str,
        share: Share,
        model: nn.Module,
        facts: SequenceFacts,
        pads_in_front: bool = True,
    ) -> None:
        self.mode, self.shares, self.facts = mode, share, facts
        self._pads_in_front = pads_in_front
        self._model, self._name = model, type(model).__name__
        self._arguments = list(inspect.signature(model.forward).parameters)
        self._defaults = forward_defaults(model)
        self._own_loss = vars(model).get("_loss_function")

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self._arguments, args, strict=False)), **kwargs}

    def divide_without_cache(self, batch: Any) -> Any:
        """This rank's part of a batch that is run without a cache, as `execute_pipeline` runs all."""
        return self.divide({**self._defaults, **batch} if isinstance(batch, Mapping) else batch)

    def divide(self, batch: Any) -> Any:
        """This rank's part of a batch."""
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"a batch of type {type(batch).__name__} with sequence_parallelism_mode={self.mode!r}: entries are "
                "cut by their names; give a dict with input_ids, labels, ..."
            )
        if isinstance(batch.get("attention_mask"), Tensor) and batch["attention_mask"].dim() != 2:
            raise ValueError(
                f"attention_mask of {batch['attention_mask'].dim()} dims with split sequences: give the mask of "
                "padding [batch, length], or position_ids that begin again with every document of a packed row"
            )
        tokens = self._tokens(batch)
        samples, length = tokens.shape[:2]
        self._refuse_unshared(batch)
        self._refuse_foreign(batch, samples, length)
        missing = -length % self.shares.multiple
        divided: dict[str, Any] = {}
        for name, value in batch.items():
            if not isinstance(value, Tensor) or name not in _ALONG:
                if name not in ("attention_mask", "position_ids", "use_cache"):
                    divided[name] = value
                continue
            filler = IGNORED if name.endswith("labels") else 0
            divided[name] = self._part(value, missing, filler)
            if name == "labels" and self.facts.shifts and batch.get("shift_labels") is None:
                moved = pad(value[:, 1:], (0, 1), value=IGNORED)
                divided["shift_labels"] = self._part(moved, missing, filler)
        divided.update(self._defaults)
        divided["position_ids"] = self._part(self._positions(batch, samples, length, tokens.device), missing, 0)
        divided["attention_mask"] = self._documents(batch, samples, length, missing, tokens.device)
        return divided

    def _tokens(self, batch: Mapping[str, Any]) -> Tensor:
        """[B, S, ...], of which there are some."""
        found = ((name, batch[name]) for name in _TOKENS if isinstance(batch.get(name), Tensor))
        name, tokens = next(((name, value) for name, value in found if value.dim() >= 2), ("", None))
        if tokens is None:
            raise ValueError(f"a batch without {' or '.join(_TOKENS)} [batch, length] has no sequences to cut")
        if not tokens.shape[0] or not tokens.shape[1]:
            raise ValueError(
                f"{name} of shape {tuple(tokens.shape)} with sequence_parallelism_mode={self.mode!r}: there is no "
                "token to compute; leave empty batches out"
            )
        return tokens

    def _part(self, value: Tensor, missing: int, filler: int) -> Tensor:
        if missing:
            value = pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=filler)
        return self.shares.part(value, 1).contiguous()

    def _refuse_unshared(self, batch: Mapping[str, Any]) -> None:
        """ValueError for what no rank has for whole sequences."""
        for name in self._flags:
            value = batch.get(name)
            if value if value is not None else getattr(text_config(self._model), name, False):
                raise ValueError(
                    f"{name}={True if value is None else value!r} with sequence_parallelism_mode={self.mode!r}: no "
                    f"rank has it for whole sequences; leave it out{', also of the config' if value is None else ''}"
                )
        for name, value in batch.items():
            if name in _LATTER and value is not None and (isinstance(value, Tensor) or value != 0):
                raise ValueError(
                    f"{name}={value!r} with sequence_parallelism_mode={self.mode!r}: it counts along a whole sequence, "
                    "of which every rank has a part; leave it out"
                )
            if (name == "past_key_values" and value is not None) or (name == "use_cache" and value):
                raise ValueError(
                    f"{name} with sequence_parallelism_mode={self.mode!r}: a cache belongs to whole sequences, of "
                    "which every rank has a part; leave it out"
                )
            if name == "ignore_index" and value != IGNORED:
                raise ValueError(
                    f"ignore_index={value!r} with sequence_parallelism_mode={self.mode!r}: padding that makes "
                    f"sequences divisible has labels of {IGNORED}; leave it out, and give labels that do not count as "
                    f"{IGNORED}"
                )
        if vars(self._model).get("_loss_function") is not self._own_loss:
            raise ValueError(
                f"loss_function={self._model.loss_function!r} was set after booster.boost, which tried the one before "
                f"on split sequences (sequence_parallelism_mode={self.mode!r}); set it before"
            )

    def _refuse_foreign(self, batch: Mapping[str, Any], samples: int, length: int) -> None:
        for name, value in batch.items():
            if name == "token_type_ids" and value is not None and not self.facts.adds_types:
                raise ValueError(
                    f"token_type_ids with sequence_parallelism_mode={self.mode!r}: {self._name} makes more of them "
                    "than features of single tokens, such as who sees whom; leave them out, or use tp_size and pp_size"
                )
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            known = name in (*_ALONG, "attention_mask", "position_ids")
            if not known or value.dim() < 2 or value.shape[1] != length:
                raise ValueError(
                    f"entry {name!r} of shape {tuple(value.shape)} cannot be cut along sequences of {length} tokens; "
                    f"sequence_parallelism_mode={self.mode!r} takes {', '.join(_ALONG)}, attention_mask and "
                    "position_ids [batch, length, ...]"
                )
            if value.shape[0] != samples and not (name == "position_ids" and value.shape[0] == 1):
                raise ValueError(
                    f"entry {name!r} of shape {tuple(value.shape)} in a batch of {samples} with "
                    f"sequence_parallelism_mode={self.mode!r}: it has other samples than the tokens; give "
                    f"[{samples}, {length}, ...]"
                )

    def _positions(self, batch: Mapping[str, Any], samples: int, length: int, device: torch.device) -> Tensor:
        given = batch.get("position_ids")
        if isinstance(given, Tensor):
            return given.expand(samples, length)
        first, of_padding, under_mask = self.facts.positions
        if first is None or (batch.get("attention_mask") is not None and not under_mask):
            why = "with an attention_mask: {} counts positions by the mask" if first is not None else ": {} counts them"
            raise ValueError(
                f"position_ids=None {why.format(self._name)}, which a part of a sequence cannot; pass position_ids "
                "[batch, length]"
            )
        ids = batch.get("input_ids")
        if of_padding is not None and isinstance(ids, Tensor):
            tokens = (ids != of_padding).long()
            return tokens.cumsum(1) * tokens + of_padding
        return torch.arange(first, first + length, device=device).expand(samples, length)

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
                sdpa = "" if has_soft_cap(text_config(self._model)) else ", or attn_implementation='sdpa'"
                raise ValueError(
                    f"attention_mask with padding in front and sequence_parallelism_mode={self.mode!r}: the eager "
                    f"attention of {self._name} gives padding there the mean of all values, which a ring does not; "
                    "pad behind the tokens and leave out rows that have none, or use "
                    f"sequence_parallelism_mode='all_to_all'{sdpa}"
                )
        else:
            numbers = self._packed(batch, positions)
        if numbers is None:
            if not missing or self.facts.causal:  # padding comes last, where no token looks
                return None
            numbers = torch.ones(samples, length, dtype=torch.long, device=device)
        return pad(numbers.expand(samples, length), (0, missing), value=-1)[:, None, None].contiguous()

    def _packed(self, batch: Mapping[str, Any], positions: Tensor | None) -> Tensor | None:
        """The documents of packed rows, as transformers sees them: a new one begins where positions do not go on."""
        without, with_cache, in_training = self.facts.parts_documents
        if makes_cache(self._model, batch.get("use_cache")):
            without = in_training if self._model.training else with_cache
        if positions is None or not without:
            return None
        begins = positions.diff(dim=1) != 1
        if begins.device.type == "cpu" and not bool(begins.any()):
            return None
        return pad(begins.long().cumsum(1), (1, 0)) + 1

    def handover(self, units: Sequence[Unit]) -> Handover:
        """How stages of a pipeline hand on what units return."""
        return Handover()

    # What `sequence_loss` asks.

    def entered(self) -> AbstractContextManager[None]:
        """Around what runs the model on what `divide` returned."""
        return nullcontext()

    def count(self, batch: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """(labels of this rank, labels of all); None where the loss is divided by a number that was given."""
        if self.facts.divides and batch.get("num_items_in_batch") is not None:
            return None
        return (self._targets(part) != IGNORED).sum(), (self._whole_targets(batch) != IGNORED).sum()

    def _targets(self, part: Mapping[str, Any]) -> Tensor:
        targets: Tensor = part["shift_labels"] if self.facts.shifts else part["labels"]
        return targets

    def _whole_targets(self, batch: Mapping[str, Any]) -> Tensor:
        targets: Tensor = batch["labels"][:, 1:] if self.facts.shifts else batch["labels"]
        return batch["shift_labels"] if self.facts.shifts and batch.get("shift_labels") is not None else targets

    def with_own_loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """`outputs` with the loss of this part."""
        return outputs

    def require_model_loss(self) -> None:
        """ValueError where the model computes no loss of parts by itself."""
