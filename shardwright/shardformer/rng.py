"""Random numbers under tensor parallelism: masks that differ over the ranks where activations are sharded and agree
where they are not.

All ranks of a tensor-parallel group keep the *global* generators in step (`synchronize_rng` once, at sharding):
whatever runs on replicated activations draws the same numbers everywhere, as it would on one process. A sharded region
draws one number from the CPU generator, the same on all ranks, mixes it with the rank and seeds the generators with the
result until the region ends; then the global state goes on from where the draw left it.

So the global state is the only state there is. Activation checkpointing, reentrant or not, saves and restores exactly
that (`preserve_rng_state`), hence a recomputed region draws the same seed and the same masks; and a training checkpoint
needs to save nothing else.

A region is a stretch of time, not a module: it opens when its module is entered (or at a column linear inside) and ends
with the row linear whose output is replicated again, or with the module. `nn.Dropout`, `F.dropout` and the `dropout_p`
of attention kernels all draw from the global generators, so all of them are reached without touching a forward
(`drawing_regions`).

In a graph of torch.compile each step of this is an operator (`ops.compiled_numbers`) on a tensor that passes by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..models.config import parts
from ..ops import compiled
from ..ops.compiled_numbers import BEGIN, CLOSE, END, OPEN, name_numbers
from ..utils.device import host_device
from ..utils.generators import States, accelerator_module, get_states, set_states

OWN, SHARED = "own", "shared"
_MASK = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # spreads neighbouring ranks over all bits
_PLACES = 0xD1B54A32D192ED03  # likewise, for places


class ShardedRng:
    """The random numbers of sharded regions of one group. Get it with `sharded_rng(group)`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        self._size = group.size()
        self.name = name_numbers(compiled.name_of(group), self)
        # A forward and the recomputation of another microbatch, on a thread of its own, may each be in a region
        # (`pipeline.two_at_once`).
        self._of_thread = threading.local()

    @property
    def _outer(self) -> States | None:
        """The global states while a region is open."""
        outer: States | None = getattr(self._of_thread, "outer", None)
        return outer

    @_outer.setter
    def _outer(self, states: States | None) -> None:
        self._of_thread.outer = states

    @property
    def _around(self) -> list[States | None]:
        """For each `fork` and `replicated` that we are in, what its end goes by."""
        around: list[States | None] | None = getattr(self._of_thread, "around", None)
        if around is None:
            around = self._of_thread.around = []
        return around

    @property
    def is_open(self) -> bool:
        return self._outer is not None

    def open(self) -> None:
        """Go over to this rank's own numbers; nothing happens if a region is open already."""
        if self._outer is None and self._size > 1:
            seed = int(torch.randint(_MASK, ()))
            self._outer = get_states()
            _seed((seed ^ ((self._rank + 1) * _GOLDEN)) & _MASK)

    def close(self) -> None:
        """Go back to the numbers that all ranks share."""
        if self._outer is not None:
            set_states(self._outer)
            self._outer = None

    def fork(self) -> AbstractContextManager[None]:
        """A sharded region of its own, or part of the one that is open."""
        return self.between(OWN)

    def replicated(self) -> AbstractContextManager[None]:
        """Shared numbers within a sharded region, for replicated activations in its middle."""
        return self.between(SHARED)

    @contextmanager
    def between(self, numbers: str) -> Iterator[None]:
        self.switch(BEGIN + numbers)
        try:
            yield
        finally:
            self.switch(END + numbers)

    def switch(self, to: str) -> None:
        """By name: `open`, `close`, and what is done at both ends of `between`."""
        if to == OPEN:
            self.open()
        elif to == CLOSE:
            self.close()
        elif to == BEGIN + OWN:
            self._around.append(self._outer)
            self.open()
        elif to == END + OWN:
            if self._around.pop() is None:
                self.close()
        elif to == BEGIN + SHARED:
            self._around.append(None if self._outer is None else get_states())
            self.close()
        elif to == END + SHARED:
            inner = self._around.pop()
            if inner is not None:
                self._outer = get_states()
                set_states(inner)
        else:
            raise AssertionError(to)

    def mark(self) -> Mark:
        return Mark(self.is_open, len(self._around))

    def go_back(self, mark: Mark) -> None:
        """To where a graph began that has ended with an error."""
        del self._around[mark.depth :]
        if not mark.is_open:
            self.close()


class Mark(NamedTuple):
    """
    depth   of `fork` and `replicated` in one another
    """

    is_open: bool
    depth: int


class PlacedNumbers:
    """Random numbers of the forwards at one place of the mesh, where other data or other layers are than at other
    places.

    The ranks of a job are seeded alike, and what a script draws must stay alike. So a forward draws one number, mixes
    it with the place and goes on with that, as a sharded region does with the rank; regions draw theirs inside. Ranks
    of one place (tensor parallelism) agree.

    place   number of the data-parallel, pipeline and sequence coordinates; None: there is one place only, and nothing
            is done
    model   asked whether it trains
    """

    def __init__(self, place: int | None, model: nn.Module) -> None:
        self._place, self._model = place, model

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._place is None or not self._model.training:
            yield
            return
        seed = int(torch.randint(_MASK, ()))
        outer = get_states()
        _seed((seed ^ ((self._place + 1) * _PLACES)) & _MASK)
        try:
            yield
        finally:
            set_states(outer)


_trackers: dict[dist.ProcessGroup, ShardedRng] = {}


def sharded_rng(group: dist.ProcessGroup) -> ShardedRng:
    """The one `ShardedRng` of a group."""
    if group not in _trackers:
        _trackers[group] = ShardedRng(group)
    return _trackers[group]


def synchronize_rng(group: dist.ProcessGroup) -> None:
    """Give all ranks of `group` the generator states of its first rank, whatever they were seeded with before."""
    if group.size() == 1:
        return
    states = get_states()
    for number, state in enumerate(states):
        shared = state.to(host_device(group))
        dist.broadcast(shared, group=group, group_src=0)
        states[number] = shared.to(state.device)
    set_states(states)


def uses_dropout(module: nn.Module) -> bool:
    """Whether any dropout with a positive probability is found in `module`: as a sub-module or as a `*drop*` number
    of one.
    """
    return any(
        "drop" in name.lower() and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        for part in module.modules()
        for name, value in [*vars(part).items(), (type(part).__name__, getattr(part, "p", None))]
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, in which every number that says how often something is dropped is zero: of modules, and of configs."""
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    owners = [*model.modules(), *(each for config in configs.values() for each in parts(config))]
    for owner in owners:
        if not hasattr(owner, "__dict__"):  # what a module calls its config may be anything
            continue
        for name, value in list(vars(owner).items()):
            drops = "drop" in name.lower() or (name == "p" and "drop" in type(owner).__name__.lower())
            if drops and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(owner, name, type(value)(0))
    return model


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    accelerator = accelerator_module()
    if accelerator is not None:
        accelerator.manual_seed(seed)
