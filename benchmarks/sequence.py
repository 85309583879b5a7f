"""Step time and kept activations of sequences that are split along tensor parallelism.

    python benchmarks/sequence.py                            # CPU, gloo: starts its own rank processes
    torchrun --nproc_per_node 2 benchmarks/sequence.py       # any device; nccl where there is CUDA

The same Llama under plain tensor parallelism, `split_gather`, `split_gather` with `enable_sequence_overlap`, and
`ring`. All take turns within one run, so that what else the machine does hits all of them; medians over the rounds of
forward and backward are compared: wall time, and CPU time summed over the ranks. Kept activations are the bytes that
autograd saves, each memory once, without parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.utils.device import get_current_device

SPLIT: dict[str, Any] = {"enable_sequence_parallelism": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split_gather": SPLIT,
    "split_gather, overlap": {**SPLIT, "enable_sequence_overlap": True},
    "ring": {**SPLIT, "sequence_parallelism_mode": "ring"},
}


def build(options: argparse.Namespace, plugin: dict[str, Any]) -> nn.Module:
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
    settings = {"tp_size": dist.get_world_size(), "precision": options.precision, **plugin}
    model, *_ = Booster(plugin=HybridParallelPlugin(**settings)).boost(LlamaForCausalLM(config))
    return model


def step(model: nn.Module, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return float(loss)


def kept_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no memory is counted under two addresses

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not tensor.is_leaf:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    found = sum(seen.values())
    loss.backward()
    model.zero_grad()
    return found


def measure(rank: int, world: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    models = {name: build(options, plugin) for name, plugin in VARIANTS.items()}
    ids = torch.randint(512, (options.batch, options.seq), generator=torch.Generator().manual_seed(1))
    ids = ids.to(get_current_device())
    losses = {name: step(model, ids) for name, model in models.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    kept = {name: kept_bytes(model, ids) for name, model in models.items()}
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cpus: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, model in models.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(model, ids)
            spent = torch.tensor([time.process_time() - cpu], device=ids.device)
            walls[name].append(time.perf_counter() - wall)
            dist.all_reduce(spent)
            cpus[name].append(spent.item())
    if rank == 0:
        print(f"tp={world}, hidden {options.hidden}, {options.layers} layers, {options.batch} x {options.seq}")
        for name in VARIANTS:
            print(
                f"{name:24} {1000 * statistics.median(walls[name]):8.1f} ms   CPU "
                f"{1000 * statistics.median(cpus[name]):8.1f} ms   kept {kept[name] / 2**20:7.2f} MiB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
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
        run_ranks(measure, options.tp, options, timeout=500)


if __name__ == "__main__":
    main()
