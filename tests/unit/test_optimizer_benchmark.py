"""What `benchmarks/zero.py --step` and `scripts/gpu-check` time are steps that update every weight."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.kernels import compiled_adam
from shardwright.testing import run_ranks

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def moved(rank: int, world: int) -> dict[str, list[int]]:
    """Elements of weights that each of three steps has changed, by contender."""
    sys.path.append(BENCHMARKS)
    from zero import optimizer_steps

    compiled_adam.backend = "eager"
    found: dict[str, list[int]] = {}
    for name, build in optimizer_steps(1).items():
        made: list[AdamW] = []
        taken = register_optimizer_step_post_hook(lambda optim, *_, made=made: made.append(optim))
        step = build()
        step()
        taken.remove()
        masters = list(made[0].state)
        found[name] = []
        for _ in range(3):
            before = [master.detach().clone() for master in masters]
            step()
            changed = [torch.ne(master, old).sum() for master, old in zip(masters, before, strict=True)]
            found[name].append(int(sum(changed)))
    return found


def test_timed_steps_update_all_weights() -> None:
    [found] = run_ranks(moved, 1, timeout=120)
    assert set(found) >= {"fused AdamW", "ZeRO fp32", "ZeRO bf16"}
    for name, counts in found.items():
        # some elements move by less than half of their last place
        assert min(counts) > 900_000, (name, counts)
