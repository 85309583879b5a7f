"""A batch to replay a step with: of the sizes that are asked for, with labels where the model takes some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..models.example_images import SAMPLES
from ..models.example_inputs import training_batches

_LENGTH, _TARGET_LENGTH = 12, 8  # tokens of a sample in `training_batches`, and of what a decoder writes
_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")
_MOST = 4 * 2**30  # bytes of an input, which a batch holds for real


def batch_of(model: nn.Module, samples: int, length: int | None, target_length: int | None = None) -> dict[str, Any]:
    """`samples` rows of `length` tokens, none of them padding; images have the size that the config says. What the
    decoder of an encoder-decoder writes has `target_length` tokens, or `length` too. ValueError where the config does
    not say what comes in front of labels, and where there is no room for the batch.
    """
    example = next(training_batches(model))
    example.pop("attention_mask", None)
    if "decoder_input_ids" not in example:
        _check_start(model)
    lengths = {_LENGTH: length}
    targets = {_LENGTH: length, _TARGET_LENGTH: target_length or length} if writes(model) else lengths
    shapes = {key: _shape(value, samples, targets if key in _TARGETS else lengths) for key, value in example.items()}
    for key, shape in shapes.items():
        if shape and (amount := math.prod(shape) * example[key].element_size()) > _MOST:
            raise ValueError(
                f"{key} of {list(shape)} takes {amount / 2**30:.4g} GiB, and a replayed batch may take "
                f"{_MOST / 2**30:g} GiB: fewer samples or fewer tokens would work"
            )
    return {key: _resized(value, shapes[key]) for key, value in example.items()}


def writes(model: nn.Module) -> bool:
    """Whether it is an encoder-decoder, whose batches hold texts of two lengths."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _check_start(model: nn.Module) -> None:
    """ValueError where a decoder that is given labels alone cannot be given what it reads."""
    moved: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    config: Any = getattr(model, "config", None)
    if moved is None or getattr(config, "decoder_start_token_id", None) is not None:
        return
    try:
        moved(torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:  # of the model's own code
        raise ValueError(
            f"decoder_start_token_id of {type(config).__name__} is not set, and {type(model).__name__} puts that token "
            "in front of labels; set it in config.json (T5 takes its pad_token_id, 0)"
        ) from error


def takes_tokens(model: nn.Module) -> bool:
    """Whether its batches hold texts, of some length."""
    values = next(training_batches(model)).values()
    return any(_is_text(value) for value in values if isinstance(value, torch.Tensor))


def _is_text(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and _LENGTH in value.shape[1:]


def _shape(value: Any, samples: int, lengths: Mapping[int, int | None]) -> list[int]:
    """Of an example's tensor with the rows and tokens that are asked for; `lengths` by those of the example."""
    if not isinstance(value, torch.Tensor):
        return []
    found = [lengths.get(size) or size for size in value.shape]
    if found:
        found[0] = samples if value.shape[0] == SAMPLES else value.shape[0]
    return found


def _resized(value: Any, shape: Sequence[int]) -> Any:
    """Rows and tokens of an example, again and again."""
    if not shape:
        return value
    if value.is_meta:  # images of a model without weights
        value = torch.zeros(value.shape, dtype=value.dtype)
    found = value
    for dim, (size, wanted) in enumerate(zip(value.shape, shape, strict=True)):
        if wanted != size:
            found = found.index_select(dim, torch.arange(wanted) % size)
    return found.contiguous()


def first_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """The first samples of a batch."""
    samples = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    return {
        key: value[:rows] if isinstance(value, torch.Tensor) and value.dim() and len(value) == samples else value
        for key, value in batch.items()
    }
