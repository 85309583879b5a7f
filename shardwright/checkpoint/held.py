"""What a rank holds of the model: every parameter and persistent buffer, with its place in the full tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..files.boxes import Part, parts_of
from ..files.hf_names import tied_names
from ..interface.shards import kept_shard
from ..spec import ParamSpec, get_spec
from .position import Position


@dataclass(frozen=True)
class Held:
    """A flat, row-major range of a local tensor.

    spec         layout of the full tensor; its name is the one in the checkpoint
    coordinate   of this rank along the spec's axis
    local_shape  shape of the local tensor
    start, stop  the range
    tensor       its elements, of any shape; a live view
    is_writer    whether this rank saves it
    aliases      all names that the tensor has in the model
    """

    spec: ParamSpec
    coordinate: int
    local_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    is_writer: bool
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name

    def parts(self, owned: bool) -> list[Part]:
        """Boxes of the full tensor; `owned`: without rows that another rank saves."""
        return parts_of(self.spec, self.coordinate, self.local_shape, self.start, self.stop, owned)


@torch.no_grad()
def held_tensors(model: nn.Module, position: Position) -> list[Held]:
    """Parameters and persistent buffers of this rank's part of `model`, tied ones once, in the model's order."""
    # state_dict rather than named_parameters: its hooks bring sharded and pending weights to rest.
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name} of {type(model).__name__} is not a tensor (extra state of a module), which "
                "checkpoints do not hold"
            )
        names.setdefault(id(tensor), []).append(name)
    tied = tied_names(model)
    held, seen = [], set()
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            aliases = names[id(tensor)]
            spec = get_spec(tensor) or ParamSpec(
                tied.get(name, name) if tied.get(name) in aliases else name, tuple(tensor.shape)
            )
            held.append(_held(spec, tensor, position, tuple(aliases)))
    return held


def _held(spec: ParamSpec, tensor: torch.Tensor, position: Position, aliases: tuple[str, ...]) -> Held:
    coordinate, shape = position.coordinate(spec.axis), tuple(tensor.shape)
    kept = kept_shard(tensor)
    if kept is not None:
        start, stop, is_first, values = kept.start, kept.stop, kept.is_first, kept.read()
    elif isinstance(tensor, DTensor):
        start, stop, is_first = _dtensor_range(spec.name, tensor)
        values = tensor.to_local().detach()
    else:
        return Held(spec, coordinate, shape, 0, tensor.numel(), tensor.detach(), position.writes(spec), aliases)
    is_writer = is_first and spec.name not in position.copies and (spec.is_sharded or coordinate == 0)
    return Held(spec, coordinate, shape, start, stop, values, is_writer, aliases)


def _dtensor_range(name: str, tensor: DTensor) -> tuple[int, int, bool]:
    """(flat range that this rank holds, whether it is the first to hold it): FSDP2 deals rows as `torch.chunk` does."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    start, stop, is_first = 0, tensor.numel(), True
    sharded = [
        (mesh_dim, placement) for mesh_dim, placement in enumerate(tensor.placements) if not placement.is_replicate()
    ]
    if any(not isinstance(placement, Shard) or placement.dim != 0 for _, placement in sharded) or len(sharded) > 1:
        raise ValueError(
            f"{name} is placed as {tensor.placements}; checkpoints know tensors that are sharded along "
            "dim 0 of one mesh axis"
        )
    for mesh_dim, coordinate in enumerate(coordinates):
        if [mesh_dim] == [dim for dim, _ in sharded]:
            rows, inner = tensor.shape[0], math.prod(tensor.shape[1:])
            share = -(-rows // tensor.device_mesh.size(mesh_dim))
            start, stop = min(coordinate * share, rows) * inner, min((coordinate + 1) * share, rows) * inner
        else:
            is_first = is_first and coordinate == 0
    return start, stop, is_first
