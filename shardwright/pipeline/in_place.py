"""What is done to the modules of a model that is cut into stages: other classes, tensors without memory, lists that
keep their slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.caches import keep_caches_off_in_training
from ..models.dry_run import without_data
from ..models.known_values import knowing_whole_numbers, known
from ..utils import pytree


def change_class(
    module: nn.Module, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Give `module` a subclass of its class whose call is `around(original call, args, kwargs)`.

    Neither a hook nor `forward` would do: hooks run inside or outside of transformers' checkpointing by version, and
    replacing `forward` on the instance hides what a subclass of the class does there.
    """
    base = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: base.__call__(self, *a, **k), args, kwargs)

    module.__class__ = type(
        base.__name__, (base,), {"__call__": __call__, "__module__": base.__module__, "__doc__": base.__doc__}
    )


def release(module: nn.Module, table: dict[str, Any], name: str) -> None:
    """Leave a tensor without memory under the name, so that shape, dtype and device stay readable, but no parameter or
    buffer.

    One element stands for all; it is NaN, so that a forward that computed with it after all could not go unnoticed.
    """
    tensor = table.pop(name)
    module._non_persistent_buffers_set.discard(name)
    module.__dict__[name] = stand_in(tensor, tensor.device)


def stand_in(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=dtype or tensor.dtype, device=device).expand(tensor.shape)


def show_released(module: nn.Module, in_forward: Callable[[], bool]) -> None:
    """Let `module`, all of whose parameters are released, name what stands for them while the model's forward runs:
    models ask a part of theirs for its device and dtype, which is that of its first parameter.
    """
    base = type(module)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
        if in_forward():
            for owner in self.modules() if recurse else (self,):
                yield from (value for value in owner.__dict__.values() if isinstance(value, torch.Tensor))
        else:
            yield from base.parameters(self, recurse)

    module.__class__ = type(
        base.__name__, (base,), {"parameters": parameters, "__module__": base.__module__, "__doc__": base.__doc__}
    )


@dataclass(frozen=True)
class Given:
    """One of the leaves that a call was given."""

    number: int


def output_shapes(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Output of `module` as meta tensors, for inputs like these, and whether it follows from their shapes: its call
    runs once with every tensor on the meta device, or, where it asks for them, with whole numbers on the CPU, or, where
    it looks at others, too, with zeros for its weights. In place of what the module hands on as it got it stands
    `Given`.
    """
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (table, name, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers, owner.__dict__)  # the last one holds released tensors
        for name, tensor in table.items()
        if isinstance(tensor, torch.Tensor)
    ]
    try:
        for table, name, tensor in places:
            on_meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            table[name] = nn.Parameter(on_meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else on_meta
        with torch.no_grad():
            try:
                given = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
                with without_data():
                    return _with_given(call(*given[0], **given[1]), given), True
            except Exception:  # of a module whose shapes follow from sizes of images, say
                try:
                    given = known((args, kwargs))
                    with knowing_whole_numbers():
                        return _with_given(call(*given[0], **given[1]), given), False
                except Exception:  # of a module that counts, say, what is not a number
                    for table, name, tensor in places:
                        table[name] = _zeros(tensor)
                    return _with_given(call(*args, **kwargs), (args, kwargs)), False
    finally:
        for table, name, tensor in places:
            table[name] = tensor


def _with_given(output: Any, given: Any) -> Any:
    numbers = {id(leaf): number for number, leaf in enumerate(pytree.tree_leaves(given))}
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: Given(numbers[id(leaf)]) if id(leaf) in numbers else leaf, output
    )


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """For a parameter of any size the memory of one element; what may be written to keeps what it holds."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.new_zeros(()).expand(tensor.shape), requires_grad=False)
    return torch.zeros_like(tensor) if tensor.isnan().any() else tensor.clone()


def keep_slices(layers: nn.Module) -> None:
    """Let a ModuleList return one ModuleList per slice: models slice their layers in every forward, which registers
    all of them anew.
    """
    assert isinstance(layers, nn.ModuleList)
    base = type(layers)
    kept: dict[tuple[Any, ...], nn.ModuleList] = {}

    def __getitem__(self: nn.ModuleList, index: Any) -> Any:
        if not isinstance(index, slice):
            return base.__getitem__(self, index)
        key = (index.start, index.stop, index.step)
        wanted = list(self._modules.values())[index]
        if key not in kept or list(kept[key]._modules.values()) != wanted:  # modules are equal only to themselves
            kept[key] = base(wanted)
        return kept[key]

    layers.__class__ = type(
        base.__name__, (base,), {"__getitem__": __getitem__, "__module__": base.__module__, "__doc__": base.__doc__}
    )


def disable_own_checkpointing(model: nn.Module) -> None:
    """What the switch does besides, no cache in training, stays."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            keep_caches_off_in_training(module)
            module.gradient_checkpointing = False  # type: ignore[assignment]
