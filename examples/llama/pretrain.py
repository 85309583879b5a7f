"""Pretrain a Llama from scratch at any layout, log by rank, and save it for transformers.

    torchrun --nproc-per-node 2 examples/llama/pretrain.py --tiny --steps 20 --tp 2
    torchrun --nproc-per-node 4 examples/llama/pretrain.py --tiny --tp 2 --pp 2 --output trained
    torchrun --nproc-per-node 8 examples/llama/pretrain.py --config 1b --zero 1 -b 32 --mbs 4 --length 2048 -x

Without --tiny the text is C4, read from the hub as it is needed: the loader deals the samples of a stream to the
data-parallel ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from common import CONFIGS, add_layout_options, make_plugin
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.lazy import LazyInitContext
from shardwright.logging import disable_existing_loggers, get_dist_logger
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR
from shardwright.plugins import HybridParallelPlugin
from shardwright.utils.options import count, directory, rate, refused_in_a_line


class C4Blocks(IterableDataset):
    """The texts of C4 one after the other, cut into blocks of `length` tokens."""

    def __init__(self, tokenizer: str, length: int) -> None:
        self.tokenizer, self.length = AutoTokenizer.from_pretrained(tokenizer), length

    def __iter__(self) -> Iterator[torch.Tensor]:
        import datasets

        left: list[int] = []
        for row in datasets.load_dataset("allenai/c4", "en", split="train", streaming=True):
            left += [*self.tokenizer(row["text"])["input_ids"], self.tokenizer.eos_token_id]
            while len(left) >= self.length:
                yield torch.tensor(left[: self.length])
                left = left[self.length :]


def counting(samples: int, length: int, vocabulary: int = 64) -> torch.Tensor:
    """Made-up sequences that count upwards from anywhere."""
    start = torch.randint(0, vocabulary, (samples, 1), generator=torch.Generator().manual_seed(0))
    return (start + torch.arange(length)) % vocabulary


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="--config tiny and sequences of numbers, for a CPU")
    parser.add_argument("-c", "--config", choices=CONFIGS, default="1b")
    parser.add_argument("-b", "--batch-size", type=count, default=8, help="of one data-parallel rank")
    parser.add_argument("--steps", type=count, default=100)
    parser.add_argument("--length", type=count, default=2048)
    parser.add_argument("--lr", type=rate, default=3e-4)
    parser.add_argument("--tokenizer", help="of the vocabulary; left out: Llama's own of that size")
    parser.add_argument("--output", type=directory, help="directory for the trained model")
    add_layout_options(parser)
    parser.set_defaults(zero=1, max_norm=1.0)
    if parser.parse_known_args(argv)[0].tiny:
        parser.set_defaults(config="tiny", length=24, lr=5e-3, precision="fp32", mbs=4)
    args = parser.parse_args(argv)
    if args.length < 2:
        parser.error(f"--length {args.length}: the first token is not predicted; give at least 2")
    if args.plugin != "3d":
        parser.error(f"--plugin {args.plugin}: this script's loop is that of 3d, at any layout, --tp 1 --pp 1 included")

    disable_existing_loggers()
    shardwright.launch_from_torch(seed=42)
    logger = get_dist_logger()
    transformers.utils.logging.set_verbosity_error()

    plugin: Any = make_plugin(args)
    assert isinstance(plugin, HybridParallelPlugin)
    logger.info(f"{plugin.mesh}", ranks=[0])
    config = LlamaConfig(max_position_embeddings=max(args.length, 4096), use_cache=False, **CONFIGS[args.config])
    with LazyInitContext():  # weights are made when the model is boosted, by each rank its own
        model: Any = LlamaForCausalLM(config)
    optimizer: Any = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler: Any = CosineAnnealingWarmupLR(optimizer=optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)

    if args.tiny:
        dataset: Any = counting(args.steps * args.batch_size * plugin.dp_size, args.length)
    else:
        llama_3 = config.vocab_size > 32000
        own = "NousResearch/Meta-Llama-3-8B" if llama_3 else "NousResearch/Llama-2-7b-hf"
        dataset = C4Blocks(args.tokenizer or own, args.length)
    dataloader: Any = plugin.prepare_dataloader(
        dataset,
        batch_size=args.batch_size,
        shuffle=args.tiny,
        drop_last=True,
        seed=42,
        collate_fn=lambda ids: {"input_ids": torch.stack(ids), "labels": torch.stack(ids)},
    )
    booster = Booster(plugin=plugin)
    with refused_in_a_line():  # a layout that does not fit the model
        model, optimizer, _, dataloader, scheduler = booster.boost(model, optimizer, None, dataloader, scheduler)

    # One of the ranks that have the loss, which are those of the last stage; where that is depends on the schedule.
    is_first = not any(plugin.mesh.coordinate(axis) for axis in ("dp", "tp", "sp"))
    batches = iter(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if result["loss"] is not None and is_first and (step == 1 or step % max(1, args.steps // 5) == 0):
            logger.info(f"step {step}: loss {result['loss'].item():.4f}, learning rate {lr:.2e}")
    if args.output:
        booster.save_model(model, args.output, shard=True)
        logger.info(f"saved to {args.output}", ranks=[0])


if __name__ == "__main__":
    main()
