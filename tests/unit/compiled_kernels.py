"""Triton kernels compiled for a GPU that is not there: every kernel, as its callers launch it, down to machine code.

    python tests/unit/compiled_kernels.py 90         compute capability 9.0; prints how many kernels that were

The interpreter, by which kernels are compared with torch on a CPU, takes Python that the compiler refuses. Launches are
replaced by compilations; what kernels would have written is never looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shardwright.kernels.adam import Piece, Rule
from shardwright.kernels.gated import ACTIVATIONS
from shardwright.kernels.rotary import FORMS
from shardwright.kernels.triton import adam, cross_entropy, gated, norms, rotary


class Absent:
    """The driver of a GPU of some capability."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype).requires_grad_()


def launch_all(dtype: torch.dtype) -> None:
    x, w = numbers(5, 37, dtype=dtype), numbers(37, dtype=dtype)
    made = [norms.rms_norm(x, w, 1e-6), norms.rms_norm(x, w, 1e-6, rounded=True), norms.layer_norm(x, w, w, 1e-5)]
    made.append(norms.layer_norm(x, w, None, 1e-5))
    made += [gated.gated(x, x + 1, kind) for kind in ACTIVATIONS]
    turned = numbers(2, 5, 3, 13, dtype=dtype)
    for form in FORMS:
        angles = numbers(1, 5, 5 if form.angles == "half" else 10, dtype=dtype).detach()
        made += [rotary.rotated(turned, angles, angles, form, 2)]
    torch.autograd.backward(made, [torch.ones_like(y) for y in made])
    target = torch.zeros(5, dtype=torch.int64)
    cross_entropy.row_shares(x.detach(), target, target > 0, 30)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.zeros(5, dtype=wide)
    for out in (torch.empty(5, 37, dtype=wide), x.detach()):
        cross_entropy.row_gradients(x.detach(), rows, rows, target, target > 0, target > 0, 30, 37, 0.1, 1e-3, out)


def step_by_adam(dtype: torch.dtype) -> None:
    """Gradients and weights in `dtype`, with every switch on and off, aligned and not."""
    flat, given, one = torch.ones(4, 3000), torch.ones(3000, dtype=dtype), torch.ones(())
    for start in (0, 1):
        master, exp_avg, exp_avg_sq = flat[:3, start:]
        weight = given[start:].clone() if dtype != torch.float32 else None
        pieces = [Piece(master, given[start:], exp_avg, exp_avg_sq, one, weight)]
        for decoupled, rate, skip in ((True, 1e-3, None), (False, one, one)):
            adam.TritonAdam()(0, pieces, Rule(rate, 0.9, 0.999, 1e-8, 0.1, decoupled, decoupled), one, skip)


def main(capability: int) -> None:
    driver.set_active(Absent(capability))
    launch, compiled = JITFunction.run, set[tuple[str, Any]]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert "cubin" in kernel.asm
        compiled.add((self.__name__, kernel.hash))
        return kernel

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16, torch.float64):
        launch_all(dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        step_by_adam(dtype)
    print(f"{len(compiled)} kernels")


if __name__ == "__main__":
    main(int(sys.argv[1]))
