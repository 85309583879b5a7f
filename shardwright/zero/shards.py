"""An optimizer's segments as the parts that checkpoints write and read (see `interface.shards`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..interface.shards import LoadedShard, ParamShard
from ..spec import ParamSpec
from .bucket import Bucket
from .layout import Slot
from .segments import Segment, Segments, is_elementwise_state


def list_shards(segments: Segments, is_writer: Callable[[Bucket, ParamSpec], bool]) -> list[ParamShard]:
    """Parts of parameters in the order of the segments."""
    result = []
    for segment in segments.items:
        state = segments.state_of(segment)
        for slot, where, (start, stop) in segment.parts():
            flat = {key: value.flatten()[where] for key, value in state.items() if is_elementwise_state(value, segment)}
            result.append(
                ParamShard(
                    name=slot.entry.spec.name,
                    spec=slot.entry.spec,
                    local_shape=tuple(slot.entry.param.shape),
                    start=start,
                    stop=stop,
                    group=slot.entry.group,
                    master=segment.tensor.flatten()[where],
                    state=flat,
                    extra={key: torch.as_tensor(value) for key, value in state.items() if key not in flat},
                    is_writer=is_writer(segment.bucket, slot.entry.spec),
                )
            )
    return result


def load_shards(
    segments: Segments, optim: Optimizer, loaded: Mapping[str, LoadedShard], counts_on_device: bool
) -> None:
    """Put masters and states, by parameter name, into the segments. Only fused kernels count steps on the device."""
    check_complete({slot.entry.spec.name for segment in segments.items for slot in segment.run.slots}, set(loaded))
    # Step counts may differ within a segment: cut at every parameter that does not continue the one before it.
    cut: set[Slot] = set()
    for segment in segments.items:
        extras = [loaded[slot.entry.spec.name].extra for slot in segment.run.slots]
        keys = [set(loaded[slot.entry.spec.name].state) for slot in segment.run.slots]
        if any(not _same(extras[0], other) for other in extras[1:]) or any(keys[0] != other for other in keys[1:]):
            cut.update(segment.run.slots)
    optim.state.clear()
    segments.cut(cut)
    for segment in segments.items:
        state = _loaded_state(segment, loaded, counts_on_device)
        if state:
            optim.state[segment.tensor] = state


def _loaded_state(segment: Segment, loaded: Mapping[str, LoadedShard], counts_on_device: bool) -> dict[str, Any]:
    first = loaded[segment.run.slots[0].entry.spec.name]
    state: dict[str, Any] = {key: _like_state(value, segment, counts_on_device) for key, value in first.extra.items()}
    state |= {key: torch.zeros_like(segment.tensor, dtype=value.dtype) for key, value in first.state.items()}
    for slot, where, (start, stop) in segment.parts():
        shard = loaded[slot.entry.spec.name]
        for name, value in (("master", shard.master), *shard.state.items()):
            if value is not None and value.numel() != stop - start:
                raise ValueError(
                    f"{slot.entry.spec.name}: {name} has {value.numel()} elements, this rank owns {stop - start}"
                )
        if shard.master is not None:
            segment.tensor.view(-1)[where].copy_(shard.master.flatten())
        for key, value in shard.state.items():
            state[key].view(-1)[where].copy_(value.flatten())
    return state


def check_complete(wanted: set[str], given: set[str]) -> None:
    """Refuse a set of loaded parameters that does not match this rank's."""
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if missing or unknown:
        raise ValueError(
            f"optimizer state does not fit: {len(missing)} parameters of this rank are missing "
            f"({', '.join(missing[:5])}), {len(unknown)} are unknown ({', '.join(unknown[:5])})"
        )


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _like_state(value: torch.Tensor, segment: Segment, on_device: bool) -> torch.Tensor:
    """A state entry that is not per element, where torch's kernels expect it."""
    device = segment.tensor.device if value.ndim or on_device else torch.device("cpu")
    return value.detach().clone().to(device)
