"""Rules for state-space mixers, wherever their parts show that they are such (see `state_layout`).

    mixer in_proj > conv1d > [x_proj > dt_proj] > scan > [norm] > out_proj

By parts and sizes, not by the names of classes: look-alikes are found too. Like everything that is recognised, it is a
proposal that the generic policy tries on a small copy of the model.
"""

from __future__ import annotations

import torch.nn as nn

from .dealt_rows import DealtRows
from .layer.linear import is_linear
from .rules import Rules
from .state_layout import StateLayout, StateSplit, without_adapters
from .state_styles import FEATURES, InnerRow, StateInput
from .styles import Row, ShardedParameter
from .wide_norm import WideNorm

_HEADS = StateSplit(("heads",))

# What the rows of the input projection are, and of which parts every rank has its heads.
_PROJECTED = {
    "mamba": ("features", "features"),
    "mamba2": ("features", "features", "states", "states", "heads"),
    "zamba": ("pairs",),
}
_CONVOLVED = {"mamba": ("features",), "mamba2": ("features", "states", "states"), "zamba": ("features",)}
_BY_HEAD = ("A_log", "D", "dt_bias", "x_proj_weight", "dt_proj_weight", "dt_proj_bias")


def state_space_rules(name: str, mixer: nn.Module) -> Rules:
    """None for what is no mixer."""
    layout = StateLayout.of(mixer)
    if layout is None:
        return {}
    rules: Rules = {
        f"{name}.in_proj": StateInput(StateSplit(_PROJECTED[layout.kind])),
        f"{name}.conv1d": DealtRows(StateSplit(_CONVOLVED[layout.kind])),
        f"{name}.out_proj": Row(FEATURES),
    }
    for local, param in mixer.named_parameters(recurse=False):
        if local in _BY_HEAD and param.shape[0] == layout.heads:
            rules[f"{name}.{local}"] = ShardedParameter(0, _HEADS)
    if layout.kind == "mamba":
        rules[f"{name}.x_proj"] = InnerRow(FEATURES)
        rules[f"{name}.dt_proj"] = DealtRows(FEATURES)
    for local, child in mixer.named_children():
        widths = [param.shape[0] for param in child.parameters() if param.ndim == 1]
        if f"{name}.{local}" in rules or not widths or is_linear(without_adapters(child) or child):
            continue
        # Those of dt, B and C see whole ones, for the rank's own channels.
        is_whole = layout.kind == "mamba"
        rules[f"{name}.{local}"] = "partial_gradient" if is_whole else WideNorm(FEATURES)
    return rules
