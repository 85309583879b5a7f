"""What a model's tables can be asked for: token ids, labels and positions beyond them are named before the forward
meets them.

    input_ids, decoder_input_ids    rows of the embedding
    labels                          classes of the head, or -100
    position_ids, token_type_ids    rows of their tables
    lengths                         rows of learned positions

The limits are read from the whole model, before it is sharded. Tensors on the host are looked at there; of tensors on a
device only an assertion is launched, which names the entry when it fails and which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

IGNORED = -100
_POSITIONS = ("wpe", "position_embeddings", "position_embedding", "embed_positions")
# Classes whose integer labels are numbers of classes; other heads use labels in ways of their own.
_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
    "ForAudioClassification",
)
_BYTES = 254  # of an assertion's message: of longer ones CUDA's makes a SystemError that says nothing
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class ValueLimit:
    """Entries of the tensor `key` lie in [0, high), or are `ignored`."""

    key: str
    high: int
    what: str
    advice: str
    ignored: int | None = None

    def but_for(self, ignored: Any) -> ValueLimit:
        """This limit where a call says itself which labels its loss ignores (`model(..., ignore_index=-1)`)."""
        return self if self.ignored is None or not isinstance(ignored, int) else replace(self, ignored=ignored)

    def check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _WHOLE_NUMBERS or not tensor.numel():
            return
        if tensor.device.type != "cpu":
            torch._assert_async(~self._wrong(tensor).any(), self._rule_for_a_device())
            return
        low, high = torch.aminmax(tensor if self.ignored is None else tensor.masked_fill(tensor == self.ignored, 0))
        if int(low) >= 0 and int(high) < self.high:
            return
        where = self._wrong(tensor).nonzero()[0].tolist()
        raise ValueError(self._rule(f"{self.key}{where}={int(tensor[tuple(where)])}"))

    def _wrong(self, tensor: torch.Tensor) -> torch.Tensor:
        wrong = (tensor < 0) | (tensor >= self.high)
        return wrong if self.ignored is None else wrong & (tensor != self.ignored)

    def _rule(self, subject: str) -> str:
        also = f" or be {self.ignored}, which the loss ignores" if self.ignored is not None else ""
        return f"{subject} is outside of {self.what}: entries must lie in 0..{self.high - 1}{also}. {self.advice}"

    def _rule_for_a_device(self) -> str:
        """As much of the rule as an assertion on a device can say, whole words of it."""
        rule = self._rule(f"an entry of {self.key}").encode("ascii", "replace").decode()
        return rule if len(rule) <= _BYTES else f"{rule[: _BYTES - 3].rpartition(' ')[0]}..."


@dataclass(frozen=True)
class LengthLimit:
    """Sequences of `key` have at most `most` tokens; `padding` ids take no position where the table says so."""

    key: str
    most: int
    owner: str
    padding: int | None = None

    def check(self, tensor: torch.Tensor) -> None:
        if tensor.dim() != 2 or tensor.shape[1] <= self.most:
            return
        if self.padding is not None and (
            tensor.device.type != "cpu" or int((tensor != self.padding).sum(1).max()) <= self.most
        ):
            return
        raise self.too_long(f"{self.key} has {tensor.shape[1]} tokens per sample")

    def too_long(self, what: str) -> ValueError:
        return ValueError(
            f"{what}, and {self.owner} has learned positions for "
            f"{self.most}: cut the texts (tokenizer(..., truncation=True, max_length={self.most}))"
        )


class InputLimits:
    """The limits of one model, by the names of its forward's arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.values: list[ValueLimit] = []
        self.lengths: list[LengthLimit] = []
        self._model = type(model).__name__
        config = getattr(model, "config", None)
        self._vocabulary("input_ids", _rows(_ask(model, "get_input_embeddings"), config))
        self._vocabulary("decoder_input_ids", _rows(_ask(_ask(model, "get_decoder"), "get_input_embeddings")))
        self._labels(model)
        self._tables(model)

    def check(self, batch: Mapping[str, Any]) -> None:
        """ValueError naming entry, value, position and limit."""
        for value_limit in self.values:
            tensor = batch.get(value_limit.key)
            if isinstance(tensor, torch.Tensor):
                value_limit.but_for(batch.get("ignore_index")).check(tensor)
        for length_limit in self.lengths:
            tensor = batch.get(length_limit.key)
            if isinstance(tensor, torch.Tensor) and (
                length_limit.key != "input_ids" or batch.get("position_ids") is None
            ):
                length_limit.check(tensor)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest samples; None where no table of positions ends them."""
        return min((limit.most for limit in self.lengths), default=None)

    def check_length(self, tokens: int) -> None:
        """ValueError where samples of so many tokens, none of them padding, are too long."""
        for limit in self.lengths:
            if tokens > limit.most:
                raise limit.too_long(f"sequence_length={tokens}")

    def _vocabulary(self, key: str, rows: int | None) -> None:
        if rows is not None:
            advice = (
                "A tokenizer with more tokens needs model.resize_token_embeddings(len(tokenizer)) before the optimizer "
                "is built and the model is boosted; padding is an id of the vocabulary too"
            )
            self.values.append(ValueLimit(key, rows, f"the vocabulary of {self._model}", advice))

    def _labels(self, model: nn.Module) -> None:
        head = _ask(model, "get_output_embeddings")
        classes = getattr(head, "out_features", None)
        if isinstance(classes, int):
            classes += int(getattr(head, "out_additional_features", None) or 0)
        what, advice = (
            (f"the vocabulary of {self._model}"),
            ("Mark what the loss shall leave out, padding for one, by -100"),
        )
        config = getattr(model, "config", None)
        if (
            head is None
            and self._model.endswith(_CLASSIFIERS)
            and getattr(config, "problem_type", None) in (None, _SINGLE)
        ):
            number = getattr(config, "num_labels", None)
            classes = number if isinstance(number, int) and number > 1 else None
            what, advice = (
                (f"the classes of {self._model}"),
                ("Build the model with num_labels=... for the classes that there are"),
            )
        if isinstance(classes, int):
            self.values.append(ValueLimit("labels", classes, what, advice, IGNORED))

    def _tables(self, model: nn.Module) -> None:
        tables = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and not _is_of_images(model, name)
        }
        config = getattr(model, "config", None)
        positions = {
            name: table
            for name, table in tables.items()
            if name.rpartition(".")[2] in _POSITIONS and not hasattr(table, "make_weight")  # those grow with the text
        }
        if getattr(config, "reset_position_index_per_cell", False):
            positions = {}  # what is counted is the tokens of a cell of a table
        decoders = {name: table for name, table in positions.items() if "decoder" in name.split(".")}
        others = {name: table for name, table in positions.items() if name not in decoders}
        two = getattr(config, "is_encoder_decoder", False)
        if len(decoders) == 1 and two:
            self._positions(next(iter(decoders.values())), ("decoder_input_ids", "labels"), "decoder_position_ids")
            positions = others
        if len(positions) == 1:
            self._positions(next(iter(positions.values())), ("input_ids",), "position_ids")
        types = [table for name, table in tables.items() if name.rpartition(".")[2] == "token_type_embeddings"]
        if len(types) == 1:
            what = f"the token types of {self._model}"
            self.values.append(
                ValueLimit(
                    "token_type_ids", types[0].num_embeddings, what, "config.type_vocab_size says how many there are"
                )
            )

    def _positions(self, table: nn.Embedding, keys: tuple[str, ...], position_key: str) -> None:
        rows = table.num_embeddings - int(getattr(table, "offset", 0))
        advice = f"The model has learned positions for {rows} tokens: cut the texts"
        self.values.append(ValueLimit(position_key, rows, f"the positions of {self._model}", advice))
        # tables with one count positions from behind it, and only those of tokens that are no padding
        padding = table.padding_idx
        most = rows if padding is None else rows - padding - 1
        self.lengths += [LengthLimit(key, most, self._model, padding) for key in keys]


_SINGLE = "single_label_classification"


def _is_of_images(model: nn.Module, table: str) -> bool:
    """Whether it lies in a tower of images: modules are called so, or one beside it cuts images into patches."""
    path = table.split(".")[:-1]
    owners = [model.get_submodule(".".join(path[: end + 1])) for end in range(len(path))]
    if "vision" in table or any("Vision" in type(owner).__name__ for owner in owners):
        return True
    return bool(owners) and any(isinstance(beside, nn.Conv2d | nn.Conv3d) for beside in owners[-1].children())


def _ask(model: Any, name: str) -> Any:
    """What the accessor `name` of a transformers model gives; None where it has none or does not know."""
    accessor = getattr(model, name, None)
    try:
        return accessor() if callable(accessor) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _rows(embedding: Any, config: Any = None) -> int | None:
    """Ids that a model takes: the rows of its embedding, those of a second table behind it, and ids that stand for an
    image or a sound, which models with `config` replace before they look into the table."""
    if not isinstance(embedding, nn.Embedding):
        return None
    rows = embedding.num_embeddings + int(getattr(embedding, "num_additional_embeddings", None) or 0)
    markers = [
        getattr(config, f"{kind}_token_{what}", None)
        for kind in ("image", "video", "audio")
        for what in ("id", "index")
    ]
    return max([rows, *(marker + 1 for marker in markers if isinstance(marker, int))])
