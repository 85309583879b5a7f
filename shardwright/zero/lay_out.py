"""A model, and the optimizer that trains it if there is one, laid out over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..cluster.mesh import ParallelMesh
from ..precision.policy import PrecisionPolicy
from ..precision.scaler import ScalerConfig
from .entries import Job, check_job
from .groups import zero_groups
from .optimizer import ZeroOptimizer
from .settings import ZeroSettings
from .sharding import shard_untrained
from .unit_gatherer import UnitGatherer
from .untrained import settle_rest


def lay_out(
    model: nn.Module,
    optimizer: Optimizer | None,
    mesh: ParallelMesh,
    settings: ZeroSettings,
    precision: PrecisionPolicy,
    scaler: ScalerConfig,
    *,
    job: Job | None = None,
    sections: Mapping[nn.Parameter, int] | None = None,
    tied_groups: Mapping[str, dist.ProcessGroup] | None = None,
    launch_in_backward: bool = True,
    make: Callable[[Sequence[nn.Parameter]], Any] | None = None,
) -> tuple[ZeroOptimizer | None, UnitGatherer | None]:
    """The wrapper around `optimizer`, and who gathers parameters where they are sharded. Below stage 3 the model lies
    on its device already. The keyword arguments are those of `ZeroOptimizer`.
    """
    if optimizer is not None:
        wrapped = ZeroOptimizer(
            optimizer,
            model,
            mesh,
            settings,
            precision=precision,
            scaler=scaler,
            job=job,
            sections=sections,
            tied_groups=tied_groups,
            launch_in_backward=launch_in_backward,
            make=make,
        )
        return wrapped, wrapped.units
    if job is None:
        job = check_job(None, model, precision)
    if settings.stage == 3:
        return None, shard_untrained(
            model, mesh, precision, settings, job, sections=sections, hooks=launch_in_backward, make=make
        )
    settle_rest(model, precision, job.dtypes, set(), zero_groups(mesh, settings.stage))
    return None, None
