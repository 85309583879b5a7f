"""Microbatches that are made where the batch is made: with lengths of their own, and with entries that nobody could
split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...utils.tensors import map_tensors
from ...utils.transfer import to_device
from .microbatch import OTHER_ROWS, Batch, batch_size, find_batch_dim, items_of, split_batch
from .regroup import regroup


class Microbatches(list[Batch]):
    """The microbatches of one step, ready-made: what a data iterator gives to `execute_pipeline` in place of a batch to
    be split.

        def collate(samples):
            samples.sort(key=len)
            return shardwright.Microbatches([pad(samples[:4]), pad(samples[4:])])

    Each is a batch of its own (a dict, list or tuple of tensors, or one tensor) and may have its own number of samples,
    its own length, and entries in rows that are not samples (patches of images). The loss is that of all of them,
    weighed by what counts in it, as for a batch that was split. An object that several of them hold is the same for
    all; other entries belong to their microbatch.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        if isinstance(batches, Mapping | str | torch.Tensor):
            raise ValueError(
                "Microbatches takes a list of batches, one for each microbatch, not a "
                f"single {type(batches).__name__}: Microbatches([batch])"
            )
        super().__init__(batches)


def check_ready(
    batches: Microbatches, num_microbatches: int | None, microbatch_size: int | None, alike: bool = False
) -> None:
    """ValueError for microbatches that are none, or that the settings contradict. `alike`: see `as_microbatches`."""
    if not batches:
        raise ValueError("Microbatches([]) has no microbatch; a pipeline step needs at least 1")
    if alike and num_microbatches is None:
        raise ValueError(
            "ready-made microbatches need num_microbatches with zero_stage 2 or 3 on several data-parallel ranks, "
            "which exchange gradients or parameters for every microbatch and so must have equally many: "
            f"num_microbatches={len(batches)} fits this step"
        )
    if num_microbatches is not None and len(batches) != num_microbatches:
        raise ValueError(
            f"the iterator gave {len(batches)} ready-made microbatches, but num_microbatches={num_microbatches}: give "
            "that many in every step, or set microbatch_size, the most samples that one may have, in place of "
            "num_microbatches: then every step has as many as it is given"
        )
    for index, batch in enumerate(batches):
        if isinstance(batch, Microbatches):
            raise ValueError(
                f"ready-made microbatch {index} is a list of Microbatches itself; give one flat list per step"
            )
        try:
            samples = batch_size(batch)
        except ValueError as error:
            raise ValueError(f"ready-made microbatch {index}: {error}") from None
        if samples < 1:
            raise ValueError(f"ready-made microbatch {index} has no samples; leave it out, or give it 1 at least")
        if num_microbatches is None and microbatch_size is not None and samples > microbatch_size:
            raise ValueError(
                f"ready-made microbatch {index} has {samples} samples, but microbatch_size={microbatch_size} allows no "
                "more: make it smaller, or microbatch_size larger"
            )


def map_once(function: Any, batches: Sequence[Batch]) -> list[Batch]:
    """All batches with `function` applied to their tensors, once to one that several of them hold."""
    known: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = function(tensor)
        return known[id(tensor)]

    return [map_tensors(once, batch) for batch in batches]


def form_of(batch: Batch, shared: frozenset[Any]) -> tuple[Any, ...]:
    """Equal for microbatches that differ in how many samples they have, or in rows that are none, and in nothing
    else that has a shape.
    """
    samples, form = batch_size(batch), []
    for key, value in items_of(batch):
        if isinstance(value, torch.Tensor) and key not in shared:
            dim = find_batch_dim(key, value, samples)
            shape: list[int | None] = list(value.shape)
            if dim == OTHER_ROWS:
                continue
            if dim is not None:
                shape[dim] = None
            form.append((str(key), tuple(shape), str(value.dtype)))
    return tuple(form)


def as_microbatches(
    batch: Batch | Microbatches,
    num_microbatches: int | None,
    microbatch_size: int | None,
    device: torch.device | None = None,
    alike: bool = False,
    config: Any = None,
    keeps_documents_apart: Callable[[], bool] | None = None,
    divide: Callable[[Any], Batch] | None = None,
) -> tuple[Batch | Microbatches, list[Batch]]:
    """(the batch, its microbatches), moved to `device`; ValueError for a batch that has none.

    alike   all data-parallel ranks need equally many
    config, keeps_documents_apart   of the model, see `regroup`
    divide  makes this rank's part of what several ranks share along its sequences; documents are told apart before,
            while positions still count on from token to token
    Models get copies, since some write to their inputs, while tokens are counted in the batch.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if device is None else to_device(tensor, device)

    if isinstance(batch, Microbatches):
        check_ready(batch, num_microbatches, microbatch_size, alike)
    elif (parts := regroup(batch, num_microbatches, microbatch_size, config, alike, keeps_documents_apart)) is not None:
        batch = Microbatches(parts)
    if not isinstance(batch, Microbatches):
        batch = map_tensors(move, batch if divide is None else divide(batch))
        return batch, split_batch(batch, num_microbatches, microbatch_size)
    batch = Microbatches(map_once(move, batch if divide is None else [divide(part) for part in batch]))
    return batch, map_once(torch.clone, batch)
