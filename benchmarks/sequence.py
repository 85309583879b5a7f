"""Step time and kept activations of sequences that are split over ranks.

    python benchmarks/sequence.py                            # CPU, gloo: starts its own rank processes
    python benchmarks/sequence.py --axis --ranks 4 --batch 1 --seq 2048 --hidden 128 --layers 2
    torchrun --nproc_per_node 2 benchmarks/sequence.py       # any device; nccl where there is CUDA

The same Llama under plain tensor parallelism, `split_gather`, `split_gather` with `enable_sequence_overlap`, and
`ring`; with `--axis` on one rank alone, while the others wait, and with its sequences shared by all of them, gradients
summed: `ring_attn`, the same with `ulysses_size=2`, and `all_to_all`. All take turns within one run, so that what else
the machine does hits all of them; medians over the rounds of forward and backward are compared: wall time, and CPU time
summed over the ranks. Kept activations are the bytes that autograd saves, each memory once, without parameters.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from turns import Turns

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.utils.device import get_current_device

SPLIT: dict[str, Any] = {"enable_sequence_parallelism": True}
ALONG_TENSOR: dict[str, dict[str, Any]] = {
    "plain": {},
    "split_gather": SPLIT,
    "split_gather, overlap": {**SPLIT, "enable_sequence_overlap": True},
    "ring": {**SPLIT, "sequence_parallelism_mode": "ring"},
}
ALONE = "one rank alone"
OVER_AXIS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "ring_attn": {**SPLIT, "sequence_parallelism_mode": "ring_attn"},
    "ring_attn, ulysses_size=2": {**SPLIT, "sequence_parallelism_mode": "ring_attn", "ulysses_size": 2},
    "all_to_all": {**SPLIT, "sequence_parallelism_mode": "all_to_all"},
}


class Trained(NamedTuple):
    """A model, and who reduces its gradients where ranks share sequences."""

    model: nn.Module
    booster: Booster | None = None
    optimizer: Any = None

    def backward(self, loss: torch.Tensor) -> None:
        if self.booster is None or self.optimizer is None:
            loss.backward()
        else:
            self.booster.backward(loss, self.optimizer)

    def clear(self) -> None:
        (self.model if self.optimizer is None else self.optimizer).zero_grad()


def build(options: argparse.Namespace, name: str, plugin: dict[str, Any]) -> Trained:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.seq,
    )
    model: Any = LlamaForCausalLM(config)
    if name == ALONE:
        return Trained(model.to(get_current_device()))
    axis = "sp_size" if options.axis else "tp_size"
    settings = {axis: dist.get_world_size(), "precision": options.precision, **plugin}
    booster = Booster(plugin=HybridParallelPlugin(**settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if options.axis else None
    model, optimizer, *_ = booster.boost(model, optimizer)
    return Trained(model, booster, optimizer)


def step(trained: Trained, ids: torch.Tensor) -> float:
    loss = trained.model(input_ids=ids, labels=ids).loss
    trained.backward(loss)
    trained.clear()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return float(loss.detach())


def kept_bytes(trained: Trained, ids: torch.Tensor) -> int:
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no memory is counted under two addresses

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not tensor.is_leaf:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trained.model(input_ids=ids, labels=ids).loss
    found = sum(seen.values())
    trained.backward(loss)
    trained.clear()
    return found


def measure(rank: int, world: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    variants = OVER_AXIS if options.axis else ALONG_TENSOR
    models = {name: build(options, name, plugin) for name, plugin in variants.items()}
    ids = torch.randint(512, (options.batch, options.seq), generator=torch.Generator().manual_seed(1))
    ids = ids.to(get_current_device())
    losses = {name: step(model, ids) for name, model in models.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    kept = {name: kept_bytes(model, ids) for name, model in models.items()}

    def train(name: str) -> None:
        if name != ALONE or rank == 0:
            step(models[name], ids)

    turns = Turns.take({name: lambda turn, name=name: train(name) for name in models}, options.rounds)
    if rank == 0:
        print(f"{world} ranks, hidden {options.hidden}, {options.layers} layers, {options.batch} x {options.seq}")
        for name, times in turns.summary(next(iter(models))).items():
            shown = f"{name:26} {times['wall ms']:8.1f} ms   CPU {times['CPU ms']:8.1f} ms"
            print(f"{shown}   kept {kept[name] / 2**20:7.2f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--axis", action="store_true", help="sequences over an axis of their own")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    if "RANK" in os.environ:
        import shardwright

        shardwright.launch_from_torch(seed=0)
        measure(dist.get_rank(), dist.get_world_size(), options)
        dist.destroy_process_group()
    else:
        run_ranks(measure, options.ranks, options, timeout=500)


if __name__ == "__main__":
    main()
