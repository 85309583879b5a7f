"""Steps of Adam and AdamW in one pass over the flat buffers (`kernels.adam`), in place of torch's and a copy behind it.

The optimizer stays the user's: states are made and named as torch makes them, its groups say what they say at each
step, and its `step` is called without parameters, so that schedulers which count its calls, and profilers, see it.

[Note: whose step is taken over] That of torch's own Adam and AdamW, and of ours that are built on them, where it would
be torch's fused one: not that of subclasses, of instances with a `step` of their own, with hooks of scripts around it
(which may look at what is stepped on), with amsgrad, or on fp64.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from ..kernels.adam import Kernel, Piece, Rule
from ..kernels.backends import cpp_compiler, stands_for_gpu, triton_kernels
from ..kernels.compiled_adam import CompiledAdam
from ..optim.adam import CPUAdam, FusedAdam, HybridAdam
from ..optim.kind import keeps_step
from .bucket import Bucket
from .segments import Segment

_LOGGER = logging.getLogger(__name__)
LEAST_COMPILED = 1_000_000  # elements on this rank, below which nobody waits for a compiler
_TAKEN_OVER: tuple[type[Optimizer], ...] = (Adam, AdamW, HybridAdam, CPUAdam, FusedAdam)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # without a public name (torch 2.11 to 2.13)
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OURS = __name__.partition(".")[0]


class OnePass:
    """
    buckets    what is stepped on
    compiles   whether inductor may make the kernel for a CPU
    """

    def __init__(self, optim: Optimizer, buckets: Sequence[Bucket], compiles: bool) -> None:
        self._optim = optim
        self._kernel = _kernel_for(buckets, compiles) if type(optim) in _TAKEN_OVER else None

    @property
    def name(self) -> str:
        """Of the kernel, for what is said about a layout: "" where torch steps."""
        return "" if self._kernel is None else type(self._kernel).__name__.removesuffix("Adam").lower()

    def kernel(self) -> Kernel | None:
        """What takes this step, or None where torch's own does."""
        return self._kernel if self._kernel is not None and _is_plain(self._optim) else None

    @torch.no_grad()
    def take(
        self,
        kernel: Kernel,
        segments: Sequence[Segment],
        factor: torch.Tensor,
        skip: torch.Tensor | None,
        written: Collection[int],
    ) -> None:
        """Step the segments that have a gradient; the working parameters of the buckets in `written` follow."""
        for number, group in enumerate(self._optim.param_groups):
            mine = [each for each in segments if each.run.group == number and each.tensor.grad is not None]
            if mine:
                kernel(number, [self._piece(segment, written) for segment in mine], Rule.of(group), factor, skip)

    def _piece(self, segment: Segment, written: Collection[int]) -> Piece:
        state, bucket = self._optim.state[segment.tensor], segment.bucket
        if not state:  # as torch's fused step makes it
            state["step"] = torch.zeros((), dtype=torch.float32, device=segment.tensor.device)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(segment.tensor, memory_format=torch.preserve_format)
        for name in ("step", *_MOMENTS):
            if (state[name].dtype, state[name].device) != (torch.float32, segment.tensor.device):  # as it was loaded
                state[name] = state[name].to(segment.tensor.device, torch.float32)
        weight = None
        if bucket.index in written:
            weight = bucket.own_flat[segment.run.start : segment.run.stop]
        master, grad, exp_avg, exp_avg_sq = (
            tensor.detach().view(-1) for tensor in (segment.tensor, segment.grad, *(state[name] for name in _MOMENTS))
        )
        return Piece(master, grad, exp_avg, exp_avg_sq, state["step"], weight)


def _kernel_for(buckets: Sequence[Bucket], compiles: bool) -> Kernel | None:
    if not buckets or any(bucket.master.dtype != torch.float32 for bucket in buckets):
        return None
    master = buckets[0].master
    kernels: Any = triton_kernels("adam", master)
    if kernels is not None:
        kernel: Kernel = kernels.TritonAdam()
        return kernel
    if stands_for_gpu(master):
        return _stepped_without_memory
    is_large = sum(bucket.master.numel() for bucket in buckets) >= LEAST_COMPILED
    if not (compiles and is_large and master.device.type == "cpu"):
        return None
    compiler, is_there = cpp_compiler()
    if not is_there:  # on a GPU layers are compiled without one
        _LOGGER.warning(
            f"enable_jit_fused=True: there is no {compiler} to compile the steps of masters in host memory with; "
            "torch's fused Adam takes them. Install a C++ compiler (apt-get install g++) or name one in CXX"
        )
        return None
    return CompiledAdam()


def _stepped_without_memory(
    number: int, pieces: Sequence[Piece], rule: Rule, factor: torch.Tensor, skip: torch.Tensor | None
) -> None:
    """What `kernels.adam`'s kernels read and write, of tensors without memory: none makes anything beside them."""
    for piece in pieces:
        piece.exp_avg.lerp_(piece.grad.to(piece.exp_avg.dtype), 0.1)
        piece.master.addcmul_(piece.exp_avg, piece.exp_avg_sq)
        if piece.weight is not None:
            piece.weight.copy_(piece.master)


def _is_plain(optim: Optimizer) -> bool:
    """See [Note: whose step is taken over]."""
    own = optim.__dict__.get("step")
    # A scheduler's counts calls alone, but may be around one of the script's own.
    if own is not None and not (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(optim).step):
        return False
    hooks = [getattr(optim, name) for name in _HOOKS] + [getattr(torch_optimizer, name) for name in _HOOKS_OF_ALL]
    if any(not _is_ours(hook) for table in hooks for hook in table.values()):
        return False
    return keeps_step(optim, (Adam,)) and all(map(_is_usual, optim.param_groups))


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == _OURS


def _is_usual(group: dict[str, Any]) -> bool:
    if not group["fused"] or group["amsgrad"] or group["capturable"] or group["differentiable"]:
        return False
    return all(isinstance(value, (int, float)) for value in (*group["betas"], group["eps"], group["weight_decay"]))
