"""What holds a rank's memory when there is none left, and which setting would free how much of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..cluster import job
from ..interface import ModelWrapper, OptimizerWrapper
from ..utils.device import get_current_device
from ..utils.memory_notes import AtFailure, snapshot_directory, tell_memory_by
from .hybrid.resolved import size, table

WEIGHTS, GRADIENTS, MASTERS, STATES = "weights", "gradients", "masters of the weights", "optimizer states"
REST = "activations, batches, buffers on their way"


class Saving(NamedTuple):
    """A setting, and about how many bytes it frees on this rank."""

    setting: str
    frees: int
    how: str


def tell_of(model: nn.Module, optimizer: OptimizerWrapper | None, plugin: Any) -> None:
    """An error for want of memory says it from now on, while `model` lives."""
    refs = weakref.ref(model), None if optimizer is None else weakref.ref(optimizer)

    def teller(at_failure: AtFailure) -> str:
        model, optimizer = refs[0](), None if refs[1] is None else refs[1]()
        return "" if model is None else as_text(model, held(model, optimizer), at_failure, plugin)

    tell_memory_by(model, teller)


def _name(model: nn.Module) -> str:
    return type(model.unwrap() if isinstance(model, ModelWrapper) else model).__name__


def held(model: nn.Module, optimizer: OptimizerWrapper | None) -> dict[str, int]:
    """Bytes on this rank's device between steps. What shares memory counts once."""
    seen = set[int]()
    return {name: _bytes(tensors, seen) for name, tensors in _kinds(model, optimizer)}


def _kinds(model: nn.Module, optimizer: OptimizerWrapper | None) -> Iterator[tuple[str, list[torch.Tensor]]]:
    params = list(model.parameters())
    # ZeRO's optimizer has buckets; it is not imported, since plugins that do without it must
    zero: Any = optimizer.sharded if optimizer is not None else None
    units = getattr(zero, "units", None)
    buckets: list[Any] = list(getattr(zero if units is None else units, "buckets", ()))
    trained = [bucket for bucket in buckets if bucket.is_trained]
    # Parameters of buckets are not touched: looking at them may gather them, which no other rank takes part in.
    yield WEIGHTS, [*(params if not buckets else ()), *model.buffers(), *(bucket.flat for bucket in buckets)]
    kept = [grad for bucket in trained for grad in (bucket.shard_grad, bucket.step_grad, bucket.grads, bucket.carry)]
    own = [] if buckets else [param.grad for param in params]
    yield GRADIENTS, [grad for grad in (*own, *kept) if grad is not None]
    yield MASTERS, [bucket.master for bucket in buckets]
    states = optimizer.unwrap().state.values() if optimizer is not None else ()
    yield STATES, [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total, device = 0, get_current_device().type
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        if local.device.type == device and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def savings(
    held: dict[str, int], rest: int | None, reserved: int | None, plugin: Any, recomputes: bool = False
) -> list[Saving]:
    """What would help, most first. `rest` is what a step works with.

    recomputes  the model has activation checkpointing of its own on
    """
    found: list[Saving] = []
    layout = getattr(plugin, "layout", None)
    if layout is not None:
        found += of_sharding(held, layout)
    if rest:
        found += _of_activations(rest, layout, recomputes)
    if reserved and not _has_expandable_segments():
        found.append(
            Saving(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                reserved,
                "reserved, and in pieces too small to be used; set in the environment",
            )
        )
    return sorted(found, key=lambda saving: -saving.frees)


def of_sharding(held: dict[str, int], layout: Any) -> Iterator[Saving]:
    """Of what is held between steps."""
    stage = layout.zero_stage
    ranks = layout.shared if stage else layout.sizes["dp"] * layout.sizes["sp"]
    parts = ((1, held[MASTERS] + held[STATES]), (2, held[GRADIENTS]), (3, held[WEIGHTS]))
    names = {1: "optimizer states and masters", 2: "gradients, too,", 3: "weights, too,"}
    amount = 0
    for number, whole in parts:
        if number > stage and ranks > 1:
            amount += whole * (ranks - 1) // ranks
            yield Saving(f"zero_stage={number}", amount, f"{names[number]} are dealt out to {ranks} ranks")
    if held[MASTERS] + held[STATES]:
        needs = "" if stage else ", with zero_stage=1 at least"
        yield Saving("cpu_offload=True", held[MASTERS] + held[STATES], f"they lie in host memory{needs}")
    for axis, name in (("tp", "tp_size"), ("pp", "pp_size")):
        doubled = 2 * layout.sizes[axis]
        yield Saving(f"{name}={doubled}", sum(held.values()) // 2, "at most: the model over twice as many ranks")


def _has_expandable_segments() -> bool:
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.replace(" ", "").lower() for setting in settings)


def _of_activations(rest: int, layout: Any, recomputes: bool) -> Iterator[Saving]:
    number = getattr(layout, "num_microbatches", None)
    if number is not None:
        yield Saving(f"num_microbatches={2 * number}", rest // 2, "microbatches of half as many samples: at most half")
    else:
        yield Saving("half the batch", rest // 2, "at most")
    stages = getattr(layout, "stages", ())
    if not (recomputes or any(stage.recomputed or stage.selective for stage in stages)):
        yield Saving(
            "gradient_checkpoint_config" if stages else "model.gradient_checkpointing_enable()",
            rest,
            "at most: layers keep their inputs alone, and are computed again in backward",
        )


def as_text(model: nn.Module, held: dict[str, int], at_failure: AtFailure, plugin: Any) -> str:
    """The note on the error."""
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    kept, allocated = sum(held.values()), at_failure.allocated
    rest = None if allocated is None else max(allocated - kept, 0)
    rows = [(name, size(amount)) for name, amount in held.items() if amount]
    if rest is not None:
        rows.append((REST, size(rest)))
    wanted = "" if at_failure.wanted is None else f" for {size(at_failure.wanted)}"
    in_use = "" if allocated is None else f"; tensors had {size(allocated)}"
    head = f"{job.this_rank()}, which trains {_name(model)}, had no memory{wanted}{in_use}:"
    lines = [head, *_indented(table(("held by", "bytes"), rows))]
    found = [saving for saving in savings(held, rest, at_failure.reserved, plugin, recomputes) if saving.frees]
    if found:
        rows_of = [(saving.setting, size(saving.frees), saving.how) for saving in found]
        lines += ["what would free how much here, about:", *_indented(table(("setting", "frees", ""), rows_of))]
    directory = snapshot_directory()
    if directory is not None:
        lines.append(f"a snapshot of the allocator is in {directory}")
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
