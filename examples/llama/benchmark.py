"""Tokens per second and FLOP/s of training a Llama in any layout, with weights that are built lazily and data that is
made up.

torchrun --nproc-per-node 4 examples/llama/benchmark.py --config tiny --plugin 3d --tp 2 --pp 2 --zero 1 --steps 4
torchrun --nproc-per-node 8 examples/llama/benchmark.py --config 8b --plugin 3d --tp 4 --pp 2 --mbs 1 --batch-size 8
--grad-checkpoint torchrun --nproc-per-node 8 examples/llama/benchmark.py --config 8b --plugin fsdp
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright
from shardwright.accelerator import get_accelerator
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig

CONFIGS = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


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
    """Time and arithmetic of the steps that count: matrix products of forward and backward, causal attention in
    full, no recomputation.
    """

    def __init__(self, parameters: int, config: LlamaConfig, ignored_steps: int) -> None:
        self.parameters, self.config, self.ignored_steps = parameters, config, ignored_steps
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

    def report(self, ranks: int) -> str:
        speed = self.tokens / self.seconds
        return (
            f"{speed:,.0f} tokens/s, {self.flop / self.seconds / ranks / 1e12:.4f} TFLOP/s per rank, "
            f"{self.seconds:.1f} s in all"
        )


def make_plugin(args: argparse.Namespace) -> Plugin:
    if args.plugin == "3d":
        checkpointing = (
            PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0) if args.grad_checkpoint else None
        )
        if args.num_ckpt_layers_per_stage:
            checkpointing = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=args.num_ckpt_layers_per_stage)
        return HybridParallelPlugin(
            tp_size=args.tp,
            pp_size=args.pp,
            pp_style=args.pp_style,
            num_model_chunks=args.n_chunks,
            zero_stage=args.zero,
            sp_size=args.sp,
            sequence_parallelism_mode=args.sp_mode,
            enable_sequence_parallelism=args.sp > 1,
            enable_fused_normalization=get_accelerator().is_available(),
            enable_flash_attention=args.xformers,
            microbatch_size=args.mbs,
            precision=args.precision,
            enable_metadata_cache=not args.no_cache,
            overlap_allgather=args.overlap_allgather,
            cpu_offload=args.cpu_offload,
            overlap_p2p=args.overlap_p2p,
            gradient_checkpoint_config=checkpointing,
            num_layers_per_stage=args.num_layers_per_stage,
        )
    if args.plugin == "zero":
        return LowLevelZeroPlugin(stage=args.zero or 1, precision=args.precision, cpu_offload=args.cpu_offload)
    if args.plugin == "fsdp":
        return TorchFSDPPlugin(
            mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            cpu_offload=args.cpu_offload,
        )
    return TorchDDPPlugin()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", choices=CONFIGS, default="tiny")
    parser.add_argument("-p", "--plugin", choices=("3d", "zero", "fsdp", "ddp"), default="3d")
    parser.add_argument("-b", "--batch-size", type=int, default=4, help="of one data-parallel rank")
    parser.add_argument("-s", "--steps", type=int, default=5)
    parser.add_argument("-i", "--ignore-steps", type=int, default=2)
    parser.add_argument("-l", "--max-length", type=int, default=64)
    parser.add_argument("-g", "--grad-checkpoint", action="store_true")
    parser.add_argument("-x", "--xformers", action="store_true", help="torch's fused attention kernels")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--sp_mode", default=None)
    parser.add_argument("--mbs", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--pp_style", default="1f1b")
    parser.add_argument("--n_chunks", type=int, default=1)
    parser.add_argument("--num_layers_per_stage", type=int, nargs="+")
    parser.add_argument("--num_ckpt_layers_per_stage", type=int, nargs="+")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cpu_offload", action="store_true")
    parser.add_argument("--no_cache", action="store_true")
    parser.add_argument("--overlap_allgather", action="store_true")
    parser.add_argument("--overlap_p2p", action="store_true", default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    shardwright.launch_from_torch()
    coordinator = DistCoordinator()
    plugin = make_plugin(args)
    booster = Booster(plugin=plugin)

    config = LlamaConfig(max_position_embeddings=max(args.max_length, 4096), use_cache=False, **CONFIGS[args.config])
    dp_size = getattr(plugin, "dp_size", coordinator.world_size)
    dataset = RandomDataset(args.batch_size * args.steps * dp_size, args.max_length, config.vocab_size)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, seed=42)

    with (
        LazyInitContext(default_device=get_accelerator().get_current_device()) if args.plugin == "3d" else nullcontext()
    ):
        model = AutoModelForCausalLM.from_config(config)
    if args.grad_checkpoint and args.plugin != "3d":
        model.gradient_checkpointing_enable()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    coordinator.print_on_master(f"{parameters / 1e6:,.1f} million parameters")
    evaluator = PerformanceEvaluator(parameters, config, args.ignore_steps)

    optimizer: Any = HybridAdam(model.parameters())
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
            batch = {name: tensor.to(get_accelerator().get_current_device()) for name, tensor in next(batches).items()}
            booster.backward(model(**batch)[0], optimizer)
        optimizer.step()
        optimizer.zero_grad()
        evaluator.on_step_end(args.batch_size * dp_size, args.max_length)
    coordinator.print_on_master(evaluator.report(coordinator.world_size))
    coordinator.print_on_master(f"peak memory: {get_accelerator().max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
