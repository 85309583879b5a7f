"""Pretrain a small Llama with tensor parallelism or pipelines, log by rank, and save it for transformers.

torchrun --nproc-per-node 2 examples/llama/pretrain.py --steps 20
torchrun --nproc-per-node 4 examples/llama/pretrain.py --tp 2 --pp 2 --output trained
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.logging import disable_existing_loggers, get_dist_logger
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR
from shardwright.plugins import HybridParallelPlugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 100), ("tp", 2), ("pp", 1), ("batch-size", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", help="directory for the trained model")
    args = parser.parse_args()

    disable_existing_loggers()
    shardwright.launch_from_torch(seed=42)
    coordinator, logger = DistCoordinator(), get_dist_logger()
    transformers.utils.logging.set_verbosity_error()

    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    optimizer: Any = HybridAdam(model.parameters(), lr=5e-3)
    scheduler: Any = CosineAnnealingWarmupLR(optimizer=optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    plugin = HybridParallelPlugin(
        tp_size=args.tp, pp_size=args.pp, microbatch_size=args.batch_size // 2, precision="fp32", zero_stage=1
    )
    logger.info(f"{plugin.mesh}", ranks=[0])

    start = torch.randint(
        0, 64, (args.steps * args.batch_size * plugin.dp_size, 1), generator=torch.Generator().manual_seed(0)
    )
    rows = (start + torch.arange(24)) % 64  # sequences that count upwards
    dataloader: Any = plugin.prepare_dataloader(
        rows,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        seed=42,
        collate_fn=lambda ids: {"input_ids": torch.stack(ids), "labels": torch.stack(ids)},
    )
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, scheduler = booster.boost(model, optimizer, None, dataloader, scheduler)

    batches = iter(dataloader)
    for step in range(1, args.steps + 1):
        outputs = booster.execute_pipeline(
            batches, model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
        )
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if coordinator.is_last_process() and (step == 1 or step % max(1, args.steps // 5) == 0):
            logger.info(f"step {step}: loss {outputs['loss'].item():.3f}, learning rate {rate:.2e}")
    if args.output:
        booster.save_model(model, args.output, shard=True)
        logger.info(f"saved to {args.output}", ranks=[0])


if __name__ == "__main__":
    main()
