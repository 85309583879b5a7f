"""Tokens per second, model FLOP/s, MFU and memory of training a Llama in any layout, on made-up data.

    torchrun --nproc-per-node 4 examples/llama/benchmark.py --tiny --plugin 3d --tp 2 --pp 2 --zero 1
    torchrun --nproc-per-node 8 examples/llama/benchmark.py --config 8b --plugin 3d --tp 4 --pp 2 -b 8 -l 4096 -g
    torchrun --nproc-per-node 8 examples/llama/benchmark.py --config 7b --plugin zero --zero 2 -b 4 -l 4096 -g
    torchrun --nproc-per-node 8 examples/llama/benchmark.py --config 8b --plugin fsdp -b 4 -l 4096 -g

Weights are built lazily: no rank ever holds those of a whole 70b. The first steps are not counted. FLOP/s are those of
the model: products of forward and backward with attention in full, without what is recomputed, so that MFU is the share
of a GPU's promised speed that does the model's work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from common import CONFIGS, add_layout_options, check_layout, make_plugin, on_device, promised_tflops
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright
from shardwright.accelerator import get_accelerator
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin
from shardwright.utils.options import count, number, rate, refused_in_a_line


class RandomDataset(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(42)
        self.ids = torch.randint(vocabulary, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class PerformanceEvaluator:
    """Time and arithmetic of the steps that count."""

    def __init__(self, parameters: int, config: LlamaConfig, ignored_steps: int) -> None:
        # An embedding is looked up, not multiplied.
        self.parameters = parameters - config.vocab_size * config.hidden_size
        self.config, self.ignored_steps = config, ignored_steps
        self.seconds, self.tokens, self.flop, self.steps = 0.0, 0, 0.0, 0

    def on_step_start(self) -> None:
        get_accelerator().synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, samples: int, length: int) -> None:
        get_accelerator().synchronize()
        self.steps += 1
        if self.steps <= self.ignored_steps:
            return
        self.seconds += time.perf_counter() - self.started
        self.tokens += samples * length
        attention = 12 * self.config.num_hidden_layers * self.config.hidden_size * length
        self.flop += samples * length * (6 * self.parameters + attention)

    def report(self, ranks: int, promised: float | None) -> str:
        speed, tflops = self.tokens / self.seconds, self.flop / self.seconds / ranks / 1e12
        used = "" if promised is None else f", MFU {tflops / promised:.1%} of {promised:g} TFLOP/s"
        return (
            f"{speed:,.0f} tokens/s, {speed / ranks:,.0f} tokens/s per rank, {tflops:.4f} TFLOP/s per rank{used}, "
            f"{self.seconds:.1f} s in all"
        )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="--config tiny, for a CPU")
    parser.add_argument("-c", "--config", choices=CONFIGS, default="tiny")
    parser.add_argument("-b", "--batch-size", type=count, default=4, help="of one data-parallel rank")
    parser.add_argument("-s", "--steps", type=count, default=5)
    parser.add_argument("-i", "--ignore-steps", type=number, default=2, help="steps that warm up")
    parser.add_argument("-l", "--max-length", type=count, default=64)
    parser.add_argument("--peak-tflops", type=rate, default=promised_tflops(), help="of one GPU, for MFU")
    add_layout_options(parser)
    args = parser.parse_args(argv)
    if args.steps <= args.ignore_steps:
        parser.error(f"--steps {args.steps} must be more than --ignore-steps {args.ignore_steps}")
    if args.tiny and args.config != "tiny":
        parser.error(f"--config {args.config}: --tiny is the config tiny; leave out one of them")
    check_layout(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    shardwright.launch_from_torch()
    coordinator = DistCoordinator()
    plugin = make_plugin(args)
    booster = Booster(plugin=plugin)

    config = LlamaConfig(max_position_embeddings=max(args.max_length, 4096), use_cache=False, **CONFIGS[args.config])
    dp_size = getattr(plugin, "dp_size", coordinator.world_size)
    dataset = RandomDataset(args.batch_size * args.steps * dp_size, args.max_length, config.vocab_size)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, seed=42)

    device = get_accelerator().get_current_device()
    with LazyInitContext(default_device=device) if args.plugin == "3d" else nullcontext():
        model = AutoModelForCausalLM.from_config(config)
    if args.grad_checkpoint and args.plugin != "3d":
        model.gradient_checkpointing_enable()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    coordinator.print_on_master(f"{parameters / 1e6:,.1f} million parameters")
    evaluator = PerformanceEvaluator(parameters, config, args.ignore_steps)

    optimizer: Any = HybridAdam(model.parameters())
    with refused_in_a_line():  # a layout that does not fit the model
        model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, dataloader=dataloader)
    coordinator.print_on_master(f"peak memory after boost: {get_accelerator().max_memory_allocated() / 2**20:,.0f} MiB")

    batches = iter(dataloader)
    for _ in tqdm(range(len(dataloader)), desc="Step", disable=not coordinator.is_last_process()):
        evaluator.on_step_start()
        if isinstance(plugin, HybridParallelPlugin):
            booster.execute_pipeline(
                batches, model, criterion=lambda outputs, inputs: outputs[0], optimizer=optimizer, return_loss=True
            )
        else:
            booster.backward(model(**on_device(next(batches), device))[0], optimizer)
        optimizer.step()
        optimizer.zero_grad()
        evaluator.on_step_end(args.batch_size * dp_size, args.max_length)
    coordinator.print_on_master(evaluator.report(coordinator.world_size, args.peak_tflops))
    coordinator.print_on_master(f"peak memory: {get_accelerator().max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
