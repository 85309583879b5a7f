"""Turning a module into its tensor-parallel self without replacing it.

The module keeps its identity, its name, its parameters (each now holding this rank's shard) and its class, of which its
new class is a subclass: `isinstance(module, nn.Linear)` and forwards that look for linears among their children keep
working, optimizers built on the parameters stay valid, ties stay ties.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn as nn

from ...spec import ParamSpec, get_spec, set_spec


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share a layer. Copies of a model share it with the original, process groups cannot be copied."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def is_played(self) -> bool:
        """Whether there are no other ranks behind the group (torch's fake backend), so that nothing can be tried on
        it.
        """
        return dist.get_backend(self.group) == "fake"

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroup:
        return self


# Arguments that layers of other frameworks take. Those that only choose between ways to the same numbers may have any
# value, the others the one that asks for nothing.
_ANY = object()
_FOREIGN: dict[str, tuple[Any, str]] = {
    "seq_parallel_mode": (None, "sequences are cut by HybridParallelPlugin"),
    "seq_parallel_dim": (_ANY, ""),
    "sp_partial_derived": (False, "sequences are cut by HybridParallelPlugin"),
    "skip_bias_add": (False, "the bias is added by the layer"),
    "fp8_communication": (False, "collectives run in the dtype of the activations"),
    "use_zbv": (_ANY, ""),
    "overlap": (_ANY, ""),
    "async_communication": (_ANY, ""),
    "stream_chunk_num": (_ANY, ""),
    "weight": (None, "the layer takes the module's weight"),
    "bias_": (None, "the layer takes the module's bias"),
}


def own_arguments(layer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` for `layer.from_native_module` without what asks for nothing here; ValueError for what it cannot
    take.
    """
    taken = dict(kwargs)
    if not isinstance(layer, type) or not issubclass(layer, ParallelModule):
        return taken  # of the user's own
    known = inspect.signature(layer._from_native).parameters
    for name in [name for name in taken if name not in known]:
        neutral, why = _FOREIGN.get(name, (None, ""))
        if name not in _FOREIGN:
            names = ", ".join(list(known)[2:]) or "no arguments of its own"
            raise ValueError(f"{layer.__name__}.from_native_module takes no {name}={taken[name]!r}; it takes {names}")
        value = taken.pop(name)
        if neutral is not _ANY and value is not neutral:
            raise ValueError(f"{layer.__name__}: {name}={value!r} cannot be had: {why}; leave it out, or use {neutral}")
    return taken


def group_or_all(
    group: dist.ProcessGroup | list[dist.ProcessGroup] | tuple[dist.ProcessGroup, ...] | None,
) -> dist.ProcessGroup:
    """`group`, the only one of a list, or all ranks when it is None."""
    if isinstance(group, list | tuple):
        if len(group) != 1:
            raise ValueError(
                f"process_group={group!r}: a layer is sharded over one group; give it, or a list of it alone"
            )
        group = group[0]
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(
            "process_group=None means all ranks, but there are none yet; call shardwright.launch_from_torch() first"
        )
    return group


class ParallelModule(nn.Module):
    """Base of all tensor-parallel modules. Sub-classes implement `_from_native`.

    parallel    the group that the module is sharded over
    in_sum      a module around it sums what the ranks compute, and the gradients of what it is given: what goes in and
                out here needs no collective (see `shardformer.sum_at_exit`)
    """

    parallel: ParallelGroup
    in_sum = False

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None, **kwargs: Any
    ) -> nn.Module:
        """Shard `module` over `process_group` (the default group when None) in place and return it."""
        kwargs = own_arguments(cls, kwargs)
        parallel = ParallelGroup(group_or_all(process_group))
        return cls._from_native(module, parallel, **kwargs)

    @classmethod
    def _from_native(cls, *args: Any, **kwargs: Any) -> nn.Module:
        raise TypeError(f"{cls.__name__} is a base class; use one of the layers that derive from it")

    @classmethod
    def adopt(cls, module: nn.Module, parallel: ParallelGroup) -> Self:
        """Make `module` an instance of this class and of its own."""
        module.__class__ = combined_class(cls, type(module))
        assert isinstance(module, cls)
        module.parallel = parallel
        return module


def combined_class(mixin: type, native: type) -> type:
    """A subclass of `native` with the methods of `mixin` in front, under the name that the native class goes by.

    transformers recognises some classes by their name, so it must survive.
    """
    if issubclass(native, mixin):
        return native
    known = _combined.get((mixin, native))
    if known is None:
        known = _combined[mixin, native] = _combine(mixin, native)
    return known


_combined: dict[tuple[type, type], type] = {}


def _combine(mixin: type, native: type) -> type:
    names = {"__module__": native.__module__, "__qualname__": native.__qualname__}
    return type(native.__name__, (mixin, native), {**names, "native_class": getattr(native, "native_class", native)})


def native_class(module: nn.Module) -> Any:
    """The class that the module had before it was sharded."""
    return getattr(type(module), "native_class", type(module))


def shard_parameters(module: nn.Module, specs: Mapping[str, ParamSpec], coordinate: int) -> None:
    """Let the parameters of `module` hold this rank's shards. `specs` goes by local names.

    A parameter that is already sharded (it is tied to one that was met before) must have the same layout.
    """
    for name, spec in specs.items():
        shard_parameter(module.get_parameter(name), spec, coordinate)


def shard_parameter(param: nn.Parameter, spec: ParamSpec, coordinate: int) -> None:
    known = get_spec(param)
    if known is not None and (known.dim, known.pieces, known.axis) == (spec.dim, spec.pieces, spec.axis):
        return
    assert known is None or not known.is_sharded, f"{spec.name} is sharded twice, as {known} and as {spec}"
    set_spec(param, spec)
    if spec.is_sharded:
        param.data = spec.shard(param.data, coordinate)
        param.grad = None


def full_tensor(param: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The unsharded value of a parameter, on every rank of the group (a collective)."""
    spec = get_spec(param)
    if spec is None or not spec.is_sharded:
        return param.detach().clone()
    return unshard(param.detach(), spec, group)


def unshard(local: torch.Tensor, spec: ParamSpec, group: dist.ProcessGroup) -> torch.Tensor:
    """The full tensor of which every rank of the group gives its shard (a collective)."""
    shards = [local.new_empty(spec.local_shape(coordinate)) for coordinate in range(group.size())]
    width = max(shard.numel() for shard in shards)
    padded = local.new_zeros(width)
    padded[: local.numel()] = local.reshape(-1)
    received = [torch.empty_like(padded) for _ in shards]
    dist.all_gather(received, padded, group=group)
    return spec.unshard([flat[: shard.numel()].view(shard.shape) for flat, shard in zip(received, shards, strict=True)])
