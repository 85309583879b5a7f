"""How many bytes of activations a microbatch leaves in every layer, counted in a forward on the meta device.

What autograd saves is counted by storage, once, for the layer that saves it first; parameters and buffers are not
counted. Attention that a fused kernel computes saves its inputs, its mask as numbers, its output and a number per token
and head, as on any device with such a kernel (on the meta device torch would compute it step by step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...models.dry_run import meta_copy, run_dry
from ...models.layer_chain import Unit, numbers_by_module
from ...ops.keeping import ATTENTION, Region, Selection, keep_result
from ...utils.pytree import tree_leaves
from ...utils.torch_names import SDPA
from ..batch.microbatch import items_of
from ..saved_bytes import Storages
from .entry import ENTRY


class Activations(NamedTuple):
    """Bytes of one microbatch, by unit, and last those of the tail.

    kept        from forward to backward
    recomputed  the same where the unit is recomputed: its inputs
    selective   the same where it is recomputed in part: its inputs, and outputs of its products and attention
    deferred    what weight gradients that are put off wait with: inputs and output gradients of all linears
    before      kept and deferred ones of what lies before the first unit
    """

    kept: list[int]
    recomputed: list[int]
    deferred: list[int]
    selective: list[int]
    before: tuple[int, int] = (0, 0)

    def by_stage(
        self, stages: Sequence[range], again: Sequence[int], in_part: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Kept and deferred bytes of the stages with these units, the first `again` of which are recomputed, the
        next `in_part` in part.
        """
        kept, deferred = [], []
        for units, whole, selective in zip(stages, again, in_part, strict=True):
            first, second = units.start + whole, units.start + whole + selective
            held = (
                sum(self.recomputed[units.start : first])
                + sum(self.selective[first:second])
                + sum(self.kept[second : units.stop])
            )
            kept.append(float(held))
            deferred.append(float(sum(self.deferred[units.start : units.stop])))
        kept[0], deferred[0] = kept[0] + self.before[0], deferred[0] + self.before[1]
        kept[-1] += self.kept[-1]
        deferred[-1] += self.deferred[-1]
        return kept, deferred


def count_activations(
    model: nn.Module,
    units: Sequence[Unit],
    batch: Any,
    dtype: torch.dtype | None = None,
    selection: Selection | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Activations:
    """Run a copy of `model` on meta tensors like those of `batch`, in `dtype` where it is given.

    selection   what units keep that are recomputed in part; None: by cost
    prepare     is given the copy before it runs

    With padding, attention has a mask; without, models find out that there is nothing to mask (`if mask.all()`), and
    fused kernels get none.
    """
    if not _may_be_padded(batch):
        with suppress(Exception):  # the model's own code may ask something else, to which yes is no answer
            return _count(model, units, batch, dtype, selection, prepare, truth=True)
    return _count(model, units, batch, dtype, selection, prepare, truth=False)


def _may_be_padded(batch: Any) -> bool:
    for key, value in items_of(batch):
        if isinstance(value, torch.Tensor) and "mask" in str(key) and (value.is_meta or not bool(value.all())):
            return True
    return False


def _count(
    model: nn.Module,
    units: Sequence[Unit],
    batch: Any,
    dtype: torch.dtype | None,
    selection: Selection | None,
    prepare: Callable[[nn.Module], None] | None,
    truth: bool,
) -> Activations:
    copied = meta_copy(model)
    if prepare is not None:
        prepare(copied)
    if dtype is not None:
        copied.to(dtype)
    counter = _Counter(copied, len(units), selection or Selection())
    for name, numbers in numbers_by_module(unit.layer for unit in units).items():
        layer = copied.get_submodule(name)
        layer.register_forward_pre_hook(counter.enter(numbers), with_kwargs=True)
        layer.register_forward_hook(counter.left, prepend=True)
    for name in dict.fromkeys(unit.gate for unit in units):
        copied.get_submodule(name).register_forward_hook(counter.leave)
    for module in copied.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            module.register_forward_hook(counter.linear)
    with counter, saved_tensors_hooks(counter.save, lambda tensor: tensor), counter.region:
        run_dry(copied, batch, truth)
    *kept, kept_before = counter.kept
    *deferred, deferred_before = counter.deferred
    return Activations(kept, counter.recomputed[:-1], deferred, counter.selective[:-1], (kept_before, deferred_before))


class _Counter(TorchFunctionMode):
    """Adds up bytes for the unit that runs."""

    def __init__(self, model: nn.Module, num_units: int, selection: Selection) -> None:
        super().__init__()
        # By unit; behind those the tail, and last what lies before the units.
        self.kept, self.recomputed, self.deferred, self.selective = ([0] * (num_units + 2) for _ in range(4))
        self._unit = ENTRY
        self._selection = selection
        self.region = ExitStack()
        self._partly = Storages()
        self._fixed = Storages([*model.parameters(), *model.buffers()])  # what is not an activation
        self._saved, self._inputs, self._waiting = Storages(), Storages(), Storages()

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._fixed:
            self.kept[self._unit] += self._saved.add(tensor)
        return tensor

    def enter(self, numbers: Sequence[int]) -> Any:
        """numbers: of the units that the calls of a layer are."""
        calls = cycle(numbers)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._unit = index = next(calls)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf not in self._fixed:
                    self.recomputed[index] += self._inputs.add(leaf)
                    self.selective[index] += self._partly.add(leaf)
            region = Region(self._selection)
            self.region.callback(lambda: self._add_region(index, region))
            self.region.enter_context(region.recording())

        return hook

    def _add_region(self, index: int, region: Region) -> None:
        self.selective[index] += sum(
            self._partly.add(tensor) for tensor in region.tensors() if tensor not in self._fixed
        )

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        self.region.close()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._unit += 1  # what runs between two layers counts with the second one

    def linear(self, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self.deferred[self._unit] += self._waiting.add(args[0]) + output.numel() * output.element_size()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            query, key, value, mask = (
                args[place] if place < len(args) else kwargs.get(name)
                for place, name in enumerate(("query", "key", "value", "attn_mask"))
            )
            return _Fused.apply(query, key, value, mask)
        return func(*args, **kwargs)


class _Fused(torch.autograd.Function):
    """What a fused attention kernel saves; it computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            # In memory heads stand behind tokens, as the projection behind it wants them: it makes no copy.
            *samples, heads, tokens, _ = query.shape
            out = query.new_empty(*samples, tokens, heads, value.shape[-1]).transpose(-2, -3)
            return out, query.new_empty(query.shape[:-1], dtype=torch.float32)

        out, sums = keep_result(attend, name=ATTENTION)
        if mask is not None and mask.dtype is torch.bool:  # kernels add numbers: each call makes its own of them
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, out, sums, *(() if mask is None else (mask,)))
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise AssertionError("nothing is differentiated here")
