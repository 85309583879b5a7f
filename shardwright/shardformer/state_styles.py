"""Styles for the parts of a state-space mixer, of which every rank computes its own heads or channels.

The forward is the model's own. It reads sizes from attributes, so those become the rank's; parameters that it reads
without calling their modules (the convolution's, `dt_proj`'s) are sharded in place.

What the ranks say to each other, besides the sum behind the output projection:

    dt, B, C of all channels (`x_proj`)     a sum in forward, as they are projected from all channels, and one of their
                                            gradients in backward, as every rank reads them for its own channels
    a norm over channels of several ranks   the sum of their squares, one number per token, and its gradient

[Note: fused kernels] Where `mamba-ssm` is installed, forwards hand the kernels for training the weights of the norm and
of the projections and return what these make of them: a part of the sum on each rank, normed by this rank's channels.
Those kernels are asked for in training alone (`self.training`), so the mixer itself runs as in evaluation; dropouts are
modules of their own. The kernels of the convolution and of the scan take this rank's tensors as they take whole ones:
they work by channel, or by head with the groups that B's shape tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops import compiled
from ..ops.collective import copy_to_group, reduce_from_group
from ..spec import ParamSpec
from .layer.linear import join_name
from .layer.parallel_module import ParallelGroup, ParallelModule, native_class, shard_parameters
from .splits import EVEN, Split
from .state_layout import StateLayout, StateSplit
from .styles import Column, Role, Row, Site, Style

# Attributes that forwards of mixers read -> what they count.
_SIZES = {
    **dict.fromkeys(("num_heads", "n_heads", "nheads", "n_mamba_heads"), "heads"),
    **dict.fromkeys(("n_groups", "ngroups", "num_groups"), "groups"),
    **dict.fromkeys(("intermediate_size", "d_inner", "d_ssm"), "features"),
    "groups_time_state_size": "state",
}
_CONVOLVED = ("conv_dim",)
FEATURES = StateSplit(("features",))
# Functions that run from the input projection to the output projection.
_FUSED_STEPS = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined", "mamba_split_conv1d_scan_combined")


@dataclass(frozen=True)
class StateInput(Column):
    """The fused input projection of a mixer, every segment dealt by heads; the mixer around it becomes this rank's."""

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        specs = super().specs(site)
        if (reason := why_not_local(site.parent)) is not None:
            raise ValueError(reason)
        return specs

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        mixer, parallel = site.parent, site.parallel
        if not isinstance(mixer, _LocalMixer):
            layout = StateLayout.of(mixer)
            assert layout is not None, mixer
            _become_local(mixer, layout, parallel)
            for name, buffer in list(mixer.named_buffers(recurse=False)):  # a factor for every feature projected
                spec = specs.get("bias") or specs["weight"]
                if buffer.ndim and buffer.shape[-1] == spec.full_shape[0]:
                    last = ParamSpec(name, tuple(buffer.shape), buffer.ndim - 1, spec.pieces)
                    setattr(mixer, name, last.shard(buffer, parallel.rank))
        super().convert(site, specs)


def why_not_local(mixer: nn.Module) -> str | None:
    """What keeps a mixer from computing this rank's heads by its own forward, None for nothing."""
    steps = [name for name, code in _methods(mixer) if name != "forward" and set(_FUSED_STEPS) & set(code.co_names)]
    if steps:
        return (
            f"{native_class(mixer).__name__}.{steps[0]} computes a whole mixer in one kernel, which cannot sum over "
            "ranks in between; leave the rule out"
        )
    return None


def _methods(mixer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, function in inspect.getmembers(native_class(mixer), inspect.isfunction):
        unwrapped = inspect.unwrap(function)
        if unwrapped.__module__ == native_class(mixer).__module__:
            yield name, unwrapped.__code__


def _become_local(mixer: nn.Module, layout: StateLayout, parallel: ParallelGroup) -> None:
    local = layout.local(parallel.rank, parallel.size)
    fused = any(name == "forward" and set(_FUSED_STEPS) & set(code.co_names) for name, code in _methods(mixer))
    for name, value in list(vars(mixer).items()):
        if name in _SIZES and isinstance(value, int):
            setattr(mixer, name, getattr(local, _SIZES[name]))
        elif name in _CONVOLVED:
            setattr(mixer, name, local.sizes().convolved)
    adopted = _LocalMixer.adopt(mixer, parallel)
    adopted.state_layout, adopted.has_fused_steps = layout, fused


class _LocalMixer(ParallelModule):
    """
    state_layout        of the whole mixer
    has_fused_steps     whether its forward calls kernels that compute all of it (see the note above)
    """

    state_layout: StateLayout
    has_fused_steps: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_fused_steps or not self.training:
            return super().forward(*args, **kwargs)
        self.training = False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = True


@dataclass(frozen=True)
class InnerRow(Row):
    """A row linear in the middle of a region: its sum over the ranks is read by each for its own features."""

    @property
    def role(self) -> Role | None:
        return "inside"

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _InnerRow.adopt(site.module, site.parallel)._name = compiled.name_of(site.parallel.group)


class _InnerRow(ParallelModule):
    _name: str

    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, super().forward(x))
        if torch.compiler.is_compiling():
            return compiled.copy_in(y, self._name)
        return copy_to_group(y, self.parallel.group)


@dataclass(frozen=True)
class DealtRows(Style):
    """A module whose parameters are all dealt along their first dim, as it is computed for each row by itself: a
    depthwise convolution, a linear of whose weight the forward makes its own use.
    """

    split: Split = EVEN

    @property
    def role(self) -> Role | None:
        return "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is not None:
            raise ValueError(f"{type(self).__name__} applies to a module, but the rule names a parameter")
        return {
            name: ParamSpec(join_name(site.name, name), tuple(param.shape), 0, site.pieces(self.split, param.shape[0]))
            for name, param in site.module.named_parameters()
        }

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module: Any = site.module
        shard_parameters(module, specs, site.parallel.rank)
        rows = module.weight.shape[0]
        if isinstance(module, nn.Conv1d):
            module.in_channels = module.out_channels = module.groups = rows
        elif isinstance(module, nn.Linear):
            module.out_features = rows


@dataclass(frozen=True)
class DealtNorm(DealtRows):
    """An RMS norm over the features of a mixer, or of groups of them, with one weight per feature.

    Ranks that have whole groups compute theirs alone; ranks that share one sum their squares.
    """

    split: Split = FEATURES

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        specs = super().specs(site)
        for spec in specs.values():
            _groups_of(site.module, spec, site.parallel.size)
        return specs

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        spec = specs["weight"]
        count, own, is_shared = _groups_of(site.module, spec, site.parallel.size)[site.parallel.rank]
        super().convert(site, specs)
        module: Any = site.module
        features = module.weight.shape[0]
        if isinstance(getattr(module, "n_groups", None), int):
            module.n_groups = len(own)
        if isinstance(getattr(module, "group_size", None), int):
            module.group_size = features // len(own)
        if is_shared:
            norm = _NormOverRanks.adopt(module, site.parallel)
            norm.group_count, norm.own_group, norm.share = count, own[0], features * count / spec.full_shape[0]
            norm._name = compiled.name_of(site.parallel.group)


def _groups_of(norm: nn.Module, spec: ParamSpec, ranks: int) -> list[tuple[int, range, bool]]:
    """For every rank: how many groups the norm has, which of them the rank has features of, whether it shares these;
    ValueError where a rank has a part of one group beside others.
    """
    features = spec.full_shape[0]
    size, count = getattr(norm, "group_size", None), getattr(norm, "n_groups", None)
    size = size if isinstance(size, int) else features // (count if isinstance(count, int) else 1)
    found = []
    for rank in range(ranks):
        (run,) = spec.pieces[rank]
        end = run.start + run.length
        groups = range(run.start // size, -(-end // size))
        is_shared = bool(run.start % size or end % size)
        if is_shared and len(groups) > 1:
            raise ValueError(
                f"rank {rank} of {ranks} would have {run.length} of {features} features, a part of several groups of "
                f"{size} that {native_class(norm).__name__} norms; use a number of ranks that does not cut groups apart"
            )
        found.append((features // size, groups, is_shared))
    return [(each, groups, any(shared for _, _, shared in found)) for each, groups, _ in found]


class _NormOverRanks(ParallelModule):
    """The mean squares that its own forward computes are those over the features of all ranks in the group.

    group_count     groups of the whole norm
    own_group       the one that this rank has features of
    share           how much of it
    """

    group_count: int
    own_group: int
    share: float
    _name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Means(self):
            return super().forward(*args, **kwargs)

    def mean_over_ranks(self, mean: Tensor) -> Tensor:
        """From the mean over this rank's features, [...]. Every group has a place in what is summed: [..., groups]."""
        part = (mean * self.share)[..., None]
        after = self.group_count - self.own_group - 1
        if self.group_count > 1:
            part = torch.nn.functional.pad(part, (self.own_group, after))
        if torch.compiler.is_compiling():
            total = compiled.sum_for_shards(part, self._name)
        else:
            total = copy_to_group(reduce_from_group(part, self.parallel.group), self.parallel.group)
        return total[..., self.own_group if self.group_count > 1 else 0]


class _Means(TorchFunctionMode):
    """While it is active, means of what has this rank's features are taken over those of all ranks."""

    def __init__(self, norm: _NormOverRanks) -> None:
        super().__init__()
        self._norm = norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_mean = getattr(func, "__name__", "") == "mean"  # the function's or the tensor's
        return self._norm.mean_over_ranks(found) if is_mean else found
