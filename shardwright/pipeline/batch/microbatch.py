"""Splitting a batch into microbatches and merging what the model returned for each of them.

B is the number of samples of the batch. Which dimension of a tensor counts samples:

    [B, ...]        dim 0, whatever follows
    [3, B, S]       dim 1 of `position_ids` with three dims (multimodal rotary positions: time, height, width)
    images          none: see `regroup`
    [1, ...]        none: one row for every sample, given to each microbatch as it is
    0-d, no tensor  none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...ops.vocab_mode import concatenated
from ...utils.objects import parts_of, tensors_within, with_parts

# Names that hold one row per sample in every model, in the order in which they are asked for B.
_SAMPLE_NAMES = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "pixel_values",
    "input_features",
    "input_values",
    "labels",
    "attention_mask",
)
# Per-batch bookkeeping of transformers that is never one row per sample.
_WHOLE_NAMES = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")

# Entries with a row for each image or video: the entry of all their patches [patches, d], and the token of the config
# that they fill.
GRIDS = {
    "image_grid_thw": ("pixel_values", "image_token_id"),
    "video_grid_thw": ("pixel_values_videos", "video_token_id"),
}
PATCHES = tuple(patches for patches, _ in GRIDS.values())

_DEEPEST = 8  # places in outputs

OTHER_ROWS = -1  # in place of a dim: rows that are neither one per sample nor one for all (patches of images, say)

Batch = Any  # dict, list or tuple of tensors and other values, or one tensor


def items_of(batch: Batch) -> list[tuple[Any, Any]]:
    """(key, value) of the batch's entries; a single tensor has the key None."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, list | tuple):
        return list(enumerate(batch))
    return [(None, batch)]


def batch_size(batch: Batch) -> int:
    """B, read from the entry that says it most plainly."""
    entries = [(key, value) for key, value in items_of(batch) if isinstance(value, torch.Tensor) and value.dim() > 0]
    if not entries:
        made = isinstance(batch, list | tuple) and batch and all(isinstance(entry, Mapping) for entry in batch)
        raise ValueError(
            f"a batch of type {type(batch).__name__} without any tensor of one or more dims cannot be split into "
            "microbatches; "
            + (
                f"if these {len(batch)} dicts are the microbatches, say so: shardwright.Microbatches(batch)"
                if made
                else "pass a dict, list or tuple of tensors, or one tensor, with samples on dim 0"
            )
        )
    named = dict(entries)
    for name in _SAMPLE_NAMES:
        if name in named:
            return named[name].shape[0]
    sliced = [(key, value) for key, value in entries if key not in _WHOLE_NAMES]
    key, value = sliced[0] if sliced else entries[0]
    return value.shape[1] if _has_leading_axes(key, value) else value.shape[0]


def find_batch_dim(key: Any, value: Any, samples: int) -> int | None:
    """The dim of `value` that counts samples; None when every microbatch gets all of it, `OTHER_ROWS` when it counts
    something else.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or key in _WHOLE_NAMES:
        return None
    if key in GRIDS or (key in PATCHES and value.dim() == 2):
        return OTHER_ROWS
    if _has_leading_axes(key, value) and value.shape[1] == samples:
        return 1
    if value.shape[0] == samples:
        return 0
    if value.shape[0] == 1 or (_has_leading_axes(key, value) and value.shape[1] == 1):
        return None
    return OTHER_ROWS


def batch_dim(key: Any, value: Any, samples: int) -> int | None:
    """The dim of `value` that counts samples, or None when every microbatch gets all of it."""
    dim = find_batch_dim(key, value, samples)
    if dim != OTHER_ROWS:
        return dim
    raise ValueError(
        f"the batch cannot be split into microbatches: it has {samples} samples, but {_label(key)} has shape "
        f"{tuple(value.shape)}; every tensor needs {samples} (or 1, to give all of it to each microbatch) on dim 0, "
        "position_ids of three dims on dim 1. Where rows of a tensor are something else, let the iterator give the "
        "microbatches themselves: shardwright.Microbatches([first, second, ...])"
    )


def _has_leading_axes(key: Any, value: torch.Tensor) -> bool:
    return key == "position_ids" and value.dim() == 3


def _label(key: Any) -> str:
    return "the tensor" if key is None else f"entry {key!r}"


def microbatch_sizes(
    samples: int, num_microbatches: int | None = None, microbatch_size: int | None = None
) -> list[int]:
    """Samples of each microbatch.

    `num_microbatches`: that many, as equal as can be, larger ones first, and never more than there are samples.
    `microbatch_size`: ceil(samples / microbatch_size) of that size, the last one smaller if need be.
    `num_microbatches` wins when both are given; with neither the batch is one microbatch.
    """
    assert samples > 0
    for name, value in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1, or None")
    if num_microbatches is not None:
        count = min(num_microbatches, samples)
        share, larger = divmod(samples, count)
        return [share + 1] * larger + [share] * (count - larger)
    if microbatch_size is not None:
        full, rest = divmod(samples, microbatch_size)
        return [microbatch_size] * full + ([rest] if rest else [])
    return [samples]


def split_dims(batch: Batch) -> tuple[int, dict[Any, int | None]]:
    """B, and of every entry the dim that counts samples; ValueError for a batch that cannot be split."""
    samples = batch_size(batch)
    if samples < 1:
        raise ValueError("the batch has no samples; a pipeline step needs at least 1")
    return samples, {key: batch_dim(key, value, samples) for key, value in items_of(batch)}


def split_batch(batch: Batch, num_microbatches: int | None = None, microbatch_size: int | None = None) -> list[Batch]:
    """The microbatches of `batch`, of the batch's own type.

    Sliced tensors are copies: some models write to their inputs, and writing to one of several views of a tensor would
    make autograd reject what it has saved of the others.
    """
    samples, dims = split_dims(batch)
    sizes = microbatch_sizes(samples, num_microbatches, microbatch_size)
    for key, value in items_of(batch) if len(sizes) > 1 else ():
        _refuse_nested(key, value, samples)
    microbatches, start = [], 0
    for size in sizes:
        entries = {}
        for key, value in items_of(batch):
            dim = dims[key]
            entries[key] = value if dim is None else value.narrow(dim, start, size).clone()
        microbatches.append(like(batch, entries))
        start += size
    return microbatches


def _refuse_nested(key: Any, value: Any, samples: int) -> None:
    if isinstance(value, torch.Tensor):
        return
    for tensor in tensors_within(value):
        if tensor.dim() and tensor.shape[0] == samples > 1:
            raise ValueError(
                f"the batch cannot be split into microbatches: {_label(key)} is a {type(value).__name__} with a tensor "
                f"of shape {tuple(tensor.shape)} in it, and each of the {samples} samples has a row there; only "
                "tensors that are entries themselves are split. Give it as one, or let the iterator give the "
                "microbatches: shardwright.Microbatches([first, second, ...])"
            )


def shared_entries(microbatches: Sequence[Batch]) -> frozenset[Any]:
    """Keys of what every microbatch has gotten whole. A row for all samples looks like any other where a microbatch
    has one sample.
    """
    if len(microbatches) < 2:
        return frozenset()
    first, *others = (dict(items_of(microbatch)) for microbatch in microbatches)
    return frozenset(key for key, value in first.items() if all(other.get(key) is value for other in others))


def like(batch: Batch, entries: dict[Any, Any]) -> Batch:
    """A batch of the type of `batch` with these entries."""
    if isinstance(batch, Mapping):
        return entries
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*entries.values())
    if isinstance(batch, list | tuple):
        return type(batch)(entries.values())
    return entries[None]


Path = tuple[Any, ...]  # keys, places and names that lead to something within outputs
_NONE: Mapping[Path, torch.Tensor] = MappingProxyType({})


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor of what a model returned, as `merge_outputs` finds it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif len(path) < _DEEPEST:
        if isinstance(value, Mapping):
            parts: Any = value.items()
        elif isinstance(value, list | tuple):
            parts = enumerate(value)
        else:
            parts = (parts_of(value) or {}).items()
        for key, part in parts:
            yield from tensors_by_path(part, (*path, key))


def merge_outputs(
    outputs: Sequence[Any], sizes: Sequence[int], summed: Mapping[Path, torch.Tensor] = _NONE, path: Path = ()
) -> Any:
    """What the model would have returned for the whole batch, from its returns for microbatches of `sizes` samples.

    Tensors are concatenated on the dim that counts samples: the only dim in which microbatches of unequal sizes differ,
    else dim 0. Tensors that differ in another dim as well (sequences that the model cut per microbatch) stay a list,
    one per microbatch. 0-d tensors become their mean weighted by samples, or what `summed` has at their paths (losses
    of the whole batch, of which microbatches give parts); other values are those of the first microbatch.
    """
    first = outputs[0]
    if len(outputs) == 1 and not summed:
        return first
    if isinstance(first, torch.Tensor):
        if path in summed:
            return summed[path]
        return _merge_tensors(outputs, sizes)
    if isinstance(first, Mapping):
        merged = {key: merge_outputs([o[key] for o in outputs], sizes, summed, (*path, key)) for key in first}
        return type(first)(**merged) if type(first) is not dict else merged
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        places = enumerate(zip(*outputs, strict=True))
        return type(first)(*(merge_outputs(parts, sizes, summed, (*path, place)) for place, parts in places))
    if isinstance(first, list | tuple):
        places = enumerate(zip(*outputs, strict=True))
        return type(first)(merge_outputs(parts, sizes, summed, (*path, place)) for place, parts in places)
    if next(tensors_within(first), None) is not None:  # a dataclass, a cache
        named = [parts_of(output) or {} for output in outputs]
        parts = {name: merge_outputs([one[name] for one in named], sizes, summed, (*path, name)) for name in named[0]}
        return with_parts(first, parts)
    return first


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Many small parts lose digits in 16 bits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _merge_tensors(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    if tensors[0].dim() == 0:
        if not tensors[0].is_floating_point():
            tensors = [tensor.double() for tensor in tensors]
        return torch.stack(
            [exact(tensor) * (size / sum(sizes)) for tensor, size in zip(tensors, sizes, strict=True)]
        ).sum()
    dims = [
        dim
        for dim in range(tensors[0].dim())
        if all(t.dim() > dim and t.shape[dim] == s for t, s in zip(tensors, sizes, strict=True))
    ]
    for dim in dims:
        shapes = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
        if len(shapes) == 1:
            return concatenated(tensors, dim)
    return list(tensors)
