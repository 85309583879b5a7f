"""Batches whose entries are not all in rows of samples, cut where their own entries say how.

    pixel_values [patches, d], image_grid_thw [images, 3]      images follow the samples whose image tokens they fill
    input_ids [1, T] of several documents, without a mask      cut between documents, where position_ids begin again

Both give microbatches as a script could have made them (`ready.Microbatches`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from .microbatch import GRIDS, Batch, batch_dim, batch_size, microbatch_sizes

_READY = "Let the iterator give the microbatches themselves: shardwright.Microbatches([first, second, ...])"
_IGNORED = -100
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = {"max_length_q": "cu_seq_lens_q", "max_length_k": "cu_seq_lens_k"}


def regroup(
    batch: Batch,
    num_microbatches: int | None,
    microbatch_size: int | None,
    config: Any = None,
    alike: bool = False,
    keeps_documents_apart: Callable[[], bool] | None = None,
) -> list[Batch] | None:
    """The microbatches of such a batch; None for all others.

    config  of the model, which says what an image token is
    alike   there must be as many as asked for
    keeps_documents_apart  whether the model does, in a packed row; None: it does not
    """
    if not isinstance(batch, Mapping):
        return None
    if any(isinstance(batch.get(grid), torch.Tensor) for grid in GRIDS):
        return _by_images(batch, num_microbatches, microbatch_size, config)
    if num_microbatches is None or num_microbatches == 1 or keeps_documents_apart is None:
        return None
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if (
        not isinstance(tokens, torch.Tensor)
        or tokens.dim() < 2
        or tokens.shape[0] != 1
        or batch.get("attention_mask") is not None
    ):
        return None
    starts = _document_starts(batch, tokens.shape[1])
    return (
        _by_documents(batch, num_microbatches, starts, alike) if len(starts) > 1 and keeps_documents_apart() else None
    )


# Images
# ----------------------------------------------------------------------------------------------------------------


def _by_images(
    batch: Mapping[str, Any], num_microbatches: int | None, microbatch_size: int | None, config: Any
) -> list[Batch]:
    samples = batch_size(batch)
    sizes = microbatch_sizes(samples, num_microbatches, microbatch_size)
    if len(sizes) == 1:
        return [batch]
    items = {
        key
        for grid, (patches, _) in GRIDS.items()
        if isinstance(batch.get(grid), torch.Tensor)
        for key in (grid, patches)
    }
    dims = {key: batch_dim(key, value, samples) for key, value in batch.items() if key not in items}
    starts = [0, *accumulate(sizes)]
    microbatches: list[dict[str, Any]] = [
        {key: batch[key] if dim is None else batch[key].narrow(dim, start, end - start) for key, dim in dims.items()}
        for start, end in pairwise(starts)
    ]
    for grid, (patches, token) in GRIDS.items():
        if grid in items:
            owners = _owners(batch, grid, patches, token, config)
            _deal(batch, grid, patches, [owners[start:end] for start, end in pairwise(starts)], microbatches)
    return microbatches


def _owners(batch: Mapping[str, Any], grid: str, patches: str, token: str, config: Any) -> list[int]:
    """How many images (or videos) each sample has."""
    rule = (
        f"{patches} and {grid} are split by the {token.removesuffix('_id').replace('_', ' ')}s that each "
        "sample of input_ids has"
    )
    marker = getattr(config, token, None)
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    ids, rows = batch.get("input_ids"), batch[grid]
    if not isinstance(marker, int) or not isinstance(merge, int) or not isinstance(ids, torch.Tensor):
        raise ValueError(
            f"{rule}, but the batch has no input_ids, or the model's config no {token} and "
            f"vision_config.spatial_merge_size. {_READY}"
        )
    given = batch.get(patches)
    areas = rows.prod(-1).tolist()
    if not isinstance(given, torch.Tensor) or given.shape[0] != sum(areas):
        shape = list(given.shape) if isinstance(given, torch.Tensor) else None
        raise ValueError(
            f"{grid} tells of {sum(areas)} patches, and {patches} has shape {shape}: they do not belong together"
        )
    lengths, owners, place = [area // merge**2 for area in areas], [], 0
    for sample, wanted in enumerate((ids == marker).sum(-1).tolist()):
        first = place
        while wanted > 0 and place < len(lengths):
            wanted -= lengths[place]
            place += 1
        if wanted:
            raise ValueError(
                f"{rule}, but those of sample {sample} are not filled by whole rows of {grid}, beginning at row "
                f"{first}: {grid} lists the images of the samples in order, one row each. {_READY}"
            )
        owners.append(place - first)
    if place < len(lengths):
        raise ValueError(
            f"{rule}, but {len(lengths) - place} of {len(lengths)} rows of {grid} belong to no sample. {_READY}"
        )
    return owners


def _deal(
    batch: Mapping[str, Any],
    grid: str,
    patches: str,
    owners: Sequence[Sequence[int]],
    microbatches: Sequence[dict[str, Any]],
) -> None:
    """Give microbatches their images; one without any has no such entries."""
    areas = batch[grid].prod(-1).tolist()
    image = patch = 0
    for counts, microbatch in zip(owners, microbatches, strict=True):
        images = sum(counts)
        rows = sum(areas[image : image + images])
        if images:
            microbatch[grid] = batch[grid].narrow(0, image, images)
            microbatch[patches] = batch[patches].narrow(0, patch, rows)
        image, patch = image + images, patch + rows


# Documents
# -------------------------------------------------------------------------------------------------------------


def _by_documents(batch: Mapping[str, Any], num_microbatches: int, starts: Sequence[int], alike: bool) -> list[Batch]:
    length = batch["position_ids"].shape[1]
    if alike and len(starts) < num_microbatches:
        raise ValueError(
            f"a packed row of {len(starts)} documents cannot be cut into num_microbatches={num_microbatches} pieces of "
            "whole documents, and with zero_stage 2 or 3 all data-parallel ranks need equally many: pack more "
            "documents, or use fewer microbatches"
        )
    pieces = _pieces(starts, length, min(num_microbatches, len(starts)))
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == (1, length):
        counted = [start for start, _ in pieces[1:] if int(labels[0, start]) != _IGNORED]
        if counted:
            raise ValueError(
                "the packed row is cut between its documents, but labels[0, "
                f"{counted[0]}]={int(labels[0, counted[0]])} makes the last token of one predict the first of the "
                "next: set labels to -100 where documents begin, as transformers' DataCollatorWithFlattening does, or "
                f"use num_microbatches=1. {_READY}"
            )
    return [
        {key: _piece(key, value, length, start, end, batch) for key, value in batch.items()} for start, end in pieces
    ]


def _document_starts(batch: Mapping[str, Any], length: int) -> list[int]:
    """First tokens of documents: where positions do not count on, which is what transformers goes by, and where
    cu_seq_lens agree.
    """
    positions, ends = batch.get("position_ids"), batch.get(_ENDS[0])
    if not isinstance(positions, torch.Tensor) or positions.shape != (1, length):
        return [0]
    starts = [0, *((positions[0].diff() != 1).nonzero().squeeze(1) + 1).tolist()]
    if isinstance(ends, torch.Tensor):
        known = set(ends.tolist())
        starts = [start for start in starts if start in known]
    return starts


def _pieces(starts: Sequence[int], length: int, number: int) -> list[tuple[int, int]]:
    """(start, end) of `number` pieces of whole documents, of nearly as many tokens each."""
    chosen, first = [0], 0
    for piece in range(1, number):
        # Every piece to come needs a document.
        candidates = range(first + 1, len(starts) - (number - piece) + 1)
        first = min(candidates, key=lambda place: abs(starts[place] - piece * length / number))
        chosen.append(starts[first])
    return list(pairwise([*chosen, length]))


def _piece(key: str, value: Any, length: int, start: int, end: int, batch: Mapping[str, Any]) -> Any:
    if key in _ENDS and isinstance(value, torch.Tensor):
        return value[(value >= start) & (value <= end)] - start
    if key in _LONGEST and isinstance(batch.get(_LONGEST[key]), torch.Tensor):
        ends = batch[_LONGEST[key]]
        longest = ends[(ends >= start) & (ends <= end)].diff().max()
        return longest.to(value.dtype) if isinstance(value, torch.Tensor) else int(longest)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or length not in value.shape[1:]:
        return value
    if value.shape[:2] != (1, length) or length in value.shape[2:]:
        raise ValueError(
            f"a packed row of {length} tokens is cut between its documents, but entry {key!r} of shape "
            f"{list(value.shape)} is not [1, {length}, ...]: leave masks out, since position_ids tell the documents "
            f"apart. {_READY}"
        )
    return value.narrow(1, start, end - start)
