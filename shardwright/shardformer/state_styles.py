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
from typing import Any

import torch.nn as nn

from ..spec import ParamSpec
from .layer.parallel_module import ParallelGroup, ParallelModule, native_class
from .mixer_styles import share_output
from .state_layout import StateLayout, StateSplit
from .styles import Column, Role, Row, Site

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
        share_output(site)
