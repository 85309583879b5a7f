"""What a rank of the sequence axis gets of a batch where the model sees whole sequences and its layers parts
(`layer_plan`), and what becomes of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from ...attention.exchange import Exchange, Shapes
from ...models.config import config_of, follows_length, parts
from ...models.cross_attention import MASK, STATES
from ...models.layer_chain import Unit
from ...pipeline.handover import Handover
from ...utils.transfer import to_device
from ..settings import HybridSettings
from .layer_handover import PartsOfStates
from .layer_plan import LayerPlan
from .sequence_axis import IGNORED, Positions, SequenceAxis, SequenceFacts

_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
_LABELS = ("labels", "shift_labels")
ENCLOSED = "enclosed"


class LayerFacts(NamedTuple):
    """What was found out of a model by trying a small copy of it.

    plan            what becomes of its modules
    causal          tokens (of a decoder) see only those before them
    loss            "enclosed": that of whole sequences, see `enclosed_axis`; else that of parts: "own": with every
                    token's own label; "shifted": takes `shift_labels`; "computed": it takes neither, and is the mean
                    cross entropy of shifted labels
    divides         the loss is divided by `num_items_in_batch`, where that is given; None: in part
    decodes         it has an encoder, whose sequences are split too
    reads           it may be given the states of an encoder that is no part of it, which are split too
    """

    plan: LayerPlan
    causal: bool
    loss: str
    divides: bool | None
    decodes: bool
    reads: bool = False


class LayerAxis(SequenceAxis):
    """Pads batches and cuts labels; the model's layers cut the rest."""

    _flags = ("output_attentions", "output_hidden_states")  # logits of routers are gathered

    def __init__(
        self,
        mode: str,
        exchange: Exchange,
        model: nn.Module,
        facts: LayerFacts,
        pads_in_front: bool = True,
        shapes: Shapes | None = None,
    ) -> None:
        divides = bool(facts.divides)
        known = SequenceFacts(facts.causal, facts.loss != "own", divides, Positions(0, None, True), (False,) * 3)
        super().__init__(mode, exchange.share, model, known, pads_in_front)
        self._plan, self._shapes = facts.plan, shapes
        self._exchange, self._loss, self._divides, self._decodes = exchange, facts.loss, facts.divides, facts.decodes
        self._states = (STATES, MASK) if facts.reads else ()
        self._part_of_labels: Tensor | None = None
        self._is_entered = False
        self._hook = model.register_forward_pre_hook(self._require_entered)

    def close(self) -> None:
        self._hook.remove()

    def handover(self, units: Sequence[Unit]) -> Handover:
        return PartsOfStates(self._exchange, self._shapes, self._plan, units)

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._is_entered = True
        try:
            yield
        finally:
            self._is_entered = False

    def _require_entered(self, model: nn.Module, _: Any) -> None:
        if not self._is_entered:
            raise ValueError(
                f"{type(model).__name__} was called itself, whose layers work on parts of sequences; call the model "
                "that boost returned, which cuts them"
            )

    # Batches.

    def divide(self, batch: Any) -> Any:
        """The batch, padded, with this rank's part of the labels."""
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"a batch of type {type(batch).__name__} with sequence_parallelism_mode={self.mode!r}: entries are "
                "padded by their names; give a dict with input_ids, labels, ..."
            )
        tokens = self._tokens(batch)
        self._refuse_unshared(batch)
        self._refuse_number(batch)
        self._check_names(batch)
        length = tokens.shape[1]
        divided = {name: value for name, value in batch.items() if value is not None}
        if divided.get("position_ids") is None and -length % self._exchange.multiple and self._follows_length():
            divided["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
        self._pad(divided, _TOKENS if self._decodes else (*_TOKENS, *_LABELS), tokens.shape[0], length)
        self._pad_mask(divided, tokens)
        if self._decodes:
            self._add_decoder_inputs(divided)
        if self._states:
            self._pad_states(divided, tokens.shape[0])
        self._cut_labels(divided)
        return divided

    def _refuse_number(self, batch: Mapping[str, Any]) -> None:
        if batch.get("num_items_in_batch") is None or self._divides is False:
            return
        if self._divides is None or self._has_routers(batch):
            raise ValueError(
                f"num_items_in_batch with sequence_parallelism_mode={self.mode!r}: {self._name} divides a part of its "
                "loss by it, and has router losses beside; leave it out"
            )

    def _follows_length(self) -> bool:
        return "position_ids" in self._arguments and any(follows_length(part) for part in parts(config_of(self._model)))

    def _check_names(self, batch: Mapping[str, Any]) -> None:
        known = (*_TOKENS, "attention_mask", *_LABELS, *(_DECODER if self._decodes else ()), *self._states)
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.dim() > 0 and name not in known:
                raise ValueError(
                    f"entry {name!r} of shape {tuple(value.shape)} cannot be padded along sequences; "
                    f"sequence_parallelism_mode={self.mode!r} takes {', '.join(known)} of {self._name}"
                )

    def _pad(self, batch: dict[str, Any], names: tuple[str, ...], samples: int, length: int) -> None:
        missing = -length % self._exchange.multiple
        for name in names:
            value = batch.get(name)
            if not isinstance(value, Tensor):
                continue
            one = name == "position_ids" and value.shape[:1] == (1,)
            if value.dim() < 2 or value.shape[1] != length or not (one or value.shape[0] == samples):
                raise ValueError(
                    f"entry {name!r} of shape {tuple(value.shape)} does not fit {samples} sequences of {length} "
                    f"tokens; give [{samples}, {length}, ...]"
                )
            if missing and name == "position_ids":
                # The last one again: frequencies of some rotary tables follow the greatest position.
                batch[name] = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
            elif missing:
                filler = IGNORED if name.endswith("labels") else 0
                batch[name] = pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=filler)

    def _pad_mask(self, batch: dict[str, Any], tokens: Tensor) -> None:
        """Padding comes last, where no token looks, or is masked."""
        length = tokens.shape[1]
        missing, mask = -length % self._exchange.multiple, batch.get("attention_mask")
        if mask is None:
            if not missing or not self._needs_mask(batch):
                return
            if batch.get("position_ids") is not None and self.facts.causal:
                raise ValueError(
                    f"position_ids without attention_mask in rows of {length} tokens, of {self._name} with router "
                    f"losses: rows are padded to a multiple of {self._exchange.multiple}, and a mask would hide where "
                    "documents begin; give rows of such a length"
                )
            mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        if mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} with split sequences: give the mask of padding "
                f"{list(tokens.shape[:2])}"
            )
        self._refuse_padding_in_front(mask, missing)
        batch["attention_mask"] = pad(mask, (0, missing))

    def _refuse_padding_in_front(self, mask: Tensor, missing: int) -> None:
        """Where the model gives padding the mean of all values, which the next token's prediction is made of."""
        around_ring = self.mode == "ring_attn"
        if self._pads_in_front or self._decodes or not (around_ring or (missing and self.facts.causal)):
            return  # every token of an encoder sees those that are no padding
        if bool(mask[:, 0].all()):
            return
        length, multiple = mask.shape[1], self._exchange.multiple
        given = f"attention_mask with padding in front and sequence_parallelism_mode={self.mode!r}: the attention of "
        if around_ring:
            raise ValueError(
                f"{given}{self._name} gives padding there the mean of all values, which a ring does not; pad behind "
                "the tokens and leave out rows that have none, or use sequence_parallelism_mode='all_to_all' with "
                "lengths that are a multiple of sp_size"
            )
        raise ValueError(
            f"{given}{self._name} gives padding there the mean of all values, and rows of {length} tokens are padded "
            f"to a multiple of {multiple}; pad behind the tokens, or in front to a length of {length + missing}"
        )

    def _needs_mask(self, batch: Mapping[str, Any]) -> bool:
        return self._has_routers(batch) or self._decodes or not self.facts.causal

    def _has_routers(self, batch: Mapping[str, Any]) -> bool:
        given = batch.get("output_router_logits")
        if given is not None:
            return bool(given)
        return any(getattr(part, "output_router_logits", False) for part in parts(config_of(self._model)))

    def _pad_states(self, batch: dict[str, Any], samples: int) -> None:
        """States of an encoder, whose padding is masked."""
        states, mask = batch.get(STATES), batch.get(MASK)
        if states is None:
            return
        if states.dim() != 3 or states.shape[0] != samples:
            raise ValueError(
                f"{STATES} of shape {tuple(states.shape)} in a batch of {samples} with split sequences: give "
                f"[{samples}, length, features]"
            )
        length = states.shape[1]
        missing = -length % self._exchange.multiple
        if mask is None and missing:
            mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        if mask is not None:
            if tuple(mask.shape) != (samples, length):
                raise ValueError(
                    f"{MASK} of shape {tuple(mask.shape)} with split sequences: give the mask of padding "
                    f"[{samples}, {length}] of {STATES}"
                )
            self._refuse_empty_states(mask, missing)
            batch[MASK] = pad(mask, (0, missing))
        batch[STATES] = pad(states, (0, 0, 0, missing))

    def _refuse_empty_states(self, mask: Tensor, missing: int) -> None:
        """Where the model gives tokens that see no state the mean of all, padding among them."""
        if self._pads_in_front or not (self.mode == "ring_attn" or missing) or bool((mask != 0).any(1).all()):
            return
        why = (
            "which a ring does not"
            if self.mode == "ring_attn"
            else f"and {mask.shape[1]} states are padded to {mask.shape[1] + missing}"
        )
        raise ValueError(
            f"{MASK} that hides all states of a sample, and sequence_parallelism_mode={self.mode!r}: the attention of "
            f"{self._name} gives its tokens the mean of all values, {why}; leave such samples out of the batch"
        )

    def _add_decoder_inputs(self, batch: dict[str, Any]) -> None:
        decoder, labels = _first_of(batch, "decoder_input_ids", "decoder_inputs_embeds"), batch.get("labels")
        if decoder is None:
            if labels is None:
                raise ValueError(
                    f"a batch without labels and decoder_input_ids for {self._name}: give what its decoder reads"
                )
            model: Any = self._model
            decoder = batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        length, mask = decoder.shape[1], batch.get("decoder_attention_mask")
        if isinstance(mask, Tensor) and mask.shape == decoder.shape[:2]:
            self._refuse_counted_padding(mask, labels, -length % self._exchange.multiple)
        self._pad(batch, (*_DECODER, *_LABELS), decoder.shape[0], length)

    def _refuse_counted_padding(self, mask: Tensor, labels: Any, missing: int) -> None:
        """Tokens of a decoder that see no other get the mean of all values, where masks are added to scores. Who reads
        it is their own prediction alone.
        """
        if self._pads_in_front or not (self.mode == "ring_attn" or missing):
            return
        blind = (mask != 0).cumsum(1) == 0
        counts = blind if labels is None else blind & (labels != IGNORED)
        if not bool(counts.any()):
            return
        length = mask.shape[1]
        why = (
            "which a ring does not"
            if self.mode == "ring_attn"
            else f"and rows of {length} tokens are padded to {length + missing}"
        )
        raise ValueError(
            f"decoder_attention_mask with padding in front and sequence_parallelism_mode={self.mode!r}: the attention "
            f"of {self._name} gives padding there the mean of all values, {why}; give it labels of {IGNORED}, or pad "
            "behind the tokens"
        )

    def _cut_labels(self, batch: dict[str, Any]) -> None:
        labels, moved = batch.get("labels"), batch.get("shift_labels")
        self._part_of_labels = None
        if labels is None:
            return
        if self._loss != "own" and moved is None:
            moved = pad(labels[:, 1:], (0, 1), value=IGNORED)
        batch["labels"] = self._exchange.part(labels)
        if self._loss == "own":
            self._part_of_labels = batch["labels"]
            return
        assert moved is not None
        self._part_of_labels = self._exchange.part(moved)
        if self._loss == "shifted":
            batch["shift_labels"] = self._part_of_labels
        else:
            del batch["labels"]

    # Losses.

    def require_model_loss(self) -> None:
        if self._loss == "computed":
            raise ValueError(
                f"execute_pipeline with sequence_parallelism_mode={self.mode!r}: {self._name} takes no shift_labels, "
                "so that its loss of parts is computed outside of it; call the model that boost returned, with labels"
            )

    def _targets(self, part: Mapping[str, Any]) -> Tensor:
        assert self._part_of_labels is not None, "labels were cut"
        return self._part_of_labels

    def with_own_loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        if self._loss != "computed" or self._part_of_labels is None:
            return outputs
        number = batch.get("num_items_in_batch") if self._divides else None
        logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
        loss = mean_loss(logits, to_device(self._part_of_labels, logits.device), number)
        if isinstance(outputs, tuple):
            return (loss, *outputs)
        outputs.loss = loss
        return outputs


def draws_alike(facts: object) -> bool:
    """Whether ranks that share sequences draw the same random numbers outside of layers."""
    return isinstance(facts, LayerFacts) and facts.loss == ENCLOSED


def check_layers(settings: HybridSettings, facts: LayerFacts, name: str) -> None:
    """ValueError for settings that do not go with layers that are given parts by a model that sees whole sequences."""
    mode, layout = settings.sequence_mode, settings.layout
    if facts.loss == ENCLOSED and layout.pp_size > 1:
        raise ValueError(
            f"pp_size={layout.pp_size} with sequence_parallelism_mode={mode!r}: of {name} all around its layers is "
            "computed for whole sequences, and the stages of a pipeline would not know how long those are; use "
            "pp_size=1"
        )
    if facts.loss == "computed" and layout.tp_size * layout.pp_size > 1:
        field = "tp_size" if layout.tp_size > 1 else "pp_size"
        raise ValueError(
            f"{field}={getattr(layout, field)} with sequence_parallelism_mode={mode!r}: {name} takes no shift_labels, "
            f"and its loss of parts is computed outside of it, of whole logits; use {field}=1"
        )


def mean_loss(logits: Tensor, targets: Tensor, number: Any = None) -> Tensor:
    """[B, S, V], [B, S] -> the mean over all that count, or their sum divided by `number`."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    how = "mean" if number is None else "sum"
    loss = cross_entropy(exact.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=how)
    return loss if number is None else loss / number


def _first_of(batch: Mapping[str, Any], *names: str) -> Tensor | None:
    found = (batch[name] for name in names if isinstance(batch.get(name), Tensor) and batch[name].dim() >= 2)
    return next(found, None)
