"""Cutting a model's parameters into the buckets of stage 3, unit by unit, so that no more than one of them is ever
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..cluster.mesh import ParallelMesh
from ..precision.policy import PrecisionPolicy
from ..spec import ParamSpec, get_spec
from ..utils.device import get_current_device, move_buffers
from .data_writes import DataWrites
from .entries import Job
from .groups import Groups, zero_groups
from .layout import FROZEN, BucketPlan, Entry, Family, plan_unit_buckets
from .param_guard import ParamGuard, own_gradient, set_own_gradient
from .settings import ZeroSettings
from .sharded_bucket import ShardedBucket
from .unit_gatherer import UnitGatherer
from .units import find_param_units


def shard_units(
    model: nn.Module,
    entries: Sequence[Entry],
    groups: Groups,
    device: torch.device,
    data: DataWrites,
    settings: ZeroSettings,
    job: Job,
    *,
    precision: PrecisionPolicy | None = None,
    sections: Mapping[nn.Parameter, int] | None = None,
    hooks: bool = True,
    make: Callable[[Sequence[nn.Parameter]], Any] | None = None,
) -> UnitGatherer:
    """Shard all parameters of `model`: those of `entries`, which are trained, and the others, which are only gathered.

    Buckets are numbered with the trained ones first, in launch order. The arguments are those of `ZeroOptimizer`.
    """
    units = find_param_units(model, sections)
    trained = {entry.param: entry for entry in entries}
    frozen = _frozen_entries(model, trained, job.dtypes, sections)
    plans = plan_unit_buckets(
        [[trained[p] for p in unit.params if p in trained] for unit in units], groups.shards, not job.elementwise
    )
    frozen_plans = plan_unit_buckets(
        [[frozen[p] for p in unit.params if p in frozen] for unit in units], groups.shards, False
    )

    def filled(index: int, plan: BucketPlan) -> ShardedBucket:
        if make is not None:
            make([slot.entry.param for slot in plan.slots])
        has_masters = settings.master_weights and index < len(plans)
        own = groups.of(plan.family)
        bucket = ShardedBucket(
            plan, index, own.shard_rank, device=device, master_weights=has_masters, offload=settings.cpu_offload
        )
        bucket.adopt(own.everyone)
        return bucket

    buckets = [filled(index, plan) for index, plan in enumerate([*plans, *frozen_plans])]
    move_buffers(model, device)
    if precision is not None:
        precision.cast_buffers(model)
    return UnitGatherer(model, units, buckets, groups, data, ahead=settings.gather_ahead, hooks=hooks)


def shard_untrained(
    model: nn.Module,
    mesh: ParallelMesh,
    precision: PrecisionPolicy,
    settings: ZeroSettings,
    job: Job,
    *,
    sections: Mapping[nn.Parameter, int] | None = None,
    hooks: bool = True,
    make: Callable[[Sequence[nn.Parameter]], Any] | None = None,
) -> UnitGatherer:
    """Shard a model that no optimizer trains."""
    data = DataWrites()
    groups = zero_groups(mesh, 3, quantised=settings.quantises)
    units = shard_units(
        model,
        [],
        groups,
        get_current_device(),
        data,
        settings,
        job,
        precision=precision,
        sections=sections,
        hooks=hooks,
        make=make,
    )
    guard = ParamGuard(units.params, set(units.params), _NO_GRADIENTS, units, data)
    guard.show(asks=False, watches=True)
    units.begin(guard)
    return units


class _NoGradients:
    """Of parameters that nobody trains, nobody is asked about."""

    def read_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        return own_gradient(param)

    def write_gradient(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        set_own_gradient(param, value)


_NO_GRADIENTS = _NoGradients()


def _frozen_entries(
    model: nn.Module,
    trained: Mapping[nn.Parameter, Entry],
    dtypes: Mapping[str, torch.dtype],
    sections: Mapping[nn.Parameter, int] | None,
) -> dict[nn.Parameter, Entry]:
    found: dict[nn.Parameter, Entry] = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        if param not in trained:
            spec = get_spec(param) or ParamSpec(name, tuple(param.shape))
            section = sections[param] if sections is not None else 0
            family = Family(section, dtypes.get(name, param.dtype), experts=spec.is_of_experts)
            found[param] = Entry(index, spec.name, param, spec, FROZEN, family)
    return found
