"""RMS norms over features of which every rank has some.

The forward is the norm's own: where epsilon counts, what is added to the weight, gates, roundings. What takes part in
it is the mean of squares alone, which is taken over the features of all ranks. One number per token and group travels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...ops import compiled
from ...ops.collective import copy_to_group, reduce_from_group
from .parallel_module import ParallelModule, native_class


class NormOverRanks(ParallelModule):
    """
    features        of this rank, all of one group
    group_count     groups of the whole norm, each normed for itself
    own_group       the one that the features are of
    share           how much of it they are; zeros of padded heads count among them
    group_name      under which graphs find the ranks
    """

    features: int
    group_count: int
    own_group: int
    share: float
    group_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        means = _Means(self)
        with means:
            output = super().forward(*args, **kwargs)
        if not means.count:
            raise ValueError(
                f"{native_class(self).__name__} takes no mean over its features, so ranks cannot take one together; "
                "leave its rule out of the plan"
            )
        return output

    def mean_over_ranks(self, mean: Tensor) -> Tensor:
        """From the mean over this rank's features, [...]. Every group has a place in what is summed: [..., groups]."""
        part = (mean * self.share)[..., None]
        after = self.group_count - self.own_group - 1
        if self.group_count > 1:
            part = torch.nn.functional.pad(part, (self.own_group, after))
        if torch.compiler.is_compiling():
            total = compiled.sum_for_shards(part, self.group_name)
        else:  # every rank goes on with the mean for features of its own
            total = copy_to_group(reduce_from_group(part, self.parallel.group), self.parallel.group)
        return total[..., self.own_group if self.group_count > 1 else 0]


class _Means(TorchFunctionMode):
    """While it is active, means over this rank's features are those over the features of all ranks."""

    def __init__(self, norm: NormOverRanks) -> None:
        super().__init__()
        self._norm = norm
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")  # the function's or the tensor's
        if name == "rms_norm":
            return self._rms_norm(*args, **kwargs)
        if name != "mean":
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim not in (-1, x.ndim - 1, [-1], (-1,)) or x.shape[-1] != self._norm.features:
            raise ValueError(
                f"{native_class(self._norm).__name__} takes a mean of {list(x.shape)} over dim {dim}, not over its "
                f"{self._norm.features} features; leave its rule out of the plan"
            )
        self.count += 1
        return self._norm.mean_over_ranks(func(*args, **kwargs))

    def _rms_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        """torch's own, which is one kernel elsewhere: x / sqrt(mean(x^2) + eps) * weight."""
        self.count += 1
        wide = x if x.dtype == torch.float64 else x.float()
        mean = self._norm.mean_over_ranks(wide.square().mean(-1, keepdim=True))
        normal = wide * torch.rsqrt(mean + (torch.finfo(x.dtype).eps if eps is None else eps))
        return (normal if weight is None else normal * weight).to(x.dtype)
