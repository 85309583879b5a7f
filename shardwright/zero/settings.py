"""How gradients are reduced and the optimizer is sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..utils.argument_types import is_whole
from ..utils.device import chosen_as_for
from .collectives import SUMMED, can_be_summed
from .layout import BUCKET_SIZE_IN_M, bucket_numel

_MOST = 1e9  # in millions, more than any model has
_STAGES = "0 (all-reduce), 1 (optimizer states), 2 (and gradients) or 3 (and parameters)"


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The options of ZeRO, each checked here and nowhere else.

    stage                 see `zero.optimizer`
    max_norm              clip the global norm at each step, 0 for no clipping
    bucket_size_in_m      elements per bucket in millions, about 200 MB on CUDA unless said; at stage 3 buckets follow
                          the layers
    communication_dtype   dtype of gradients on the wire, None for that in which they accumulate
    overlap_communication reduce while backward runs
    overlap_allgather     stages 1 and 2: gather updated parameters while the next forward runs
    cpu_offload           stages 1 to 3: keep masters and optimizer states in host memory and step there
    master_weights        keep fp32 masters of half-precision parameters; without, the optimizer steps in half precision
    gather_ahead          stage 3: how many units (in a pipeline: chunks) are gathered before they are needed; None: as
                          many as take the memory of the largest, two chunks
    quantises             gradients and updated weights travel in 8 bits, as `zero.quantised` says
    compiles              on a CPU inductor makes the kernel of Adam's steps (`zero.one_pass`)
    names                 what a plugin calls these options, where it has another name: errors speak of that one
    """

    stage: int = 1
    max_norm: float = 0.0
    bucket_size_in_m: float = BUCKET_SIZE_IN_M
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    gather_ahead: int | None = None
    quantises: bool = False
    compiles: bool = False
    names: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        stage = f"{self.names.get('stage', 'stage')}={self.stage}"
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"{stage} must be {_STAGES}")
        if self.max_norm < 0:
            raise ValueError(f"max_norm={self.max_norm} must be 0 (no clipping) or positive")
        check_bucket_size(self.names.get("bucket_size_in_m", "bucket_size_in_m"), self.bucket_size_in_m, usual=12)
        dtype = self.communication_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and can_be_summed(dtype)):
            raise ValueError(f"communication_dtype={dtype} {SUMMED}")
        if dtype is not None and self.quantises:
            raise ValueError(
                f"communication_dtype={dtype} with fp8_communication=True: both say in which format gradients travel; "
                "leave one of them out"
            )
        ahead = self.gather_ahead
        if ahead is not None and not (is_whole(ahead) and ahead >= 0):
            raise ValueError(
                f"gather_ahead={ahead!r} must be a whole number of layers of at least 0, or None to let memory decide"
            )
        name = stage.partition("=")[0]
        if self.cpu_offload and self.stage == 0:
            raise ValueError(
                f"cpu_offload=True with {stage}: masters and optimizer states move to the host when they are sharded; "
                f"use {name}=1"
            )
        if self.overlap_allgather and self.stage not in (1, 2):
            ahead_anyway = ", stage 3 gathers them ahead of their layers anyway" if self.stage == 3 else ""
            raise ValueError(
                f"overlap_allgather=True with {stage}: only stages 1 and 2 gather updated parameters after a step"
                f"{ahead_anyway}; use {name}=1 or 2, or overlap_allgather=False"
            )

    def bucket_numel(self, device: str) -> int:
        """Elements per bucket on a device of that type, or on those that are planned for."""
        return bucket_numel(self.bucket_size_in_m, chosen_as_for(device), self.communication_dtype or torch.float32)


def check_bucket_size(name: str, size: float, usual: int, element: float = 1e-6) -> None:
    """`element` is the size of a bucket that holds one. Gradients travel in pieces of a bucket's size, so of smaller
    ones a step would never end.
    """
    if not element <= size <= _MOST:
        raise ValueError(
            f"{name}={size} must be positive, at least {element:.2g}, which is one element, and at most {_MOST:.0e} "
            f"({usual} is usual)"
        )
