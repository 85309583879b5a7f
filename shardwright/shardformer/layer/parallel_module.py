"""Turning a module into its tensor-parallel self without replacing it.

The module keeps its identity, its name, its parameters (each now holding this rank's shard) and its class, of which its
new class is a subclass: `isinstance(module, nn.Linear)` and forwards that look for linears among their children keep
working, optimizers built on the parameters stay valid, ties stay ties.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn as nn

from ...spec import ParamSpec, get_spec, set_spec
from ...utils.argument_types import checks_of
from ...utils.arguments import check_call


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
    "fp8_communication": (False, "ShardConfig(fp8_communication=True) and the plugins say it for all layers"),
    "use_zbv": (_ANY, ""),
    "overlap": (_ANY, ""),
    "async_communication": (_ANY, ""),
    "stream_chunk_num": (_ANY, ""),
    "weight": (None, "from_native_module shards the weight of a layer that exists"),
    "bias_": (None, "from_native_module shards the bias of a layer that exists"),
    "weight_initializer": (None, "from_native_module shards a layer with the weight that it was given"),
    "bias_initializer": (None, "from_native_module shards a layer with the bias that it was given"),
}
Groups = dist.ProcessGroup | list[dist.ProcessGroup] | tuple[dist.ProcessGroup, ...]


def own_arguments(layer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` for `layer.from_native_module` without what asks for nothing here; ValueError for what it cannot
    take.
    """
    makes = getattr(getattr(layer, "from_native_module", None), "__func__", None)
    if makes is not ParallelModule.from_native_module.__func__:  # type: ignore[attr-defined]
        return dict(kwargs)  # of the user's own
    known = list(inspect.signature(layer._from_native).parameters)[2:]
    taken = _without_foreign(layer.__name__, kwargs, known)
    for name in taken:
        if name not in known:
            names = ", ".join(known) or "no arguments of its own"
            raise ValueError(f"{layer.__name__}.from_native_module takes no {name}={taken[name]!r}; it takes {names}")
    return taken


def constructor(init: Callable[..., None]) -> Callable[..., None]:
    """A layer's `__init__` that also takes what asks for nothing here, and names the argument that is wrong."""
    signature = inspect.signature(init)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    known, checks = list(signature.parameters), checks_of(signature)

    @wraps(init)
    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        kwargs = _without_foreign(name, kwargs, known)
        check_call(name, signature, args, kwargs)
        for key, value in (*zip(known, args, strict=False), *kwargs.items()):
            if key in checks:
                checks[key](value)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{name}: {error}; it takes {', '.join(known)}") from None
        init(self, *args, **kwargs)

    return build


def _without_foreign(layer: str, kwargs: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """`kwargs` without those of other frameworks' layers, which must ask for nothing."""
    taken = dict(kwargs)
    for name in [name for name in taken if name in _FOREIGN and name not in known]:
        value, (neutral, why) = taken.pop(name), _FOREIGN[name]
        if neutral is not _ANY and value is not neutral:
            raise ValueError(f"{layer}: {name}={value!r} cannot be had: {why}; leave it out, or use {neutral}")
    return taken


def group_or_all(group: Groups | None) -> dist.ProcessGroup:
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
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group is one that this rank is not in; shard the layer on the ranks of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group={group!r} must be a torch.distributed.ProcessGroup, such as torch.distributed.new_group "
            "returns, or None for all ranks"
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
    def from_native_module(cls, module: nn.Module, process_group: Groups | None = None, **kwargs: Any) -> nn.Module:
        """Shard `module` over `process_group` (the default group when None) in place and return it."""
        if not isinstance(module, nn.Module):
            raise ValueError(f"{cls.__name__}.from_native_module: module={module!r} must be a module")
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


def with_methods(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Let functions take the place of methods of this module.

    On a subclass rather than on the instance: activation checkpointing and `super()` go through the class.
    """
    native = type(module)
    names = {"__module__": native.__module__, "native_class": native_class(module), "changed_methods": True}
    module.__class__ = type(native.__name__, (native,), {**names, **methods})


def native_class(module: nn.Module) -> Any:
    """The class that the module had before it was sharded."""
    return getattr(type(module), "native_class", type(module))


def own_forward(module: nn.Module) -> Any:
    """The forward that the module had before it was sharded: its class', or what a policy put in its place."""
    changed = (cls for cls in type(module).__mro__ if "changed_methods" in vars(cls) and "forward" in vars(cls))
    return getattr(next(changed, native_class(module)), "forward", None)


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
