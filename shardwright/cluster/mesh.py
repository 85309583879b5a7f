"""The mesh of processes: which rank sits where along the data, expert, pipeline, tensor and sequence axes.

Axes of the base mesh, outermost first:

    dp outside (default)   replica  shard  ep  pp  tp  sp
    dp inside              pp  replica  shard  ep  tp  sp
    ring attention         ... sp  tp instead of tp  sp

`replica x shard x ep = dp`: ranks along ep see different samples too, and hold different experts. Derived axes, each
with a process group of its own:

    dp            replica x shard x ep            data-parallel ranks: they see different samples
    dp_sp         dp x sp                         gradient synchronisation: they hold the same parameters
    zero          shard x ep x sp                 one ZeRO sub-group: optimizer shards live inside it
    zero_replica  replica                         across the sub-groups: the same shard, reduced a second time
    expert_dp     replica x shard x sp            as dp_sp, for experts: they hold the same ones
    expert_zero   shard x sp                      as zero, for experts
    ep_tp         ep x tp                         experts, each cut over tp
    dp_pp, ...    any other product of axes       made on demand by `group("dp", "pp")`
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..utils.device import device_type_of_backend
from ..utils.errors import divisors, nearest
from . import job
from .groups import shared_group

_DERIVED = {
    "dp": ("replica", "shard", "ep"),
    "zero": ("shard", "ep", "sp"),
    "zero_replica": ("replica",),
    "dp_sp": ("replica", "shard", "ep", "sp"),
    "expert_dp": ("replica", "shard", "sp"),
    "expert_zero": ("shard", "sp"),
    "ep_tp": ("ep", "tp"),
    "world": ("replica", "shard", "ep", "pp", "tp", "sp"),
}


class ParallelMesh:
    """Sizes, coordinates and process groups of every axis. Creating one is collective: all ranks must do it."""

    def __init__(
        self,
        pp: int = 1,
        tp: int = 1,
        sp: int = 1,
        dp: int | None = None,
        *,
        ep: int = 1,
        dp_outside: bool = True,
        ring_attention: bool = False,
        zero_group_size: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "no process group: call shardwright.launch_from_torch() (or launch) before building a plugin"
            )
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        dp, shard = validate_sizes(self.world_size, pp=pp, tp=tp, sp=sp, dp=dp, zero_group_size=zero_group_size, ep=ep)
        sizes = {"replica": dp // shard, "shard": shard // ep, "ep": ep, "pp": pp, "tp": tp, "sp": sp}
        inner = ("sp", "tp") if ring_attention else ("tp", "sp")
        data = ("replica", "shard", "ep") if ep > 1 else ("replica", "shard")
        outer = (*data, "pp") if dp_outside else ("pp", *data)
        self.axes: tuple[str, ...] = outer + inner
        self._sizes = sizes
        self._ranks = torch.arange(self.world_size).view([sizes[axis] for axis in self.axes])
        position = (self._ranks == self.rank).nonzero()[0].tolist()
        self._coordinates = dict(zip(self.axes, position, strict=True))
        self.device_type = device_type_of_backend(dist.get_backend())
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Made now and in this order on every rank: creating a group is collective.
        for axis in ("dp", "pp", "tp", "sp", "dp_sp", "zero", "zero_replica"):
            self.group(axis)
        if ep > 1:
            for axis in ("ep", "expert_dp", "expert_zero", "ep_tp"):
                self.group(axis)
        shown = [axis for axis in ("dp", "ep", "pp", "tp", "sp") if axis not in ("ep", "sp") or sizes[axis] > 1]
        job.set_place(", ".join(f"{axis}={self.coordinate(axis)}" for axis in shown))

    def size(self, *axes: str) -> int:
        """Number of ranks along the product of `axes`."""
        return math.prod(self._sizes[axis] for axis in self._expand(axes))

    def coordinate(self, *axes: str) -> int:
        """This rank's position along `axes`, the same as its rank in their group: the innermost axis of the mesh
        runs fastest.
        """
        position = 0
        for axis in self._expand(axes):
            position = position * self._sizes[axis] + self._coordinates[axis]
        return position

    def ranks(self, *axes: str) -> list[int]:
        """Global ranks along `axes` through this rank, ascending, which is the order of `coordinate`."""
        names = self._expand(axes)
        index = tuple(slice(None) if axis in names else self._coordinates[axis] for axis in self.axes)
        ranks: list[int] = self._ranks[index].flatten().tolist()
        return ranks

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group along `axes`. The first call for a product of axes is collective over all ranks.

        Groups along axes split the ranks evenly, so a rank's own group says what those of all others are, as
        `shared_group` needs it.
        """
        key = tuple(self.ranks(*axes))
        if key not in self._groups:
            whole = key == tuple(range(self.world_size))
            group = dist.group.WORLD if whole else self._shared_group("axes", key)
            assert group is not None
            self._groups[key] = group
        return self._groups[key]

    def neighbours(self, axis: str, size: int) -> dist.ProcessGroup:
        """The group of `size` ranks that follow each other along `axis`, this rank among them; collective over it."""
        line = self.ranks(axis)
        assert len(line) % size == 0, f"{size} does not divide {len(line)}"
        first = self.coordinate(axis) // size * size
        return self.group(axis) if size == len(line) else self._shared_group("near", line[first : first + size])

    @staticmethod
    def _shared_group(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        assert list(ranks) == sorted(ranks), "torch orders the ranks of a group, so coordinates must ascend with them"
        return shared_group((purpose, tuple(ranks)), ranks, use_local_synchronization=True)

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Global ranks of `group`, in its order."""
        return dist.get_process_group_ranks(group)

    def stage_ranks(self, stages: Sequence[int]) -> list[int]:
        """Global ranks of pipeline positions `stages` with this rank's other coordinates."""
        line = self.ranks("pp")
        return [line[stage] for stage in stages]

    def tied_group(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the pipeline positions that hold a copy of one tied parameter (first and last for embeddings).

        None on ranks of other positions, which hold no copy but must call this too: they make a group of one in place
        of theirs, so that all ranks have as many groups, after which torch names those that a script makes of some
        ranks.
        """
        holders = sorted(set(stages))
        if len(holders) == self.size("pp"):
            return self.group("pp")
        present = self.coordinate("pp") in holders
        key = ("tied", tuple(self.ranks("pp")), tuple(holders))
        group = shared_group(key, self.stage_ranks(holders) if present else [self.rank], use_local_synchronization=True)
        return group if present else None

    def message_groups(self, channels: Sequence[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
        """The process group of each of the channels that this rank sends or receives in. Collective over the pipeline.

        channels  (source, destination) of all, as pipeline positions, in the order in which they are to be made

        No collective uses these groups: debugging checks and NCCL both count operations per group, and ranks send
        different numbers of messages. Ranks at the ends, which have fewer neighbors, make groups of one beside theirs:
        see `tied_group`.
        """
        line, here, channels = self.ranks("pp"), self.coordinate("pp"), tuple(channels)
        found = {}
        for channel in channels:
            if here in channel:
                key = ("messages", tuple(line), channels, channel)
                found[channel] = shared_group(key, self.stage_ranks(sorted(channel)), use_local_synchronization=True)
        most = max(Counter(position for channel in channels for position in channel).values(), default=0)
        for number in range(len(found), most):
            shared_group(("no messages", tuple(line), channels, number), [self.rank], use_local_synchronization=True)
        return found

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """A torch DeviceMesh over `axes`, for FSDP2 and for describing shards to a checkpoint; it reuses the groups."""
        if len(axes) == 1:
            mesh = DeviceMesh.from_group(
                self.group(axes[0]), self.device_type, mesh=torch.tensor(self.ranks(axes[0])), mesh_dim_names=axes
            )
        else:
            shape = [self.size(axis) for axis in axes]
            ranks = torch.tensor(self.ranks(*axes)).view(shape)
            mesh = DeviceMesh.from_group(
                [self.group(axis) for axis in axes], self.device_type, mesh=ranks, mesh_dim_names=axes
            )
        assert isinstance(mesh, DeviceMesh)
        return mesh

    def _expand(self, axes: Sequence[str]) -> list[str]:
        names: list[str] = []
        for axis in axes:
            if axis not in _DERIVED and axis not in self._sizes:
                known = [*self._sizes, *_DERIVED]
                raise ValueError(
                    f"mesh axis {axis!r} does not exist; the axes are {', '.join(known)}{nearest(axis, known)}"
                )
            names += _DERIVED.get(axis, (axis,))
        return [axis for axis in self.axes if axis in names]

    def __repr__(self) -> str:
        axes = ("dp", "pp", "tp", "sp") + (("ep",) if self.size("ep") > 1 else ())
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in axes)
        return (
            f"ParallelMesh({sizes}, zero={self.size('shard', 'ep')}, world_size={self.world_size}, "
            f"order={'x'.join(self.axes)})"
        )


def validate_sizes(
    world_size: int, *, pp: int, tp: int, sp: int, dp: int | None, zero_group_size: int | None, ep: int = 1
) -> tuple[int, int]:
    """Check the layout against the world once; returns (dp, size of a ZeRO sub-group along dp).

    `zero_group_size`: None or <= 0 the whole data-parallel group, 1 no sharding, else a divisor of dp. `ep` divides it.
    """
    given = {"pp_size": pp, "tp_size": tp, "sp_size": sp, "dp_size": dp if dp is not None else 1, "ep_size": ep}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    model = pp * tp * sp
    layout = f"tp_size={tp} x pp_size={pp} x sp_size={sp}"
    if world_size % model:
        fits = [f"{name}={size}" for name, size in _sizes_that_fit(world_size, pp=pp, tp=tp, sp=sp)]
        worlds = sorted({max(model, world_size // model * model), (world_size // model + 1) * model})
        raise ValueError(
            f"world_size={world_size} is not divisible by {layout} = {model}: every data-parallel replica takes "
            f"{model} ranks. Start {' or '.join(map(str, worlds))} "
            "ranks" + (f", or use {' or '.join(fits)}" if fits else "")
        )
    rest = world_size // model
    if dp is not None and dp != rest:
        raise ValueError(
            f"dp_size={dp} x {layout} = {dp * model} is not world_size={world_size}; dp_size={rest} would be, or start "
            f"{dp * model} ranks"
        )
    if rest % ep:
        raise ValueError(
            f"ep_size={ep} does not divide dp_size={rest} (world_size={world_size} / ({layout})): experts are spread "
            f"over data-parallel ranks; values that do: {', '.join(map(str, divisors(rest)))}"
        )
    if zero_group_size is None or zero_group_size <= 0:
        return rest, rest
    if rest % zero_group_size:
        raise ValueError(
            f"zero_group_size={zero_group_size} does not divide dp_size={rest} (world_size={world_size} / ({layout})); "
            f"values that do: {', '.join(map(str, divisors(rest)))}, or None for all of dp"
        )
    if zero_group_size % ep:
        fits = [str(size) for size in divisors(rest) if size % ep == 0]
        raise ValueError(
            f"ep_size={ep} does not divide zero_group_size={zero_group_size}: experts are spread over the ranks of a "
            f"ZeRO sub-group; use zero_group_size={' or '.join(fits)}, or None for all of dp"
        )
    return rest, zero_group_size


def _sizes_that_fit(world_size: int, *, pp: int, tp: int, sp: int) -> list[tuple[str, int]]:
    """For each axis alone, the sizes next below and above the one asked for that make the product divide the world."""
    fits = []
    sizes = {"tp_size": tp, "pp_size": pp, "sp_size": sp}
    for name, size in sizes.items():
        others = math.prod(value for other, value in sizes.items() if other != name)
        options = [d for d in divisors(world_size) if world_size % (others * d) == 0]
        below, above = [d for d in options if d < size], [d for d in options if d > size]
        fits += [(name, d) for d in below[-1:] + above[:1]]
    return fits
