"""Give a lazily built, sharded model its weights: this rank's slices, from a checkpoint directory or from the noted
initialisation.

    weights = LazyWeights.of(model)             # before sharding: names, tied groups, where each weight comes from
    ...                                         # shard: parameters become local shards, still on the meta device
    weights.materialize(model, coordinates)     # every parameter that is still held and still on the meta device

Each parameter is made by itself: read by slices where the file stores it as it is in memory, else made at full size on
the CPU, cut and freed. The host never holds more than this rank's shards and one full parameter. What a pipeline stage
has released is no longer among its parameters and is never made.
"""

from __future__ import annotations

import hashlib
import math
import re
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..files.huggingface import HfSource
from ..spec import ParamSpec, get_spec
from ..utils.device import move_buffers
from .notes import Notes, notes_of

_WEIGHTS: weakref.WeakKeyDictionary[nn.Module, LazyWeights] = weakref.WeakKeyDictionary()
SOURCE = "_shardwright_weight_source"  # an HfSource, on models whose weights are read instead of made
_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)")  # what peft adds to names


Owners = list[tuple[nn.Module, str]]  # modules that hold a parameter, and its names there


class LazyWeights:
    """The weights that a lazily built model would have, by full name."""

    def __init__(self, model: nn.Module) -> None:
        self._notes: dict[str, Notes] = {}
        self._canonical: dict[str, str] = {}  # one name for all names of a tied parameter
        first: dict[int, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._canonical[name] = first.setdefault(id(param), name)
            notes = notes_of(param)
            if notes is not None:
                self._notes[name] = notes
        self._sources = {
            name: module.__dict__[SOURCE] for name, module in model.named_modules() if SOURCE in module.__dict__
        }
        # files may hold a tied parameter under any one of its names
        self._stored_as: dict[str, tuple[HfSource, str]] = {}
        for name, one in self._canonical.items():
            stored = self._stored(name)
            if stored is not None:
                self._stored_as.setdefault(one, stored)
        self._room: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module) -> LazyWeights | None:
        """The weights of a model built in a `LazyInitContext`, None for any other. Call it before sharding; later
        calls give the same.
        """
        if model not in _WEIGHTS:
            reads = any(SOURCE in module.__dict__ for module in model.modules())  # copies do, and have no notes
            if not reads and not any(notes_of(param) is not None for param in model.parameters()):
                return None
            _WEIGHTS[model] = cls(model)
        return _WEIGHTS[model]

    def materialize(
        self, model: nn.Module, coordinates: Mapping[str, int] | int = 0, device: torch.device | str | None = None
    ) -> int:
        """Make every parameter of `model` that is on the meta device; returns their number.

        model         the model that `of` was given, sharded or not, or the part of it that this stage keeps
        coordinates   this rank's coordinate on each mesh axis that parameters are sharded over; a number stands for
                      every axis
        device        where the weights go; default: the context's `default_device`, else the CPU

        The parameter objects stay the same (but for recurrent modules), so optimizers built on them remain valid.
        Buffers move to `device`, and take the values of the checkpoint where it has them.
        """
        making = Materialization(self, model, coordinates, device)
        made = making.make(list(model.parameters()))
        making.finish()
        return made

    def fill(
        self,
        name: str,
        param: nn.Parameter,
        coordinates: Mapping[str, int] | int,
        device: torch.device | str | None,
        owners: Owners,
    ) -> None:
        """Make one parameter."""
        spec = get_spec(param) or ParamSpec(name, tuple(param.shape))
        local = self._make(spec, _coordinate(spec, coordinates))
        _fill(param, local, device or self._device(spec.name), owners)

    def fill_buffers(
        self, model: nn.Module, coordinates: Mapping[str, int] | int, device: torch.device | str | None
    ) -> None:
        """Give buffers the values of the checkpoint, and free what making weights needed."""
        for name, buffer in model.named_buffers():
            spec = get_spec(buffer) or ParamSpec(name, tuple(buffer.shape))
            stored = self._stored(spec.name)
            if stored is not None:
                source, name = stored
                buffer.copy_(source.shard(spec.renamed(name), _coordinate(spec, coordinates)))
        target = device or next((notes.device for notes in self._notes.values() if notes.device is not None), None)
        if target is not None:
            move_buffers(model, target)
        self._room = None
        for source in self._sources.values():
            source.close()

    def check(self, name: str, param: Tensor) -> None:
        """Everything that can go wrong is found before the first weight is made."""
        spec = get_spec(param)
        full_name = spec.name if spec is not None else name
        if self._canonical.get(full_name, full_name) in self._stored_as:
            return
        notes = self._notes.get(full_name)
        if notes is None:
            raise ValueError(
                f"{full_name} is on the meta device but was not built in the LazyInitContext of this model; "
                "add modules inside the context, or after the model was materialised"
            )
        if notes.obstacle is not None:
            raise ValueError(
                f"{full_name} {notes.obstacle}, so it cannot be made by itself; build the model outside of "
                "LazyInitContext, or initialise this parameter in its module's reset_parameters"
            )

    def _stored(self, name: str) -> tuple[HfSource, str] | None:
        """The files that have a tensor, and its name there. A model that reads files may stand inside of others, and
        peft's adapters stand around its modules; both name its tensors anew.
        """
        for place, source in self._sources.items():
            if not name.startswith(f"{place}." if place else ""):
                continue
            own = name[len(place) + 1 if place else 0 :]
            for known in (own, _OF_ADAPTERS.sub("", own)):
                if known in source:
                    return source, known
        return None

    def _make(self, spec: ParamSpec, coordinate: int) -> Tensor:
        name = self._canonical.get(spec.name, spec.name)
        if name in self._stored_as:
            source, stored = self._stored_as[name]
            return source.shard(spec.renamed(stored), coordinate)
        notes = self._notes[name]
        digest = hashlib.blake2b(f"{notes.seed}:{name}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        if spec.dim is None:
            # of a single number as of one element: a replay keeps no memory for elements, and looks at numbers
            return notes.make(seed, torch.empty(notes.shape or (1,), dtype=notes.dtype).view(notes.shape))
        return spec.shard(notes.make(seed, self._full(notes)), coordinate)

    def _full(self, notes: Notes) -> Tensor:
        """Room for one full parameter, the same memory each time: the allocator would leave holes between the
        shards.
        """
        needed = math.prod(notes.shape) * notes.dtype.itemsize
        if self._room is None or self._room.numel() < needed:
            self._room = None
            self._room = torch.empty(needed, dtype=torch.uint8)
        return self._room[:needed].view(notes.dtype).view(notes.shape)

    def _device(self, name: str) -> torch.device | str:
        notes = self._notes.get(name)
        return "cpu" if notes is None or notes.device is None else notes.device


class Materialization:
    """The weights of `model`, made in as many pieces as the caller likes: `make` for some parameters at a time, then
    `finish`.

    The arguments are those of `LazyWeights.materialize`. Everything that can go wrong is found before the first weight
    is made.
    """

    def __init__(
        self,
        weights: LazyWeights,
        model: nn.Module,
        coordinates: Mapping[str, int] | int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self._weights, self._model, self._coordinates, self._device = weights, model, coordinates, device
        self._names = {id(param): name for name, param in model.named_parameters() if param.is_meta}
        for name, param in model.named_parameters():
            if param.is_meta:
                weights.check(name, param)
        self._owners: dict[int, Owners] = {}
        for module in model.modules():
            for name, held in module._parameters.items():
                self._owners.setdefault(id(held), []).append((module, name))

    def make(self, params: Sequence[nn.Parameter]) -> int:
        """Make those of `params` that are on the meta device; returns their number."""
        missing = [param for param in params if param.is_meta]
        for param in missing:
            self._weights.fill(self._names[id(param)], param, self._coordinates, self._device, self._owners[id(param)])
        return len(missing)

    def make_replaced(self) -> None:
        """Make those that become new objects (of recurrent modules), before anybody holds the old ones."""
        self.make([param for param in self._model.parameters() if weakref.getweakrefcount(param)])

    def finish(self) -> None:
        self._weights.fill_buffers(self._model, self._coordinates, self._device)


def _coordinate(spec: ParamSpec, coordinates: Mapping[str, int] | int) -> int:
    if isinstance(coordinates, int):
        return coordinates
    return coordinates[spec.axis] if spec.is_sharded else 0


@torch.no_grad()
def _fill(param: nn.Parameter, local: Tensor, device: torch.device | str, owners: list[tuple[nn.Module, str]]) -> None:
    assert local.shape == param.shape, f"made {tuple(local.shape)} for a parameter of shape {tuple(param.shape)}"
    made = nn.Parameter(local.to(device=device, dtype=param.dtype), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    # recurrent modules keep weak references; they take a new object as torch's own `to` gives them
    if weakref.getweakrefcount(param):
        for module, name in owners:
            setattr(module, name, made)
    else:
        torch.utils.swap_tensors(param, made)
