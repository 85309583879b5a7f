"""Which parameters an optimizer trains, checked: everything a user can get wrong is refused here, before any
collective.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from ..optim.kind import has_stepped
from ..precision.policy import PrecisionPolicy
from ..spec import ParamSpec, get_spec
from .layout import Entry, family_of

_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def collect_entries(
    optim: Optimizer,
    model: nn.Module,
    precision: PrecisionPolicy | None,
    whole: bool,
    placed: bool = True,
    part: bool = False,
    sections: Mapping[nn.Parameter, int] | None = None,
) -> list[Entry]:
    """The trainable parameters of `optim` in model order, with the dtype that each will work in.

    whole     the optimizer looks at whole matrices
    placed    the parameters are where they will stay
    part      the model is a pipeline rank's part of one, in which nothing may be left to train
    sections  which part of the model a parameter belongs to; default: all to part 0
    """
    if has_stepped(optim):
        raise ValueError(
            "the optimizer has stepped already, or loaded a state: boost a fresh optimizer and load its state "
            "afterwards, with booster.load. For a state from outside, boost it with its model in one process with "
            "Booster() and booster.save(path, model=model, optimizer=optimizer) there; booster.load reads that at any "
            "layout"
        )
    _refuse_sparse(model)
    groups = {
        param: number
        for number, group in enumerate(optim.param_groups)
        for param in group["params"]
        if param.requires_grad
    }
    if not groups and not part:
        raise ValueError(
            "the optimizer has no trainable parameters: every parameter in its groups has requires_grad=False"
        )
    entries: list[Entry] = []
    dtypes = precision.dtypes(model) if precision is not None else {}
    for name, param in model.named_parameters():
        if param not in groups:
            continue
        spec = get_spec(param) or ParamSpec(name, tuple(param.shape))
        dtype = dtypes.get(name, param.dtype)
        _check(name, param, spec, dtype, optim, whole)
        section = sections[param] if sections is not None else 0
        entries.append(Entry(len(entries), spec.name, param, spec, groups[param], family_of(spec, dtype, section)))
    seen = {entry.param for entry in entries}
    strangers = [param for param in groups if param not in seen]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:3])
        raise ValueError(
            f"{len(strangers)} parameters of the optimizer are not in the model (shapes {shapes}): build it on "
            "model.parameters()"
        )
    devices = sorted({str(entry.param.device) for entry in entries})
    if placed and len(devices) > 1:
        raise ValueError(
            f"parameters lie on several devices ({', '.join(devices)}): move the model to one device before boost"
        )
    return entries


def _check(name: str, param: nn.Parameter, spec: ParamSpec, dtype: torch.dtype, optim: Optimizer, whole: bool) -> None:
    if param.layout != torch.strided:
        raise ValueError(
            f"parameter {name} has layout {param.layout}: flat buffers hold dense parameters only; use a dense one"
        )
    if dtype not in _SUPPORTED:
        listed = ", ".join(str(supported) for supported in _SUPPORTED)
        raise ValueError(
            f"parameter {name} has dtype {dtype}, which cannot be trained; supported are {listed}; freeze or convert it"
        )
    if whole and spec.is_sharded:
        raise ValueError(
            f"optimizer={type(optim).__name__} works on whole matrices, but {name} is split over {spec.axis!r}; "
            f"use {spec.axis}_size=1, or an element-wise optimizer such as AdamW"
        )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"module {name} makes sparse gradients, which flat buffers cannot hold: build it with sparse=False"
            )
