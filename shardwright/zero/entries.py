"""Which parameters an optimizer trains, checked: everything a user can get wrong is refused here, before any
collective.

    job = check_job(optim, model, precision)     once, of the whole model
    entries = collect_entries(optim, model, job)   of what this rank has of it, laid out as it will stay
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from ..optim.kind import check_supported, has_stepped, is_elementwise
from ..precision.policy import PrecisionPolicy
from ..spec import ParamSpec, get_spec
from ..utils.errors import counted
from .layout import Entry, family_of

_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Job:
    """What a model and its optimizer come to. Names alone: parameters that are cut or released meanwhile must go.

    groups       number of the param group of every trained parameter by name, in the order of the model
    elementwise  whether the optimizer steps every element by itself; else it looks at whole matrices
    dtypes       what every parameter works in, by each of its names; empty: in what it has
    given        dtypes that they had
    """

    groups: Mapping[str, int]
    elementwise: bool
    dtypes: Mapping[str, torch.dtype]
    given: Mapping[str, torch.dtype]

    def of_changed(self, model: nn.Module, precision: PrecisionPolicy) -> Job:
        """The same for `model` after sharding, where a policy may have put other modules into it."""
        now = _dtypes_of(model)
        if all(self.given.get(name) == dtype for name, dtype in now.items()):
            return self
        return replace(self, dtypes=precision.dtypes(model), given=now)


def check_job(
    optim: Optimizer | None,
    model: nn.Module,
    precision: PrecisionPolicy | None,
    *,
    placed: bool = True,
    part: bool = False,
) -> Job:
    """
    placed    the parameters are where they will stay
    part      the model is a pipeline rank's part of one, in which nothing may be left to train
    """
    dtypes, given = precision.dtypes(model) if precision is not None else {}, _dtypes_of(model)
    if optim is None:
        return Job({}, True, dtypes, given)
    check_supported(optim)
    if has_stepped(optim):
        raise ValueError(
            "the optimizer has stepped already, or loaded a state: boost a fresh optimizer and load its state "
            "afterwards, with booster.load. For a state from outside, boost it with its model in one process with "
            "Booster() and booster.save(path, model=model, optimizer=optimizer) there; booster.load reads that at any "
            "layout"
        )
    _refuse_sparse(model)
    groups = _groups_of(optim)
    if not groups and not part:
        raise ValueError(
            "the optimizer has no trainable parameters: every parameter in its groups has requires_grad=False"
        )
    trained = {param: name for name, param in model.named_parameters() if param in groups}
    for param, name in trained.items():
        _check(name, param, dtypes.get(name, param.dtype))
    strangers = [param for param in groups if param not in trained]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:3])
        raise ValueError(
            f"{counted(len(strangers), 'parameter')} of the optimizer {'is' if len(strangers) == 1 else 'are'} not in "
            "the "
            f"model (shapes {shapes}): build it on model.parameters()"
        )
    devices = sorted({str(param.device) for param in trained})
    if placed and len(devices) > 1:
        raise ValueError(
            f"parameters lie on several devices ({', '.join(devices)}): move the model to one device before boost"
        )
    return Job({name: groups[param] for param, name in trained.items()}, is_elementwise(optim), dtypes, given)


def collect_entries(
    optim: Optimizer, model: nn.Module, job: Job, sections: Mapping[nn.Parameter, int] | None = None
) -> list[Entry]:
    """The trainable parameters of `optim` in model order, with the dtype that each will work in.

    sections  which part of the model a parameter belongs to; default: all to part 0
    """
    groups = _groups_of(optim)
    entries: list[Entry] = []
    for name, param in model.named_parameters():
        if param not in groups:
            continue
        spec = get_spec(param) or ParamSpec(name, tuple(param.shape))
        dtype = job.dtypes.get(name, param.dtype)
        _check(name, param, dtype)
        if not job.elementwise:
            refuse_split(name, spec, optim)
        section = sections[param] if sections is not None else 0
        entries.append(Entry(len(entries), spec.name, param, spec, groups[param], family_of(spec, dtype, section)))
    return entries


def refuse_split(name: str, spec: ParamSpec, optim: Optimizer) -> None:
    """For optimizers that look at whole matrices."""
    if spec.is_sharded:
        raise ValueError(
            f"optimizer={type(optim).__name__} works on whole matrices, but {name} is split over {spec.axis!r}; "
            f"use {' and '.join(f'{axis}_size=1' for axis in spec.axis.split('_'))}, or an element-wise optimizer "
            f"such as AdamW; if it does step element by element, say so with {type(optim).__name__}.elementwise = True"
        )


def _groups_of(optim: Optimizer) -> dict[nn.Parameter, int]:
    return {
        param: number
        for number, group in enumerate(optim.param_groups)
        for param in group["params"]
        if param.requires_grad
    }


def _dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters(remove_duplicate=False)}


def _check(name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
    if param.layout != torch.strided:
        raise ValueError(
            f"parameter {name} has layout {param.layout}: flat buffers hold dense parameters only; use a dense one"
        )
    if dtype not in _SUPPORTED:
        listed = ", ".join(str(supported) for supported in _SUPPORTED)
        raise ValueError(
            f"parameter {name} has dtype {dtype}, which cannot be trained; supported are {listed}; freeze or convert it"
        )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"module {name} makes sparse gradients, which flat buffers cannot hold: build it with sparse=False"
            )
