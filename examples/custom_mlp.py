"""One-dimensional tensor parallelism on two linears: by hand, by a policy, and under a plugin.

    python examples/custom_mlp.py --tiny
    torchrun --nproc-per-node 2 examples/custom_mlp.py --tiny
    torchrun --nproc-per-node 8 examples/custom_mlp.py

A column linear deals its output features to the ranks, the row linear behind it its input features. In between every
rank has a part of the features, and one sum over the ranks ends it:

    x [B, 256] -> dense_1 [256, 1024 / n] -> relu -> dense_2 [1024 / n, 256] -> sum over n ranks -> [B, 256]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import Plan, Policy
from shardwright.shardformer.layer import Linear1D_Col, Linear1D_Row
from shardwright.utils import get_current_device


class MLP(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.dense_1, self.dense_2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_2(self.dense_1(x).relu())


class MLPPolicy(Policy):
    def plan(self) -> Plan:
        return Plan({"dense_1": "colwise", "dense_2": "rowwise"}, "MLPPolicy")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few steps")
    args = parser.parse_args(argv)
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    # By hand: the model's own linears, each rank with its slice of them.
    device = get_current_device()
    mlp = MLP().to(device)
    by_hand = copy.deepcopy(mlp)
    by_hand.dense_1 = Linear1D_Col.from_native_module(by_hand.dense_1)
    by_hand.dense_2 = Linear1D_Row.from_native_module(by_hand.dense_2)
    x = torch.randn(16, 256, device=device)  # the same on all ranks, which were seeded alike
    torch.testing.assert_close(by_hand(x), mlp(x))
    coordinator.print_on_master(
        f"Weight of the first linear layer: {list(by_hand.dense_1.weight.T.shape)}\n"
        f"Weight of the second linear layer: {list(by_hand.dense_2.weight.T.shape)}\n"
        f"Output of the MLP: {list(by_hand(x).shape)}"
    )

    # By a policy, under a plugin that shards the optimizer, too. The model is not changed, and all that has to be said
    # is in the five lines of MLPPolicy.
    targets = torch.randn(16, 256, device=device)
    plugin = HybridParallelPlugin(
        tp_size=dist.get_world_size(), precision="fp32", zero_stage=1, custom_policy=MLPPolicy(), example_inputs=(x,)
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(mlp, torch.optim.AdamW(mlp.parameters(), lr=1e-3))
    for step in range(1, (8 if args.tiny else 200) + 1):
        loss = nn.functional.mse_loss(model(x), targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        coordinator.print_on_master(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
