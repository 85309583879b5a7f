"""Batches that hide nothing: ragged masks, labels unevenly spread over samples, sizes that divide by nothing.

A batch whose samples all look alike passes tests that a real one would fail: with equal token counts per sample, a loss
that is averaged per microbatch equals the loss of the batch; with full masks, a wrong mask changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

IGNORE = -100  # label that losses skip
NUM_CHOICES = 3
TARGET_SHORTER_BY = 4  # decoder sequences of encoder-decoder models are this much shorter than the encoder's

_FIRST_WORD = 5  # ids below are kept for padding and special tokens
Batch = dict[str, torch.Tensor]


def make_inputs(
    task: str, config: Any, batch_size: int = 4, seq_len: int = 13, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Batch:
    """Keyword arguments for the forward of a model with this task and config, labels included where the task has a
    loss.

    `config` is the transformers config (sizes and special tokens are read from it), `dtype` that of images.
    """
    if task not in _MAKERS:
        raise ValueError(f"task={task!r} is not one of {', '.join(sorted(_MAKERS))}")
    if batch_size < 1 or seq_len < 6:
        raise ValueError(
            f"batch_size={batch_size}, seq_len={seq_len}: at least 1 sample of 6 tokens is needed for ragged lengths "
            "and labels"
        )
    generator = torch.Generator().manual_seed(seed)
    batch = _MAKERS[task](config, batch_size, seq_len, generator)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


# --- parts ---


def _lengths(batch_size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    """Number of real tokens per sample [B]: random, one sample full."""
    lengths = torch.randint(max(4, seq_len // 3), seq_len, (batch_size,), generator=generator)
    lengths[torch.randint(batch_size, (), generator=generator)] = seq_len
    return lengths


def _mask(lengths: torch.Tensor, seq_len: int) -> torch.Tensor:
    """[B, S], one for real tokens, padding on the right."""
    return (torch.arange(seq_len) < lengths[:, None]).long()


def _text(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    """input_ids and attention_mask; a sequence ends in the end-of-sequence token (T5's classifier looks for it)."""
    lengths = _lengths(batch_size, seq_len, generator)
    mask = _mask(lengths, seq_len)
    ids = torch.randint(_FIRST_WORD, config.vocab_size, (batch_size, seq_len), generator=generator)
    eos = getattr(config, "eos_token_id", None)
    if isinstance(eos, int):
        ids[torch.arange(batch_size), lengths - 1] = eos
    pad = getattr(config, "pad_token_id", None)
    batch = {"input_ids": ids.masked_fill(mask == 0, pad if pad is not None else 0), "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1:
        first = torch.randint(1, 4, (batch_size, 1), generator=generator)
        batch["token_type_ids"] = (torch.arange(seq_len) >= first).long() * mask
    return batch


def _shares(mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[B, S] of bool: a different share of the real tokens in every sample, at least two."""
    share = torch.rand(mask.shape[0], 1, generator=generator) * 0.8 + 0.1
    picked = torch.rand(mask.shape, generator=generator) < share
    picked[:, 1:3] = True
    return picked & (mask == 1)


def _next_token_labels(batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """The ids themselves; padding and a prompt of random length are ignored."""
    mask, lengths = batch["attention_mask"], batch["attention_mask"].sum(-1, keepdim=True)
    prompt = (torch.rand(lengths.shape, generator=generator) * (lengths - 2)).long()
    return batch["input_ids"].masked_fill((mask == 0) | (torch.arange(mask.shape[-1]) < prompt), IGNORE)


def _classes(count: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(count, shape, generator=generator)


# --- tasks ---


def _causal_lm(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    batch = _text(config, batch_size, seq_len, generator)
    return batch | {"labels": _next_token_labels(batch, generator)}


def _masked_lm(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    batch = _text(config, batch_size, seq_len, generator)
    hidden = _shares(batch["attention_mask"], generator)
    labels = batch["input_ids"].masked_fill(~hidden, IGNORE)
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, _FIRST_WORD - 1), "labels": labels}


def _sequence_classification(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _text(config, batch_size, seq_len, generator) | {
        "labels": _classes(config.num_labels, (batch_size,), generator)
    }


def _token_classification(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    batch = _text(config, batch_size, seq_len, generator)
    labels = _classes(config.num_labels, (batch_size, seq_len), generator)
    return batch | {"labels": labels.masked_fill(~_shares(batch["attention_mask"], generator), IGNORE)}


def _question_answering(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    batch = _text(config, batch_size, seq_len, generator)
    lengths = batch["attention_mask"].sum(-1)
    start = (torch.rand(batch_size, generator=generator) * (lengths - 1)).long()
    end = start + (torch.rand(batch_size, generator=generator) * (lengths - start)).long()
    return batch | {"start_positions": start, "end_positions": end}


def _choices(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    """Texts [B, C, S]."""
    flat = _text(config, batch_size * NUM_CHOICES, seq_len, generator)
    return {name: value.view(batch_size, NUM_CHOICES, seq_len) for name, value in flat.items()}


def _multiple_choice(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _choices(config, batch_size, seq_len, generator) | {
        "labels": _classes(NUM_CHOICES, (batch_size,), generator)
    }


def _double_heads(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    batch = _choices(config, batch_size, seq_len, generator)
    return batch | {
        "labels": _next_token_labels(batch, generator),
        "mc_token_ids": batch["attention_mask"].sum(-1) - 1,
        "mc_labels": _classes(NUM_CHOICES, (batch_size,), generator),
    }


def _next_sentence(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _text(config, batch_size, seq_len, generator) | {"labels": _classes(2, (batch_size,), generator)}


def _pretraining(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _masked_lm(config, batch_size, seq_len, generator) | {
        "next_sentence_label": _classes(2, (batch_size,), generator)
    }


def _target_text(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _text(config, batch_size, max(4, seq_len - TARGET_SHORTER_BY), generator)


def _seq2seq_base(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    target = _target_text(config, batch_size, seq_len, generator)
    source = _text(config, batch_size, seq_len, generator)
    return source | {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}


def _conditional_generation(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    target = _target_text(config, batch_size, seq_len, generator)
    source = _text(config, batch_size, seq_len, generator)
    labels = target["input_ids"].masked_fill(~_shares(target["attention_mask"], generator), IGNORE)
    return source | {"labels": labels, "decoder_attention_mask": target["attention_mask"]}


def _image_base(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    shape = (batch_size, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def _image_classification(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    return _image_base(config, batch_size, seq_len, generator) | {
        "labels": _classes(config.num_labels, (batch_size,), generator)
    }


def _masked_image(config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    patches = (config.image_size // config.patch_size) ** 2
    hidden = _shares(torch.ones(batch_size, patches, dtype=torch.long), generator)
    return _image_base(config, batch_size, seq_len, generator) | {"bool_masked_pos": hidden}


_MAKERS: dict[str, Callable[[Any, int, int, torch.Generator], Batch]] = {
    "base": _text,
    "causal_lm": _causal_lm,
    "masked_lm": _masked_lm,
    "sequence_classification": _sequence_classification,
    "token_classification": _token_classification,
    "question_answering": _question_answering,
    "multiple_choice": _multiple_choice,
    "double_heads": _double_heads,
    "next_sentence": _next_sentence,
    "pretraining": _pretraining,
    "encoder": _text,
    "seq2seq_base": _seq2seq_base,
    "conditional_generation": _conditional_generation,
    "image_base": _image_base,
    "image_classification": _image_classification,
    "masked_image": _masked_image,
}
TASKS = tuple(_MAKERS)
