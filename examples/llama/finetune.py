"""Fine-tune a Llama to follow instructions: only what it answers is learned.

    torchrun --nproc-per-node 2 examples/llama/finetune.py --tiny --tp 2
    torchrun --nproc-per-node 4 examples/llama/finetune.py --tiny --pp 2 --zero 2 --output trained
    torchrun --nproc-per-node 8 examples/llama/finetune.py --model NousResearch/Meta-Llama-3-8B --tp 2 --pp 2 -g

Instructions and answers have lengths of their own, so microbatches and ranks hold unequal numbers of tokens that are
learned. The loss is the mean over all of them, whatever the layout. (`shardwright train` does the same from a recipe.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import CONFIGS, add_layout_options, make_plugin
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR
from shardwright.trainer.tokenizer import byte_tokenizer
from shardwright.utils.options import count, directory, pretrained, rate, refused_in_a_line

PROMPT = "### Instruction:\n{instruction}\n{input}\n### Response:\n"


def instructions(tiny: bool) -> list[dict[str, str]]:
    """Alpaca's from the hub, or made-up ones."""
    if tiny:
        words = ("fox", "river", "stone", "bird", "child", "tree", "house", "road")
        return [{"instruction": f"write {a} twice", "input": b, "output": f"{a} {a}"} for a in words for b in words]
    import datasets

    return list(datasets.load_dataset("tatsu-lab/alpaca", split="train"))


def encode(row: dict[str, str], tokenizer: Any, length: int) -> dict[str, list[int]]:
    """Token ids, and labels of which those of the prompt do not count."""
    prompt = tokenizer(PROMPT.format(**row))["input_ids"]
    answer = [*tokenizer(row["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": (prompt + answer)[:length], "labels": ([-100] * len(prompt) + answer)[:length]}


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded to the longest."""

    def padded(values: list[list[int]], padding: int) -> torch.Tensor:
        rows = [torch.tensor(value) for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)

    return {
        "input_ids": padded([row["input_ids"] for row in rows], 0),
        "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
        "labels": padded([row["labels"] for row in rows], -100),
    }


def endless(dataloader: Any) -> Iterator[Any]:
    while True:
        yield from dataloader


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, made-up instructions")
    parser.add_argument("--model", type=pretrained, help="name on the hub, or directory; left out: Llama 3 8B")
    parser.add_argument("-b", "--batch-size", type=count, default=16, help="of one data-parallel rank")
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--length", type=count, default=1024, help="tokens of a sample at most")
    parser.add_argument("--lr", type=rate, default=2e-5)
    parser.add_argument("--output", type=directory, help="directory for the trained model")
    add_layout_options(parser)
    parser.set_defaults(zero=1, max_norm=1.0)
    given = parser.parse_known_args(argv)[0]
    if given.tiny and given.model:
        parser.error(f"--model {given.model}: --tiny makes a small model of its own; leave out one of them")
    if given.tiny:
        parser.set_defaults(batch_size=8, steps=8, lr=5e-3, precision="fp32", mbs=2)
    args = parser.parse_args(argv)
    if args.plugin != "3d":
        parser.error(f"--plugin {args.plugin}: this script's loop is that of 3d, at any layout, --tp 1 --pp 1 included")
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        tokenizer = byte_tokenizer()
        sizes = {**CONFIGS["tiny"], "vocab_size": len(tokenizer)}
        model: Any = LlamaForCausalLM(LlamaConfig(eos_token_id=tokenizer.eos_token_id, **sizes))
    else:
        name = args.model or "NousResearch/Meta-Llama-3-8B"
        tokenizer = AutoTokenizer.from_pretrained(name)
        with LazyInitContext():  # weights are read when the model is boosted, by each rank its own
            model = AutoModelForCausalLM.from_pretrained(name)

    rows = [encode(row, tokenizer, args.length) for row in instructions(args.tiny)]
    if not any(token >= 0 for row in rows for token in row["labels"]):
        raise SystemExit(
            f"--length {args.length} ends before the answers begin, so nothing would be learned; give more"
        )

    optimizer: Any = HybridAdam(model.parameters(), lr=args.lr)
    scheduler: Any = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    plugin: Any = make_plugin(args)
    dataloader: Any = plugin.prepare_dataloader(
        rows,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    booster = Booster(plugin=plugin)
    with refused_in_a_line():  # a layout that does not fit the model
        model, optimizer, _, dataloader, scheduler = booster.boost(model, optimizer, None, dataloader, scheduler)

    # One of the ranks that have the loss, which are those of the last stage; where that is depends on the schedule.
    is_first = not any(plugin.mesh.coordinate(axis) for axis in ("dp", "tp", "sp"))
    batches = endless(dataloader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if result["loss"] is not None and is_first:
            print(f"step {step}: loss {result['loss'].item():.4f}")
    if args.output:
        booster.save_model(model, args.output, shard=True)
        if coordinator.is_master():
            tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
